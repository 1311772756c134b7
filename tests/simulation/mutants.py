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
        self._function: Any = vars(self._holder)[path.rpartition(".")[2]]
        self.source: str = textwrap.dedent(inspect.getsource(self._function))
        self.globals: dict[str, Any] = vars(module)

    @contextlib.contextmanager
    def replaced(self, tree: ast.Module) -> Iterator[None]:
        """Have another definition take its place for the time being."""
        function, real = self._function, self._function.__code__
        namespace: dict[str, Any] = {}
        exec(compile(tree, real.co_filename, "exec", annotations.compiler_flag), self.globals, namespace)
        other = namespace[function.__name__]
        if real.co_freevars:
            setattr(self._holder, function.__name__, other)
        else:
            function.__code__ = other.__code__  # other modules may have imported the function
        try:
            yield
        finally:
            setattr(self._holder, function.__name__, function)
            function.__code__ = real


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
        assert count == 1, f"{self.old!r} stands {count} times in {self.where}"
        with place.replaced(ast.parse(place.source.replace(self.old, self.new))):
            yield


HANGS = "nothing hangs"
MIXES = "no result is mixed up"
ONCE = "nothing uncertain runs twice"
LAST = "the last complete observation is kept"
REPLAYS = "a replay reaches the same point"
BLAMES = "who hangs is blamed"
STATES = "an env has one state"
LOSSES = "a lost episode is told of"
LIMIT = "no more run than may"
LATE = "nothing counts that comes after a deadline"
ENDED = "an env whose episode has ended repeats its last observation"
RENEWS = "old processes go"

PAGE = "mailbox.control_page:ControlPage."
SERVER = "worker.main:Server."
ENV_ROWS = "worker.env_rows:"
SLOTS = "actor.slots:Slots."
ROWS = "actor.rows:ActorRows."
FAILURES = "actor.row_failures:"
CALLS = "actor.calls:Calls."
ENDED_CALLS = "actor.calls:"
REQUESTS = "actor.requests:"
LIFECYCLE = "actor.lifecycle:Lifecycle."
DECIDE = "actor.decide:decide"
PERMITS = "actor.permits:Permits."
JOURNAL = "actor.journal:Journal."
ASKER = "vector.asking:Asker."
STEPPER = "vector.stepper:Stepper."
OUTCOMES = "vector.outcomes:Outcomes."
PENDING = "envs.pending:Pending."
PROGRESS = "rollout.progress:PartProgress."
PART = "rollout.part:ActorPart."
ROLLOUTS = "rollout.rollouts:Rollouts."
BUFFERS = "rollout.buffers:TrajectoryBuffers."
ORDER = "rollout.requests:OrderRequest."
COLUMNS = "rollout.columns:Columns."
ROLLOUT_RUNNER = "rollout.runner:RolloutRunner."

