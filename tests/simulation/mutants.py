"""Bugs that are planted one by one: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple


class Place:
    """A function of the package.

    Args:
        where: Its name, as ``module:Class.name`` below the package.

    Attributes:
        source: Its source, which begins in the first column.
        globals: The names of its module.
    """

    def __init__(self, where: str) -> None:
        module_name, _, path = where.partition(":")
        module = importlib.import_module(f"envactors.{module_name}")
        self._holder: Any = functools.reduce(getattr, path.split(".")[:-1], module)
        self._attribute: Any = vars(self._holder)[path.rpartition(".")[2]]
        self._function: Any = _function_of(self._attribute)
        self.source: str = textwrap.dedent(inspect.getsource(self._function))
        self.globals: dict[str, Any] = vars(module)

    @contextlib.contextmanager
    def replaced(self, tree: ast.Module) -> Iterator[None]:
        """Have another definition take its place for the time being."""
        function, real = self._function, self._function.__code__
        namespace: dict[str, Any] = {}
        exec(compile(tree, real.co_filename, "exec", annotations.compiler_flag), self.globals, namespace)
        other = _function_of(namespace[function.__name__])
        if real.co_freevars:
            setattr(self._holder, function.__name__, other)
        else:
            function.__code__ = other.__code__  # other modules may have imported the function
        try:
            yield
        finally:
            setattr(self._holder, function.__name__, self._attribute)
            function.__code__ = real


def _function_of(attribute: Any) -> Any:
    """Return a function, or the one behind a property."""
    return attribute.fget if isinstance(attribute, property) else attribute


class Mutant(NamedTuple):
    """A bug: a piece of a function that is replaced by another.

    Attributes:
        where: The function, as ``module:Class.name`` below the package.
        old: The piece.
        new: What takes its place.
        promise: What it breaks.
    """

    where: str
    old: str
    new: str
    promise: str

    def __str__(self) -> str:
        return f"{self.where}: {self.old!r} becomes {self.new!r} ({self.promise})"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Plant it for the time being."""
        place = Place(self.where)
        count = place.source.count(self.old)
        assert count == 1, (
            f"tests/simulation/mutants.py quotes {self.old!r}, which stands {count} times in {self.where}: "
            "change the quote with the source, so that this bug can still be planted"
        )
        with place.replaced(ast.parse(place.source.replace(self.old, self.new))):
            yield


HANGS = "nothing hangs"
MIXES = "no result is mixed up"
ONCE = "nothing uncertain runs twice"
LAST = "the last complete observation is kept"
REPLAYS = "a replay reaches the same point"
BLAMES = "the step that hangs is blamed"
STATES = "an env has one state"
LOSSES = "a lost episode is reported"
LATE = "a result that comes after its deadline does not count"
RENEWS = "old processes are replaced"
ORDER = "requests run in the order in which they were made"
SEEDS = "episodes have their seeds"
INTERRUPTS = "after an interrupt, a reset is all that it takes"

PAGE = "mailbox.control_page:ControlPage."
SERVER = "worker.main:Server."
ENV_ROW = "worker.env_rows:EnvRow."
ACTOR = "actor.actor:Actor."
STARTER = "actor.starter:ProcessStarter."
QUEUE = "actor.job_queue:JobQueue."
FUTURE = "actor.future:ActorFuture."
LOAN = "actor.loan:ChannelLoans."
LOCAL = "backends.local:LocalWorker."
CHANGE = "actor.change:"
JOB = "actor.job:"
CALLS = "actor.calls:"
EXITS = "actor.actor_process:"
LAUNCHER = "runtime:Launcher."
WATCH = "actor.timers:DeadlineWatch."
ENVS = "vector.env_group:EnvGroup."
QUEUED_ROWS = "vector.row_jobs:QueuedRows."
ROWS_JOB = "vector.row_jobs:RowsJob."
ENV_RECOVERY = "vector.env_recovery:EnvRecovery."
TABLE = "vector.table:EnvTable."
ROWS = "vector.rows:Rows."
LAST_ROWS = "vector.last_rows:LastRows."
ENGINE = "vector.engine:RowEngine."
WAITING = "vector.waiting:ResultWaiters."
EPISODES = "vector.episodes:Episodes."
FATES = "vector.fates:"
RESET_ANSWER = "vector.requests:ResetAnswer."
JOURNAL = "replay:Journal."

