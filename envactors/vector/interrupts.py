"""What an exception in the middle of a request leaves of a vector.

It may come from a signal handler, from another thread, or from a lack of stack.
Each request notes its intent before it acts on it: the batch steps are listed before they are posted, results are
taken out after they were batched. So the next request can tell what was posted, and what was not or has been lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from envactors.actor.batch_step import StepRequest
from envactors.actor.shm_batch_step import SharedMemoryBatchStep
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.supervisor import Supervisor
from envactors.errors import ActorDiedError
from envactors.vector.env_state import EnvState
from envactors.vector.pending import IDLE, IN_FLIGHT, READY, SUBMITTED
from envactors.vector.shm_step import SharedMemoryStepper
from envactors.vector.single_results import SingleResults
from envactors.vector.transitions import Transitions

_Class = TypeVar("_Class", bound=type)


class Interrupts:
    """Brings a vector in order after an exception in the middle of a request.

    Args:
        transitions: Knows the envs, and what was asked in frames.
        stepper: Knows the batch steps in shared memory; None without any.
    """

    def __init__(self, transitions: Transitions, stepper: SharedMemoryStepper | None) -> None:
        self._transitions = transitions
        self._pending = transitions.pending
        self._pending.interrupts = weakref.ref(self)
        self._single = None if stepper is None else stepper.single

    def settle(self) -> None:
        """Find out what has become of each env that was asked: it is idle again if no result will come."""
        supervisors = dict.fromkeys(env.supervisor for env in self._transitions.envs)
        with defer_signals:
            self._transitions.episodes.changes += 1  # no batch step is used again
            held: set[int] = set()
            listed: set[int] = set()
            for supervisor in supervisors:
                self._look_up(supervisor, held, listed)
            unposted = set() if self._single is None else self._sort_out(self._single, held, listed)
            for env in self._transitions.envs:
                self._settle_env(env, held, unposted)
            self._pending.is_disturbed = False

    def _look_up(self, supervisor: Supervisor, held: set[int], listed: set[int]) -> None:
        """Add what an actor still holds: the envs of steps in frames, the ids of batch steps in shared memory."""
        core = supervisor.core
        while True:
            if core.is_inconsistent:
                core.kill_inconsistent()
            core.deferred.run()
            with core.lock:
                if core.deferred.waiting:
                    continue
                for entry in [*core.table.running, *core.table.queue]:
                    if isinstance(entry, SharedMemoryBatchStep):
                        listed.add(id(entry))
                    held.update(part.index for part in entry.parts if isinstance(part, StepRequest))
                return

    def _sort_out(self, single: SingleResults, held: set[int], listed: set[int]) -> set[int]:
        """Keep the batch steps whose results are still to come, and add their envs; return those of unposted ones."""
        states, unposted, kept = self._pending.states, set(), []
        newest = {env: step for _, step in single.running for env in step.envs}
        in_frames = self._pending.requests
        for steps, step in single.running:
            waiting = [env for env in step.envs if states[env] == IN_FLIGHT and env not in in_frames]
            mine = [env for env in waiting if newest[env] is step]
            if step.over or id(step) in listed:
                # What was claimed and did not become ready is claimed again, and nothing else.
                step.claimed = {*step.envs}.difference(mine)
                held.update(mine)
                kept.append((steps, step))
            elif step.started == 0.0:
                unposted.update(mine)
        single.running = kept
        return unposted

    def _settle_env(self, env: EnvState, held: set[int], unposted: set[int]) -> None:
        pending, env_id = self._pending, env.env_id
        state, is_there = pending.states[env_id], env_id in pending.ready
        request = pending.requests.get(env_id)
        if is_there:
            pending.states[env_id] = READY
        elif state == READY:
            pending.states[env_id] = IDLE  # it was about to be delivered
        elif state in (IN_FLIGHT, SUBMITTED) and env_id not in held:
            if request is not None and request.is_open and request.has_arrived:
                return
            pending.states[env_id] = IDLE
            pending.requests.pop(env_id, None)
            was_queued = request is None or not request.is_open or request.call_id != 0
            if was_queued and env_id not in unposted:
                self._transitions.lose_episode(env)
            if request is not None and request.future is not None:
                text = f"the {request.method} of env {env_id} was interrupted by an exception before it was sent"
                request.future.settle(None, ActorDiedError(text, aborted=True, index=env_id), env.incarnation or 0)

    def discard(self, env_ids: Iterable[int], wait: Callable[[Callable[[], bool]], object]) -> None:
        """Wait for what an interrupted request has asked of envs that are to be reset, and drop the results."""
        pending, ids = self._pending, list(env_ids)
        if pending.was_disturbed:
            wait(lambda: not any(pending.states[env_id] in (IN_FLIGHT, SUBMITTED) for env_id in ids))
            with defer_signals:
                pending.take([env_id for env_id in ids if pending.states[env_id] == READY])


def notes_interrupts(*names: str) -> Callable[[_Class], _Class]:
    """Have methods of a class note that they were interrupted in what the class has as ``_pending``."""

    def change(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, _noting(getattr(cls, name)))
        return cls

    return change


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        pending = self._pending
        before = bytes(pending.states)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            pending.note_failure(error, before)
            raise

    return cast("Callable[..., Any]", noting)