MUTANTS = [
    # The control page.
    Mutant(PAGE + "post_step", "self.to_worker.ring_open()", "pass", HANGS),
    Mutant(PAGE + "finish_step", "self.to_parent.ring_open()", "pass", HANGS),
    Mutant(PAGE + "ring_for_result", "complete() >= wanted", "complete() > wanted", HANGS),
    Mutant(PAGE + "ring_at", "self.counters[RING_AT] = count", "pass", HANGS),
    Mutant(PAGE + "ring_at_end", "self.counters[WATCHED] = call_id", "pass", HANGS),
    Mutant("actor.process:ActorProcess.send", "page.last_call = max(page.last_call, frame.call_id)", "pass", ONCE),
    # The worker.
    Mutant(SERVER + "_run_rows", "if posted_id != completed[index]:", "if True:", ONCE),
    Mutant(SERVER + "_run_rows", "not op & PAYLOAD or row.payload[0] == posted_id", "True", MIXES),
    Mutant(ENV_ROWS + "run_all", "has_failed or op & RING", "has_failed", HANGS),
    Mutant(SERVER + "_send_overflow", "self._counters[OVERFLOWS] += 1", "pass", HANGS),
    Mutant(ENV_ROWS + "EnvRow.write", "op & HALF", "0", LAST),
    Mutant(ENV_ROWS + "run_all", "op & HALF", "0", LAST),
    Mutant(ENV_ROWS + "EnvRow.write", "    self.guard.begin_write()", "    self.completed[index] = call_id", MIXES),
    Mutant(ENV_ROWS + "run_all", "guard.writer = thread", "row.completed[index] = call_id", MIXES),
    # Slots.
    Mutant(SLOTS + "plan", "self.halves[index] ^ HALF", "self.halves[index]", LAST),
    Mutant(SLOTS + "plan", "RING if op.future is not None else 0", "0", HANGS),
    Mutant(SLOTS + "plan", 'if op.method == "reset" or not resets else None', "", "options are the user's"),
    Mutant(SLOTS + "is_bound", 'op.method == "reset" or', "", LOSSES),
    Mutant(SLOTS + "lose_episodes", "slot.holds = LOST", "pass", LOSSES),
    Mutant(SLOTS + "lose_episodes", "slot.fresh = True", "pass", "an env in a new process has a seed"),
    Mutant(SLOTS + "align_halves", "self.halves[index] = half", "pass", LAST),
    Mutant(SLOTS + "align_halves", "array[half, index] = array[other, index]", "pass", LAST),
    Mutant(SLOTS + "make_idle", "self.of[index].op = None", "pass", STATES),
    Mutant(SLOTS + "note_usual", "not slot.needs_reset and", "", STATES),
    Mutant("actor.slots:Slot.seed_with", "self.episode = 0", "pass", "episodes have their seeds"),
    Mutant("actor.slots:Slot.count_episode", "self.episode += 1", "pass", "episodes have their seeds"),
    # Rows.
    Mutant(ROWS + "post", "core.table.ids.last + 1", "core.table.ids.last", ONCE),
    Mutant(ROWS + "post", "process.watch_doorbell(self._on_ring)", "pass", HANGS),
    Mutant(ROWS + "post", "core.watch(now)", "pass", HANGS),
    Mutant("actor.watch:_look", 'core.timers.set("call",', "(lambda *_: None)(None,", HANGS),
    Mutant("actor.watch:next_look", "now + shortest", "turn.started + shortest + 1000", HANGS),
    Mutant(CALLS + "submit", "table.running is not None or ", "", "no call runs beside rows"),
    Mutant(ROWS + "post_at_once", "or table.running is not None", "", "no call runs beside rows"),
    Mutant(ROWS + "post_at_once", " and not table.queue", "", "no call runs beside rows"),
    Mutant(STEPPER + "prepare", "or core.table.running is not None", "", "no call runs beside rows"),
    Mutant(ROWS + "post_at_once", "slots.unusual and not slots.unusual.isdisjoint(indices)", "False", LOSSES),
    Mutant(
        STEPPER + "arrive",
        "slots.halves[each] = slots.ops[each].translate(_HALF_OF)",
        "pass",
        LAST,
    ),
    Mutant(STEPPER + "arrive", "core.recovery.record_all(slots, indices)", "pass", REPLAYS),
    Mutant(ROWS + "is_complete", "self._completed[index] == self._numbers[index]", "True", MIXES),
    Mutant(ROWS + "take", "slot.holds = slot.incarnation", "pass", HANGS),
    Mutant(ROWS + "take", "slot.fresh = False", "pass", "a reset without a seed has none"),
    Mutant(ROWS + "take", "core.recovery.journal(index).record_row(slots, index)", "pass", REPLAYS),
    Mutant(ROWS + "take", "slots.halves[index] = bits & HALF", "pass", LAST),
    Mutant(ROWS + "settle", "self.core.deferred.waiting.append(arrive)", "pass", HANGS),
    Mutant(ROWS + "settle", "slots.outcomes[index] = outcome", "pass", "a failure is told"),
    Mutant(ROWS + "_end", "core.on_idle()", "pass", HANGS),
    Mutant(ROWS + "keep_complete", "self.take(index)", "pass", ONCE),
    Mutant(
        FAILURES + "lose", "slots.slab.posted[index] = slots.slab.completed[index] = slots.numbers[index]", "pass", ONCE
    ),
    Mutant(FAILURES + "lose", "slots.lose_episodes(rows.first, rows.stop)", "pass", LOSSES),
    Mutant(FAILURES + "lose", "core.add_first([index for index in left if rows.is_asked(index)])", "pass", HANGS),
    Mutant(FAILURES + "lose", "rows.overdue = None", "pass", BLAMES),
    Mutant(FAILURES + "lose", "Cause.RUNNING if index in begun else", "Cause.WAITING if index in begun else", ONCE),
    Mutant(FAILURES + "lose", "core.reactor.wake(rows.waiter)", "pass", HANGS),
    Mutant(FAILURES + "begun", "rows.overdue is not None", "False", BLAMES),
    Mutant(ROWS + "running", "progress.call_id == self._numbers[index]", "True", ONCE),
    Mutant(DECIDE, "failed.cause is not Cause.WAITING and not is_aborted", "not is_aborted", HANGS),
    Mutant(
        FAILURES + "_act",
        "slot.op = Op(op.method, True",
        "slot.op = Op(op.method, False",
        "an env that failed is reset",
    ),
    Mutant(FAILURES + "_act", "slot.count_episode()", "pass", "episodes have their seeds"),
    Mutant(FAILURES + "turn", "rows.posted()[0] if running is None else running", "rows.posted()[0]", BLAMES),
    Mutant(FAILURES + "fail_lost", "group.indices.remove(index)", "pass", STATES),
    Mutant(ROWS + "withdraw", "group.indices.remove(index)", "pass", "what was cancelled does not run"),
    Mutant(ROWS + "post_waiting", "self.core.reactor.wake(self.waiter)", "pass", HANGS),
    Mutant(ROWS + "watch_end", "process.page.ring_at_end(self.last)", "pass", HANGS),
    Mutant(ROWS + "watch_end", "process.watch_doorbell(self._on_ring)", "pass", HANGS),
    Mutant(ROWS + "watch_end", "self.arrive_for_others()", "pass", HANGS),
    Mutant(ROWS + "_fetch_overflow", "if not self._receive(READABLE):", "if True:", "a large info comes"),
    # What becomes of failures.
    Mutant(DECIDE, "failed.cause is Cause.WAITING and (", "failed.cause is not Cause.RAISED and (", ONCE),
    Mutant(FAILURES + "fail", "journal.count_failure()", "pass", "no third time"),
    Mutant(DECIDE, "else Fate.FAIL", "else Fate.REPORT", LOSSES),
    Mutant(FAILURES + "_act", 'slots.autoreset == "next_step"', "False", "an env that failed is reset"),
    Mutant(FAILURES + "fail", "core.closing or not core.lives", "core.closing", HANGS),
    Mutant(
        FAILURES + "_act",
        "fate in (Fate.REDO, Fate.RESET, Fate.TRUNCATE)",
        "fate in (Fate.REDO, Fate.RESET)",
        "its process is discarded",
    ),
    Mutant("actor.exit_decision:decide_call", " and retries > 0", "", ONCE),
    Mutant("actor.exit_decision:decide_call", "return Fate.HOLD", "return Fate.DROP", HANGS),
    Mutant("actor.exit_decision:decide_call", "return Fate.FAIL\n    if kind", "return Fate.HOLD\n    if kind", HANGS),
    # Calls.
    Mutant(ENDED_CALLS + "take_running", "table.queue.appendleft(call)", "pass", HANGS),
    Mutant(ENDED_CALLS + "take_running", "process.page.progress().call_id == call.call_id", "False", ONCE),
    Mutant(ENDED_CALLS + "take_running", "core.permits.withdraw(core)", "pass", LIMIT),
    Mutant(ENDED_CALLS + "settle_running", "call.retries -= 1", "pass", ONCE),
    Mutant("actor.future:ActorFuture.settle", "self._owner.reactor.wake(self)", "pass", HANGS),
    Mutant(CALLS + "dispatch", "rows.watch_end()  #", "pass  #", HANGS),
    Mutant(CALLS + "dispatch", "is not None) and rows.has_posted()", "is not None) and rows.is_in_flight()", HANGS),
    Mutant(CALLS + "_record", "not core.recovery.journal(call.index).record(call, frame)", "False", REPLAYS),
    Mutant(CALLS + "_send", "core.watch(call.started, call.timeout)", "pass", HANGS),
    Mutant(FAILURES + "fail_group", "fail(rows, index, Cause.WAITING, error(rows.request(index)))", "pass", HANGS),
    Mutant(
        REQUESTS + "RequestTable.interrupt",
        "running, self.running = self.running, None",
        "running = self.running",
        ONCE,
    ),
    Mutant(
        REQUESTS + "RequestTable.withdraw",
        "self.withdraw_calls(lambda call: call.future is future)",
        "[entry for entry in self.queue if isinstance(entry, CallRequest) and entry.future is future]",
        "what was cancelled does not run",
    ),
    Mutant(REQUESTS + "RequestTable.withdraw_calls", "self.queue.remove(call)", "pass", HANGS),
    Mutant(REQUESTS + "CallRequest.turn", "progress.since) if", "self.started) if", BLAMES),
    # Processes.
    Mutant(LIFECYCLE + "_after_exit", "self.calls.fail_lost()", "pass", LOSSES),
    Mutant(LIFECYCLE + "relaunch", "self._core.incarnation += 1", "pass", MIXES),
    Mutant(LIFECYCLE + "_go_on", 'core.timers.set("backoff", now + delay)', "pass", HANGS),
    Mutant(LIFECYCLE + "_on_start_reply", "self.calls.dispatch()", "pass", HANGS),
    Mutant(LIFECYCLE + "_on_start_reply", "core.recovery.replay_requests()", "[]", REPLAYS),
    Mutant(LIFECYCLE + "_on_start_reply", "self.calls.fail_lost()", "pass", LOSSES),
    Mutant(LIFECYCLE + "end", "process.worker.kill()", "pass", HANGS),
    Mutant(LIFECYCLE + "settle_dead", "core.phase is DEAD and core.queue", "False", HANGS),
    Mutant(LIFECYCLE + "_fail_first", "row_failures.fail_group(rows, first, error)", "pass", HANGS),
    Mutant("actor.supervisor:Supervisor.on_timer", 'core.timers.set("kill", now + _STACKS_GRACE)', "pass", HANGS),
    # Permits.
    Mutant(PERMITS + "release", "self._holders.remove(holder)", "pass", LIMIT),
    Mutant(PERMITS + "acquire", "len(self._holders) < self._count and ", "", LIMIT),
    Mutant("actor.core:ActorCore.on_idle", "self.permits.release(self)", "pass", LIMIT),
    # Journals.
    Mutant(JOURNAL + "count_failure", "self._failed_at = self._size", "pass", "no third time"),
    Mutant(JOURNAL + "grow", "self._check = check", "pass", REPLAYS),
    Mutant(JOURNAL + "record_row", "resets=bool(bits & RESET)", "resets=False", REPLAYS),
    Mutant(JOURNAL + "record_row", "self.start_seeded(", "(lambda *_: None)(", REPLAYS),
    Mutant("actor.journal:Journals.record_all", "resets=bool(bits & RESET)", "resets=False", REPLAYS),
    # The vector.
    Mutant(ASKER + "queue_envs", "slots.states[env_id] = ASKED", "pass", STATES),
    Mutant(ASKER + "_retire", "supervisor.calls.queue_renewal()", "pass", "old processes go"),
    Mutant(ASKER + "start_resets", "slot.seed_with(op.seed)", "pass", "episodes have their seeds"),
    Mutant(STEPPER + "write_rows", "slots.align_halves(slots.halves[0])", "pass", LAST),
    Mutant(
        STEPPER + "write_rows",
        "ops[env_id] |= RESET",
        "pass",
        "an ended episode is reset",
    ),
    Mutant(STEPPER + "listen", "ears.heard.get(actor) is not process.page", "actor not in ears.heard", HANGS),
    Mutant("vector.steps:Step.is_finished", "part.rows.last != self.number", "False", HANGS),
    Mutant(FAILURES + "lose", "rows.last = 0", "pass", HANGS),
    Mutant(STEPPER + "gather", "slots.states[each] = slots.zeros[each]", "pass", STATES),
    Mutant(
        "vector.collector:Collector._is_there",
        "self._suffice(self._arrive(), count)  #",
        "self._suffice(arrived, count)  #",
        HANGS,
    ),
    Mutant("vector.collector:Collector._is_there", "min(max(1, expected), missing)", "missing + 1", HANGS),
    Mutant(OUTCOMES + "read", "slots.of[index].op = None", "pass", STATES),
    Mutant(OUTCOMES + "read_for_future", "slots.make_idle(index)", "pass", STATES),
    Mutant(OUTCOMES + "_read", "slots.outcomes.pop(index, None)", "pass", STATES),
    Mutant(OUTCOMES + "_read", "self._reader.last(index, before=True)", "self._reader.last(index)", LAST),
    Mutant(OUTCOMES + "_fail", "core.add_first([index])", "pass", HANGS),
    Mutant(OUTCOMES + "_fail", "core.send_waiting()", "pass", HANGS),
    Mutant(OUTCOMES + "_as_result", "over and bits & NO_AUTORESET", "False", "an episode that ended is reset"),
    Mutant(
        OUTCOMES + "_reset_in_next_process",
        "supervisor.calls.queue_renewal()",
        "pass",
        RENEWS,
    ),
    Mutant(PENDING + "take", "self.slots.states[env_id] = IDLE", "pass", STATES),
    Mutant(PENDING + "in_flight", "not in (IDLE, READY)", "== 2", "nothing is handed out too early"),
    Mutant("envs.episodes:Episodes.record", "slot.needs_reset = False", "pass", STATES),
    Mutant("actor.future:ActorFuture._read_here", "setdefault(read, me)", "setdefault(None, me)", HANGS),
    Mutant("actor.future:ActorFuture.arrive", "if self._waiting:", "if True:", HANGS),
    # Rollouts.
    Mutant(PROGRESS + "_count_steps", "slot.holds = slot.incarnation", "pass", LOSSES),
    Mutant(PROGRESS + "_count_steps", "self._record(index, before, done)", "pass", REPLAYS),
    Mutant(PROGRESS + "_keep", "array[done, mine]", "array[done - 1, mine]", LAST),
    Mutant(PROGRESS + "count", "whole = self.late.done", "pass", LATE),
    Mutant(PROGRESS + "be_late", ".copy() if is_known", " if is_known", LATE),
    Mutant(PROGRESS + "forget_later", "self.late = None", "pass", MIXES),
    Mutant(PROGRESS + "forget_later", "self.trajectory.done[index] = self.counted[index]", "pass", LATE),
    Mutant(PROGRESS + "forget_later", "min(chosen[self._first], self.step + 1)", "chosen[self._first]", LATE),
    Mutant(PART + "hand_over", "in_policy = late.in_policy", "pass", BLAMES),
    Mutant(PART + "hand_over", "rows.overdue = None if in_policy else self.first + late.position", "pass", BLAMES),
    Mutant(PART + "hand_over", "self.progress.repeat_ended(self.progress.left(), step)", "self.progress.left()", ENDED),
    Mutant(PART + "_lost", "if not self.progress.repeats(index)", "", ENDED),
    Mutant(PART + "_go_on", "[] if core.closing else", "", HANGS),
    Mutant(
        PART + "begin", "self.errors.update(_errors_of_lost(self._slots, self._envs, self._lost_before))", "", LOSSES
    ),
    Mutant(
        PART + "order",
        "due = [index for index in self.progress.left() if index not in lost]",
        "due = list(self._envs)",
        ONCE,
    ),
    Mutant(PART + "order", "step + 1 if lost else self._steps", "self._steps", LOSSES),
    Mutant(PART + "on_reply", "self.progress.count()", "pass", MIXES),
    Mutant(PART + "on_end", "self._set_policy()", "self.ask()", HANGS),
    Mutant(PART + "_leave_to_rows", "rows.arrive_for_others()", "pass", HANGS),
    Mutant(PART + "_own", " and self.trajectory.layout.action is not None", "", HANGS),
    Mutant(PART + "_send", "if core.closing:", "if False:", HANGS),
    Mutant(PART + "move", "trajectory.take_columns(self.trajectory, self.first, self.stop)", "pass", LAST),
    Mutant(BUFFERS + "take", "buffer not in used and ", "", MIXES),
    Mutant(
        ROLLOUTS + "start",
        "ready = [part for part in run.parts if self._first_part(part.supervisor) is None]",
        "ready = run.parts",
        MIXES,
    ),
    Mutant(ROLLOUTS + "_on_part_end", "_begin(following, self._slots)", "pass", HANGS),
    Mutant(ROLLOUTS + "_rest", "self._slots.make_all_idle()", "pass", STATES),
    Mutant(ORDER + "hand_over", "self._was_lost = True", "pass", HANGS),
    Mutant(ORDER + "_note_policy", 'self.method = "policy"', "pass", BLAMES),
    Mutant(
        ROLLOUTS + "_settle",
        "while self._runs and not self._runs[0].unsettled:\n            self._runs.pop(0)",
        "if not run.unsettled:\n            self._runs.remove(run)",
        "a rollout is in flight until those before it have ended",
    ),
    Mutant(ROLLOUTS + "_settle", "run.unsettled.discard(future)", "run.unsettled.clear()", MIXES),
    Mutant(COLUMNS + "_repeat", "self._checks[row] = hosted.check", "pass", REPLAYS),
    Mutant(COLUMNS + "_write", "self._only_obs[step + 1, index] = obs", "self._only_obs[step, index] = obs", LAST),
    Mutant(COLUMNS + "run", "cells[cell : cell + size] = obs", "pass", MIXES),
    Mutant(COLUMNS + "_write_turn", "column.end_episode(autoreset)", "pass", STATES),
    Mutant(COLUMNS + "clear", "flags[...] = 0", "pass", "a row says what became of its env"),
    Mutant("rollout.columns:Column.begin_episode", "self._episode += 1", "pass", "episodes have their seeds"),
    Mutant(
        ROLLOUT_RUNNER + "run", "parameters.version != self._version", "self._version == 0", "the last parameters count"
    ),
]
