"""Bugs that are planted one by one: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple


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
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"envactors.{module_name}")
        *parents, name = path.split(".")
        holder: Any = module
        for parent in parents:
            holder = getattr(holder, parent)
        real = vars(holder)[name]
        source = textwrap.dedent(inspect.getsource(real))
        assert source.count(self.old) == 1, f"{self.old!r} stands {source.count(self.old)} times in {self.where}"
        flags = annotations.compiler_flag
        namespace: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), module.__file__ or "", "exec", flags), vars(module), namespace)
        setattr(holder, name, namespace[name])
        try:
            yield
        finally:
            setattr(holder, name, real)


HANGS = "nothing hangs"
MIXES = "no result is mixed up"
ONCE = "nothing uncertain runs twice"

PAGE = "wire.control_page:ControlPage."
RUNNER = "worker.step_runner:"
CALLS = "actor.calls:Calls."
LIFECYCLE = "actor.lifecycle:Lifecycle."
STEPS = "actor.shm_batch_step:"

MUTANTS = [
    Mutant(PAGE + "post_step", "self.to_worker.ring_open()", "pass", HANGS),
    Mutant(PAGE + "finish_step", "self.to_parent.ring_open()", "pass", HANGS),
    Mutant(PAGE + "ring_for_result", "complete() >= wanted", "complete() > wanted", HANGS),
    Mutant(PAGE + "ring_at", "self.counters[RING_AT] = count", "pass", HANGS),
    Mutant(PAGE + "ring_at_end", "self.counters[WATCHED] = call_id", "pass", HANGS),
    Mutant(RUNNER + "EnvRow.write", "number & 1", "0", "the last complete observation is kept"),
    Mutant(RUNNER + "StepRunner.run_rows", "if number != completed[index]:", "if True:", ONCE),
    Mutant(
        RUNNER + "EnvRow.write",
        "half, fault, overflow = number & 1, _RAISED, None\n",
        "half, fault, overflow = number & 1, _RAISED, None\n    self._completed[index] = number\n",
        MIXES,
    ),
    Mutant(CALLS + "interrupt", "waiting += others", "pass", HANGS),
    Mutant(CALLS + "interrupt", "entry.record(core.recovery, kept)", "pass", "a replay reaches the same point"),
    Mutant(CALLS + "settle_running", "running.retries -= decision.spends_retry", "pass", ONCE),
    Mutant(CALLS + "_settle", "self._core.reactor.wake(request.future)", "pass", HANGS),
    Mutant(CALLS + "dispatch", "self.steps.watch_end()", "pass", HANGS),
    Mutant(LIFECYCLE + "_after_exit", "self.calls.fail_bound(lost)", "pass", MIXES),
    Mutant(LIFECYCLE + "relaunch", "self._core.incarnation += 1", "pass", MIXES),
    Mutant(LIFECYCLE + "_go_on", 'core.timers.set("backoff", now + delay)', "pass", HANGS),
    Mutant(LIFECYCLE + "_on_start_reply", "self.calls.dispatch()", "pass", HANGS),
    Mutant(LIFECYCLE + "end", "process.worker.kill()", "pass", HANGS),
    Mutant("actor.exit_decision:_restart", "discarded or facts.retries == 0", "discarded", ONCE),
    Mutant("actor.exit_decision:_restart", "if facts.can_retry:", "if True:", HANGS),
    Mutant(STEPS + "SharedMemoryBatchStep.arm", "self.claimed = set()", "pass", HANGS),
    Mutant(STEPS + "SharedMemorySteps.start", "process.page is not step.page or ", "", HANGS),
    Mutant(STEPS + "SharedMemorySteps.claim", "step.claimed.update(claimed)", "pass", MIXES),
    Mutant(STEPS + "SharedMemorySteps.retire", "step.over = retired = True", "retired = True", HANGS),
    Mutant("actor.future:ActorFuture._read_here", "setdefault(read, me)", "setdefault(None, me)", HANGS),
    Mutant("actor.future:ActorFuture.arrive", "if self._waiting:", "if True:", HANGS),
    Mutant("actor.permits:Permits.release", "self._holders.remove(table)", "pass", HANGS),
    Mutant(LIFECYCLE + "_on_start_reply", "core.recovery.replay_requests(core.config.deadlines)", "[]", "replay"),
    Mutant(LIFECYCLE + "settle_dead", "core.phase is DEAD and core.table.queue", "False", HANGS),
    Mutant(
        "vector.transitions:Transitions._ask_again",
        "self._deliver(again, None, error, env.incarnation or 0)",
        "raise",
        HANGS,
    ),
    Mutant("actor.journal:Journal.count_failure", "self._failed_at = self._size", "pass", "no third time"),
    Mutant("actor.permits:Permits.acquire", "len(self._holders) < self._count and ", "", "max_running"),
    Mutant("actor.supervisor:Supervisor._on_call_timer", 'core.timers.set("kill", now + _STACKS_GRACE)', "pass", HANGS),
]