MUTANTS = [
    # The control page and the worker.
    Mutant(PAGE + "post_step", "self.to_worker.ring_open()", "pass", HANGS),
    Mutant(PAGE + "finish_step", "self.to_parent.ring_open()", "pass", HANGS),
    Mutant(SERVER + "_run_rows", "posted_id != written_ids[index]", "True", ONCE),
    Mutant(PAGE + "ring_for_result", "always or", "", HANGS),
    Mutant(ENV_ROW + "write", "self.written_ids[index] = call_id", "self.written_ids[index] = call_id - 1", HANGS),
    Mutant(ENV_ROW + "write", "self._send_overflow(index, overflow)", "pass", HANGS),
    Mutant(ENV_ROW + "_write_arrays", "self.hosted.checksum\n", "0\n", REPLAYS),
    Mutant(ENV_ROW + "begin", "counters[BEGUN] = call_id", "pass", BLAMES),
    # The jobs of an actor.
    Mutant(QUEUE + "on_reply", "self.unfinished.pop(job, None)", "pass", STATES),
    Mutant(QUEUE + "on_reply", "self.dispatch()", "pass", HANGS),
    Mutant(QUEUE + "dispatch_own", "running.request_end_ring()", "pass", HANGS),
    Mutant(QUEUE + "enqueue", "sum(other.runs_first for other in self.waiting)", "len(self.waiting)", ORDER),
    Mutant(QUEUE + "try_run_rows", "or self.waiting ", "", ORDER),
    Mutant(QUEUE + "withdraw", "self.waiting.remove(job)", "pass", ONCE),
    Mutant(QUEUE + "withdraw", "self._forget(job)", "pass", STATES),
    Mutant(QUEUE + "end", "self.dispatch()", "pass", HANGS),
    Mutant(QUEUE + "fail", "self._forget(job)", "pass", STATES),
    Mutant(QUEUE + "fail_renewal", "self.fail(renewal, error_of)", "pass", HANGS),
    Mutant(QUEUE + "end_renewal", "renewal.end(incarnation)", "pass", HANGS),
    Mutant(QUEUE + "start_in_process", "self.dispatch()", "pass", HANGS),
    Mutant(
        QUEUE + "start_in_process", "self.waiting.extendleft(reversed(first))", "self.waiting.extend(first)", REPLAYS
    ),
    Mutant(QUEUE + "drop_with_process", "self.waiting.remove(job)", "pass", REPLAYS),
    Mutant(QUEUE + "drop_with_process", "self._forget(job)", "pass", STATES),
    Mutant(QUEUE + "handle_exit", "self.renewal = job", "pass", HANGS),
    Mutant(QUEUE + "handle_exit", "self.waiting.appendleft(job)", "self.waiting.append(job)", ORDER),
    Mutant(QUEUE + "handle_exit", "self._forget(job)", "pass", STATES),
    Mutant(QUEUE + "repair", "self.fail(job, error_of)", "pass", INTERRUPTS),
    # The actor: callers and frames.
    Mutant(ACTOR + "on_frame", "self.phase is LIVE", "False", HANGS),
    Mutant(ACTOR + "abort", "future.set_exception", "(lambda error: None)", HANGS),
    Mutant(ACTOR + "_check_deadlines", "self.jobs.running.on_late(activity)", "pass", LATE),
    # The actor: starts and exits.
    Mutant(STARTER + "_on_launched", "worker.kill()", "pass", HANGS),
    Mutant(STARTER + "end_start", "self._actor.runtime.launcher.finish(self._launch)", "pass", HANGS),
    Mutant(ACTOR + "on_exit", "for frame in worker.drain():", "for frame in ():", MIXES),
    Mutant(ACTOR + "finish_process", "self.tenant.collect_completed()", "pass", LOSSES),
    Mutant(ACTOR + "finish_process", "self.starter.end_start()", "pass", HANGS),
    Mutant(ACTOR + "_on_started", "self.starter.end_start()", "pass", HANGS),
    Mutant(ACTOR + "finish_process", "self.tenant.handle_exit(process_exit)", "pass", LOSSES),
    Mutant(ACTOR + "_carry_out", "self._fail_jobs_of_dead()", "pass", HANGS),
    Mutant(ACTOR + "_fail_jobs_of_dead", "self._start_next_process()", "pass", HANGS),
    Mutant(ACTOR + "repair", "self.tenant.repair(error_of)", "pass", INTERRUPTS),
    Mutant(ACTOR + "repair", "self.end_now(reason)", "pass", INTERRUPTS),
    Mutant(CHANGE + "ChangeLock.change", "self._repair()", "pass", INTERRUPTS),
    Mutant(
        CHANGE + "_Scope.__exit__", "lock._actors, lock._changing_frame, lock._bug = (), None, None", "pass", INTERRUPTS
    ),
    Mutant(ACTOR + "end_now", "self.proceed_soon()", "pass", HANGS),
    Mutant(ACTOR + "end_now", "self.process.record_end_reason(reason)", "pass", BLAMES),
    Mutant(ACTOR + "end_now", "self.process.kill()", "pass", HANGS),
    Mutant(ACTOR + "_close", "self.jobs.fail_all", "(lambda error_of: self.jobs.waiting.clear())", HANGS),
    Mutant(ACTOR + "_end_after_reading", "self._enter_stopping(reason)", "pass", RENEWS),
    Mutant(LAUNCHER + "finish", "self._pool.submit(self._begin_next)", "pass", HANGS),
    Mutant(WATCH + "stop", "self.next_check_at = math.inf", "pass", HANGS),
    # Decisions about calls.
    Mutant(
        CALLS + "Call.handle_exit",
        "(self.retries > 0 and process_exit.allows_retry)",
        "process_exit.allows_retry",
        ONCE,
    ),
    Mutant(
        JOB + "Job.settle_uncompleted", "progress().call_id == self.call_id", "progress().call_id != self.call_id", ONCE
    ),
    Mutant(
        CALLS + "Call.on_reply", "actor.tenant.on_call(self.kind, self.index, self.payload, frame)", "pass", REPLAYS
    ),
    Mutant(CALLS + "Call.start", "actor.deadline_watch.watch(self.started_at, self.deadline)", "pass", HANGS),
    Mutant(CALLS + "Call.handle_exit", "self.future.set_exception(process_exit.error)", "pass", HANGS),
    Mutant(CALLS + "ReplayJob.start", "actor.deadline_watch.watch(self.started_at)", "pass", HANGS),
    Mutant(CALLS + "Call.handle_exit", "self.retries -= 1", "pass", ONCE),
    # Waiting.
    Mutant(FUTURE + "_wake_others", "self._ended.set()", "pass", HANGS),
    Mutant(LOCAL + "take_back", "self._loop.set_lent(self._channel_fd, False)", "pass", HANGS),
    Mutant(LOAN + "_check", "self.end()", "pass", HANGS),
    Mutant(WAITING + "on_process_change", "self._process_changes += 1", "pass", HANGS),
    Mutant(WAITING + "wait", "if missing and (until_failure", "if False and (until_failure", HANGS),
    Mutant(WAITING + "wait", "                missing = count_missing()\n", "", HANGS),
    Mutant(WAITING + "_count", "min(written + missing, count)", "count", HANGS),
    Mutant(TABLE + "record_outcome", "self.waiters.ring()", "pass", HANGS),
    # The rows of an actor.
    Mutant(ROWS_JOB + "begin", "any(table.request(index).future is not None for index in ids)", "False", HANGS),
    Mutant(ENVS + "recover", "if again:", "if ():", STATES),
    Mutant(TABLE + "end_process", "self.episodes.on_process_lost(index)", "pass", LOSSES),
    Mutant(ROWS + "end_process", "self.overdue.difference_update(envs)", "pass", LATE),
    Mutant(TABLE + "miss_deadline", "self.rows.overdue.add(index)", "pass", LATE),
    Mutant(TABLE + "add_overflow", "self.waiters.ring()", "pass", HANGS),
    Mutant(ENVS + "_enqueue_new", "if reason := self._renewal_reason(ids):", "if reason := None:", RENEWS),
    Mutant(TABLE + "set_idle", "self.last_rows.take_row(index)", "pass", LAST),
    Mutant(ROWS_JOB + "_find_culprit", "return running", "return rows[-1]", BLAMES),
    Mutant(ENV_RECOVERY + "_on_replayed", "self._table.episodes.resume(index)", "pass", REPLAYS),
    Mutant(TABLE + "clear", "self.set_idle([index])", "pass", INTERRUPTS),
    Mutant(QUEUED_ROWS + "ids", " and queued_in[index] is self", "", ORDER),
    Mutant(QUEUED_ROWS + "fail", "self.ids:", "():", HANGS),
    Mutant(ROWS_JOB + "request_end_ring", "worker.watch_rings(self.on_ring)", "pass", HANGS),
    Mutant(ENVS + "collect_completed", "self.recover(losses)", "pass", HANGS),
    Mutant(TABLE + "begin_process", "self.waiters.on_process_change()", "pass", HANGS),
    Mutant(
        ENVS + "on_call",
        "table.journals.flushed(index).record_call(kind, bytes(payload), failed=failed)",
        "pass",
        REPLAYS,
    ),
    Mutant(ENVS + "handle_exit", "self.table.end_process(self.indices)", "pass", ONCE),
    Mutant(ENVS + "repair", "table.clear(index)", "pass", INTERRUPTS),
    Mutant(ROWS + "is_complete", " or index in self.overflow", "", MIXES),
    Mutant(TABLE + "begin_seeds", "self.episodes.set_root_seed(index, seed)", "pass", SEEDS),
    Mutant(
        TABLE + "write_requests", "self.last_rows.ops.translate(_NEXT_STEP_OP[streams])", "self.last_rows.ops[:]", LAST
    ),
    Mutant(ROWS + "post", "self.overflow.pop(index, None)", "pass", MIXES),
    Mutant(LAST_ROWS + "take_rows", "self.ops[:] = self._rows.ops", "pass", LAST),
    Mutant(LAST_ROWS + "take_row", "self.ops[index] = op | RESET if", "op | RESET if", LAST),
    Mutant(TABLE + "set_idle", "self.outcomes.pop(index, None)", "pass", STATES),
    Mutant(ENVS + "repair", "future.set_outcome", "(lambda outcome: None)", INTERRUPTS),
    # The engine.
    Mutant(TABLE + "deliver_rows", "self.journals.record(envs.ids, is_all=envs.is_all)", "pass", REPLAYS),
    Mutant(ENGINE + "make_idle", "table.set_idle(envs.ids)", "pass", HANGS),
    Mutant(ENGINE + "_post_or_queue", "are_on_fast_path or not group.must_queue(ids)", "True", LOSSES),
    # Episodes and recovery.
    Mutant(EPISODES + "_await_reset", "self.autoreset.resets_next_step", "False", STATES),
    Mutant(EPISODES + "end_without_result", "(0 if awaits_autoreset else NEEDS_RESET)", "0", LOSSES),
    Mutant(EPISODES + "advance_seed", "self.episode_numbers[index] += 1", "pass", SEEDS),
    Mutant(FATES + "_choose_fate", "is_over else EnvFate.FAIL", "is_over else EnvFate.REPORT", LOSSES),
    Mutant(FATES + "_runs_again", "facts.can_replay or not facts.reports_lost_episode", "True", LOSSES),
    Mutant(ENV_RECOVERY + "apply_fate", "journal.count_crash()", "pass", "no third time"),
    Mutant(
        ENV_RECOVERY + "apply_fate",
        "(posted.resets_within_step and loss.episode_is_over)",
        "False",
        SEEDS,
    ),
    Mutant(ENV_RECOVERY + "_request_reset", "answer._replace(error=error)", "answer", LOSSES),
    Mutant(RESET_ANSWER + "complete", "truncated=self.truncates", "truncated=False", LOSSES),
    Mutant(RESET_ANSWER + "complete", "step._replace(leaves=reset.leaves, ", "step._replace(", MIXES),
    Mutant(EPISODES + "on_process_lost", "EPISODE_LOST if self.has_episode(index) else 0", "0", LOSSES),
    Mutant(EPISODES + "resume", "| NEW_PROCESS | RETIRING", "| RETIRING", SEEDS),
    Mutant(EPISODES + "seed_of_reset", "and incarnation > 0", "and False", SEEDS),
    Mutant(ENV_RECOVERY + "resolve_or_retry", "table.record_outcome(index, outcome)", "pass", HANGS),
    # Journals.
    Mutant(JOURNAL + "_grow", "self._checksum = checksum", "pass", REPLAYS),
    Mutant(JOURNAL + "record_row", "bytes([is_reset])", "bytes([False])", REPLAYS),
    Mutant(JOURNAL + "record_row", "self.begin(", "(lambda *_: None)(", REPLAYS),
    Mutant(JOURNAL + "can_retry", " and self._cost_at_crash != self._cost", "", "no third time"),
    Mutant(JOURNAL + "record_steps", "steps.resets.extend(resets)", "steps.resets.extend(bytes(len(resets)))", REPLAYS),
    Mutant(JOURNAL + "forget", "self.can_replay = False", "pass", REPLAYS),
]
