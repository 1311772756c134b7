"""Starting steps and resets in frames, and what becomes of each outcome, whichever way the step went.

    reset, step, submit ──▶ EnvRequest ──▶ the actor (a FrameBatchStep of its envs)
                                             │ outcome, in the thread that reads replies
    Pending or a future ◀── delivered ◀── on_end ──asked again──▶ the actor

A batch step in shared memory comes here when something is out of the ordinary: an env has raised, or its process has
ended before the env's turn.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from envactors.actor.batch_step import StepRequest
from envactors.actor.future import ActorFuture
from envactors.actor.reactor import Reactor
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.supervisor import Supervisor
from envactors.arrays.specs import Spec, split_batch
from envactors.errors import ActorClosedError, ActorDiedError, ActorError, SerializationError
from envactors.vector.env_state import EnvState, check_steppable
from envactors.vector.episodes import Episodes
from envactors.vector.failure_policy import Action, Failed, OnFailure, decide_failure
from envactors.vector.pending import IDLE, IN_FLIGHT, SUBMITTED, Pending, ReadyResult
from envactors.vector.results import EnvStep, LastResults
from envactors.wire.messages import Reset, Step, Transition


class EnvFuture(ActorFuture):
    """The future of one env's step or reset; resolves to an `EnvStep`.

    Attributes:
        env_id: The env.
    """

    def __init__(self, env: EnvState, pending: Pending) -> None:
        super().__init__(env.supervisor, env.handle._lifeline)
        self.env_id = env.env_id
        self._pending = pending

    def _wait(self, deadline: float | None) -> None:
        try:
            super()._wait(deadline)
        except BaseException as error:
            self._pending.note_failure(error)
            raise

    def mark_cancelled(self) -> None:
        super().mark_cancelled()
        self._pending.states[self.env_id] = IDLE
        self._pending.requests.pop(self.env_id, None)


class Asked(NamedTuple):
    """What the user has asked of an env, and what has come of it so far.

    Attributes:
        method: What the user called.
        future: Gets the result; None if `Pending` does.
        failure: What an earlier try ended with; the result tells of it.
        ending: The step that ended an episode whose reset is done by the next process.
    """

    method: Literal["reset", "step"]
    future: EnvFuture | None = None
    failure: BaseException | None = None
    ending: EnvStep | None = None


class EnvRequest(StepRequest):
    """What one env was asked, until its result is delivered.

    Attributes:
        asked: What the user has asked.
        future: Its future, if any.
        is_open: False once its outcome was handled: deferred calls may run twice.
        pending: Where its result goes unless it has a future.
        has_arrived: Whether its outcome is there, and only has to be read.
    """

    __slots__ = ("asked", "future", "has_arrived", "is_open", "pending")
    future: EnvFuture | None

    def __init__(
        self, message: Reset | Step, env: EnvState, transitions: Transitions, bound: int | None, asked: Asked
    ) -> None:
        pickled = env.supervisor.config.backend.pickles
        super().__init__(message, env.env_id, transitions.on_end, bound, pickled=pickled)
        self.pending = transitions.pending
        self.asked = asked
        self.future = asked.future
        self.is_open = True
        self.has_arrived = False

    def arrive(self, settle: Callable[[], None], reactor: Reactor) -> None:
        self.has_arrived = True
        inbox = None if self.future is not None else self.pending.inboxes.get(threading.get_ident())
        if inbox is None:
            super().arrive(settle, reactor)
        else:
            inbox.append(settle)


@dataclasses.dataclass(eq=False)
class Transitions:
    """Asks envs for steps and resets, and decides what becomes of each outcome.

    An env's state belongs to the facade's thread while it is idle, and to the thread that handles its outcome while it
    is in flight; no lock is needed.

    Attributes:
        envs: All envs.
        pending: Where their results are; also what `Reactor.wake` is given when a result is there.
        episodes: The bookkeeper.
        last: The last result of each env; None if failures are raised.
        on_failure: What happens after a failure.
    """

    envs: list[EnvState]
    pending: Pending
    episodes: Episodes
    last: LastResults | None
    on_failure: OnFailure

    def __post_init__(self) -> None:
        # In line the envs run in the thread that starts them, and Ctrl-C shall reach them.
        inline = self.envs[0].supervisor.config.backend.inline
        self._deferral = contextlib.nullcontext() if inline else defer_signals

    # Asking ----------------------------------------------------------------------------------------------

    def start_resets(
        self,
        env_ids: list[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        futures: Sequence[EnvFuture] = (),
    ) -> None:
        """Start resets; their results go to futures, if there are any, and otherwise to `recv`."""
        self.pending.check_idle(env_ids)
        self._leave_drained_nodes(env_ids)
        arguments = zip(env_ids, seeds, options, futures or itertools.repeat(None), strict=False)
        with self._deferral:
            requests = []
            for env_id, seed, each, future in arguments:
                env = self.envs[env_id]
                if seed is not None:
                    env.root_seed, env.episode = seed, 0
                asked = Asked("reset", future)
                requests.append(EnvRequest(self._reset_message(env, seed, each), env, self, None, asked))
            self.submit(requests, stream=True)

    def _reset_message(self, env: EnvState, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return env.reset_message(self.episodes.next_seed(env.env_id) if seed is None else seed, options)

    def _leave_drained_nodes(self, env_ids: list[int]) -> None:
        """Replace the processes that are to leave their nodes, and all of whose envs are reset."""
        by_actor: dict[Supervisor, list[EnvState]] = {}
        for env_id in env_ids:
            by_actor.setdefault(self.envs[env_id].supervisor, []).append(self.envs[env_id])
        for supervisor, envs in by_actor.items():
            process = supervisor.core.process
            if process is not None and process.worker.is_leaving:
                envs[0].retiring |= len(envs) == len(supervisor.config.start.factories)

    def start_steps(
        self, env_ids: list[int], actions: Any, spec: Spec | None, *, stream: bool, futures: Sequence[EnvFuture] = ()
    ) -> None:
        """Start steps; their results go to futures, if there are any, and otherwise to `recv`.

        Without a spec, actions are neither checked nor converted.
        """
        self.pending.check_idle(env_ids)
        check_steppable(self.envs[env_id] for env_id in env_ids)
        values = split_batch(spec, actions, len(env_ids), "actions")
        owners = futures or itertools.repeat(None)
        with self._deferral:
            self.submit(list(map(self.request_step, env_ids, values, owners)), stream=stream)

    def request_step(self, env_id: int, action: Any, future: EnvFuture | None = None) -> EnvRequest:
        """Return the request of a step, or of the reset that stands in for it after the end of an episode."""
        env, asked = self.envs[env_id], Asked("step", future)
        if self.episodes.ended[env_id]:
            # If failures do not raise they are reported first, also one between two episodes.
            bound = None if self.on_failure == "raise" or env.retiring else env.incarnation
            return EnvRequest(self._reset_message(env), env, self, bound, asked)
        autoreset = self.episodes.autoreset == "same_step" and not env.retiring
        message = Step(env.position, action, autoreset, self.episodes.next_seed(env_id))
        return EnvRequest(message, env, self, env.incarnation, asked)

    def submit(self, requests: Sequence[EnvRequest], *, stream: bool) -> None:
        """Send requests, one batch step per actor, and note that their envs are in flight.

        Raises:
            ActorClosedError: The actors were closed.
        """
        self.episodes.changes += 1
        by_actor: dict[Supervisor, list[StepRequest]] = {}
        for request in requests:
            self.pending.requests[request.index] = request
            self.pending.states[request.index] = IN_FLIGHT if request.future is None else SUBMITTED
        try:
            for request in requests:
                env = self.envs[request.index]
                if isinstance(request.message, Reset):
                    env.retire_process()
                by_actor.setdefault(env.supervisor, []).append(request)
            with self.envs[0].supervisor.config.backend.corked():
                for supervisor, group in by_actor.items():
                    supervisor.submit_steps(group, stream=stream)
        except BaseException:
            # What was queued comes all the same: taken for the result of the next request, it would be the wrong one.
            for request in requests:
                if request.call_id == 0:
                    self.pending.states[request.index] = IDLE
                    self.pending.requests.pop(request.index, None)
            raise

    def _ask_again(
        self, env: EnvState, message: Reset | Step, bound: int | None, asked: Asked, *, at_front: bool = False
    ) -> None:
        again = EnvRequest(message, env, self, bound, asked)
        self.pending.requests[env.env_id] = again
        try:
            env.supervisor.submit_steps([again], stream=True, at_front=at_front)
        except ActorClosedError as error:
            self._deliver(again, None, error, env.incarnation or 0)

    def lose_episode(self, env: EnvState) -> None:
        """Note that nobody knows where the episode of an env stands: it has to be reset."""
        resets_next = self.on_failure != "raise" and self.episodes.autoreset == "next_step"
        env.incarnation, env.needs_reset = None, not resets_next
        self.episodes.ended[env.env_id] = resets_next
        self.episodes.changes += 1

    # Outcomes, in the thread that reads them -----------------------------------------------------------

    def on_end(self, request: EnvRequest, value: Any, error: BaseException | None, incarnation: int) -> None:
        """Handle the outcome of a request."""
        if not request.is_open:
            return
        if error is None:
            self._on_result(request, EnvStep(request.index, *Transition(*value), incarnation))
        else:
            self._on_failed(request, error, incarnation)
        request.is_open = False

    def _on_result(self, request: EnvRequest, step: EnvStep) -> None:
        env, asked, episodes = self.envs[request.index], request.asked, self.episodes
        over = step.terminated or step.truncated
        if over and env.retiring and episodes.autoreset == "same_step":
            # The reset within the step is done by the next process, since this one is to be replaced.
            env.retire_process()
            self._ask_again(env, self._reset_message(env), None, asked._replace(ending=step))
            return
        if asked.ending is not None:
            over, info = True, {**step.info, "final_obs": asked.ending.obs, "final_info": asked.ending.info}
            step = asked.ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
        if env.incarnation != step.incarnation:
            episodes.begin_process(env)
        env.incarnation = step.incarnation
        episodes.record(env.env_id, over=over, reset=asked.ending is None and isinstance(request.message, Reset))
        if asked.failure is not None:
            step = self._with_failure(asked, step)
        if self.last is not None:
            # A step that a future hands out may be changed by its owner, unlike a batch that was copied from it.
            self.last.keep_step(step if asked.future is None else step._replace(obs=copy.deepcopy(step.obs)))
        self._deliver(request, step, None, step.incarnation)

    def _with_failure(self, asked: Asked, step: EnvStep) -> EnvStep:
        """Return a result that tells of the failure before it."""
        info = {**step.info, "failure": asked.failure}
        if asked.method == "reset":
            return step._replace(info=info)
        if self.last is not None and (last := self.last.newest(step.env_id)) is not None:
            info |= {"final_obs": last.obs, "final_info": last.info}
        return step._replace(truncated=True, info=info)

    def _on_failed(self, request: EnvRequest, error: BaseException, incarnation: int) -> None:
        env, asked = self.envs[request.index], request.asked
        asked_reset = asked.method == "reset"
        lost = isinstance(error, ActorError) and not isinstance(error, SerializationError)
        last = None if self.last is None else self.last.newest(env.env_id)
        was_reset, has_last = isinstance(request.message, Reset), last is not None
        can_retry = self.on_failure == "replay" and not lost and env.supervisor.may_retry(request, error)
        failed = Failed(
            self.on_failure, self.episodes.autoreset, lost, was_reset, asked_reset, env.actor_lives, can_retry, has_last
        )
        action, discards_process, loses_episode, resets_next = decide_failure(failed)
        if loses_episode:
            env.incarnation, env.needs_reset = None, not resets_next
            self.episodes.ended[env.env_id] = resets_next
            self.episodes.changes += 1
        if discards_process:
            env.supervisor.lifecycle.discard(incarnation, env.env_id, asked.method, error)
        repeats = action is Action.RETRY or (action is Action.RESET and self._repeats_reset(request, error))
        if was_reset and not repeats and (request.started > 0.0 or not lost):
            self.episodes.count_episode(env.env_id)  # the next one has another seed, in case this one's is the cause
        if action is Action.RAISE:
            self._deliver(request, None, error, incarnation)
        elif action is Action.REPORT and last is not None:
            self._deliver(request, _stand_in(last, error, incarnation), None, incarnation)
        elif action is Action.RETRY:
            self._ask_again(env, request.message, None if asked_reset else incarnation, asked, at_front=True)
        else:
            options = request.message.options if asked_reset and isinstance(request.message, Reset) else None
            message = request.message if repeats else self._reset_message(env, options=options)
            self._ask_again(env, message, None, asked._replace(failure=error))

    def _repeats_reset(self, request: EnvRequest, error: BaseException) -> bool:
        """Return whether a new process is asked for the same reset."""
        was_aborted = isinstance(error, ActorDiedError) and error.aborted
        # Inputs that have failed twice are not tried a third time.
        tries_again = request.asked.failure is None and (self.on_failure != "replay" or was_aborted)
        return request.asked.method == "reset" and tries_again

    def _deliver(
        self, request: EnvRequest, step: EnvStep | None, error: BaseException | None, incarnation: int
    ) -> None:
        pending, env_id = self.pending, request.index
        # Once: after an interrupt this runs again, when the env may have been asked for something else.
        is_first = pending.requests.get(env_id) is request
        if request.future is None:
            if is_first:
                pending.complete(ReadyResult(env_id, time.monotonic(), step, error))
                del pending.requests[env_id]
            self.envs[env_id].supervisor.reactor.wake(pending)
            return
        if is_first:
            del pending.requests[env_id]
            pending.states[env_id] = IDLE
        request.future.settle(step, error, incarnation)
        if pending.was_disturbed:
            self.envs[env_id].supervisor.reactor.wake(pending)


def _stand_in(last: EnvStep, error: BaseException, incarnation: int) -> EnvStep:
    """Return what stands in for the result of an env that was lost: its last observation, truncated."""
    where = error.incarnation if isinstance(error, ActorError) and error.incarnation is not None else incarnation
    reward = np.zeros_like(last.reward) if isinstance(last.reward, np.ndarray) else 0.0
    return EnvStep(last.env_id, last.obs, reward, False, True, {"failure": error}, where + 1)
