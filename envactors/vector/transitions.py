"""Steps and resets that are asked in frames, and what becomes of each outcome, whichever way the step went.

    reset, step, submit ──▶ EnvRequest ──▶ the actor (a FrameBatchStep of its envs)
                                             │ outcome, in the thread that reads replies
    Pending or a future ◀── delivered ◀── on_end ──asked again──▶ the actor

A batch step in shared memory comes here when something is out of the ordinary: an env has raised, or its process has
ended before the env's turn.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from envactors.actor.batch_step import StepRequest
from envactors.actor.future import ActorFuture
from envactors.actor.supervisor import Supervisor
from envactors.errors import ActorDiedError, ActorError, SerializationError
from envactors.vector.batch import EnvStep
from envactors.vector.env_state import EnvState
from envactors.vector.episodes import Changes, Episodes
from envactors.vector.failure_policy import (
    Action,
    Autoreset,
    Failed,
    FailureDecision,
    OnFailure,
    decide_failure,
    moves_to_next_process,
)
from envactors.vector.pending import IDLE, Pending, ReadyResult
from envactors.vector.results import LastResults
from envactors.wire.messages import Reset, Step, Transition


class EnvFuture(ActorFuture):
    """The future of one env's step or reset; resolves to an `EnvStep`.

    Attributes:
        env_id: The env.
    """

    def __init__(self, env: EnvState) -> None:
        super().__init__(env.supervisor, env.handle._lifeline)
        self.env_id = env.env_id


class EnvRequest(StepRequest):
    """What one env was asked, until its result is delivered.

    Attributes:
        asked: What the user called.
        failure: What an earlier try ended with; the result tells of it.
        ending: The step that ended an episode whose reset is done by the next process.
    """

    __slots__ = ("_step_future", "asked", "ending", "failure", "is_open")

    def __init__(
        self,
        message: Reset | Step,
        env: EnvState,
        on_end: Callable[[Any, Any, BaseException | None, int], None],
        bound: int | None,
        asked: Literal["reset", "step"],
        future: EnvFuture | None = None,
    ) -> None:
        super().__init__(message, env.env_id, on_end, bound, pickled=env.supervisor.config.backend.pickles)
        self.asked = asked
        self.failure: BaseException | None = None
        self.ending: EnvStep | None = None
        # False once its outcome was handled: deferred calls may run twice.
        self.is_open = True
        self._step_future = future

    @property
    def future(self) -> EnvFuture | None:
        return self._step_future

    @property
    def was_reset(self) -> bool:
        """Whether the worker is asked for a reset."""
        return isinstance(self.message, Reset)


class Transitions:
    """Asks envs for steps and resets, and decides what becomes of each outcome.

    An env's state belongs to the facade's thread while it is idle, and to the thread that handles its outcome while it
    is in flight; no lock is needed.

    Args:
        envs: All envs.
        pending: Where their results are.
        episodes: The bookkeeper.
        last: The last result of each env; None if failures are raised.
        autoreset: What happens at the end of an episode.
        on_failure: What happens after a failure.
        waiter: What `Reactor.wake` is given when a result is there.
        changes: Counts what prepared steps have to look at.
    """

    def __init__(
        self,
        envs: list[EnvState],
        pending: Pending,
        episodes: Episodes,
        last: LastResults | None,
        autoreset: Autoreset,
        on_failure: OnFailure,
        waiter: object,
        changes: Changes,
    ) -> None:
        self._envs = envs
        self._pending = pending
        self._episodes = episodes
        self._last = last
        self._autoreset: Autoreset = autoreset
        self._on_failure: OnFailure = on_failure
        self._waiter = waiter
        self._changes = changes

    # Asking ----------------------------------------------------------------------------------------------

    def request_reset(
        self, env_id: int, seed: int | None, options: dict[str, Any] | None, future: EnvFuture | None = None
    ) -> EnvRequest:
        """Return the request of a reset that the user has asked for."""
        env = self._envs[env_id]
        if seed is not None:
            env.root_seed = seed
        return EnvRequest(self._reset_message(env, seed, options), env, self.on_end, None, "reset", future)

    def request_step(self, env_id: int, action: Any, future: EnvFuture | None = None) -> EnvRequest:
        """Return the request of a step, or of the reset that stands in for it after the end of an episode."""
        env = self._envs[env_id]
        if self._episodes.ended[env_id]:
            # If failures do not raise they are reported first, also one between two episodes.
            bound = None if self._on_failure == "raise" or env.retiring else env.incarnation
            return EnvRequest(self._reset_message(env), env, self.on_end, bound, "step", future)
        return EnvRequest(self._step_message(env, action), env, self.on_end, env.incarnation, "step", future)

    def request_lost(self, env_id: int, action: Any, *, was_reset: bool) -> EnvRequest:
        """Return the request that stands for a step in shared memory, of an env whose process has ended."""
        self._changes.count += 1
        env = self._envs[env_id]
        if was_reset:
            # A reset needs nothing of the process that is gone, so that one that had not begun can still be done.
            bound = None if self._on_failure == "raise" else env.incarnation
            return EnvRequest(self._reset_message(env), env, self.on_end, bound, "step")
        return EnvRequest(self._step_message(env, action), env, self.on_end, env.incarnation, "step")

    def submit(self, requests: Sequence[EnvRequest], *, stream: bool) -> None:
        """Send requests: one batch step per actor.

        Raises:
            ActorClosedError: The actors were closed.
        """
        self._changes.count += 1
        by_actor: dict[Supervisor, list[StepRequest]] = {}
        for request in requests:
            env = self._envs[request.index]
            if request.was_reset:
                env.retire_process()
            by_actor.setdefault(env.supervisor, []).append(request)
        for supervisor, group in by_actor.items():
            supervisor.submit_steps(group, stream=stream)

    def _reset_message(self, env: EnvState, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return Reset(env.position, seed, options, env.root_seed)

    def _step_message(self, env: EnvState, action: Any) -> Step:
        return Step(env.position, action, self._autoreset == "same_step" and not env.retiring, env.root_seed)

    def _ask_again(
        self,
        request: EnvRequest,
        message: Reset | Step,
        *,
        failure: BaseException | None = None,
        ending: EnvStep | None = None,
        bound: int | None = None,
        at_front: bool = False,
    ) -> None:
        env = self._envs[request.index]
        again = EnvRequest(message, env, self.on_end, bound, request.asked, request.future)
        again.failure = failure
        again.ending = ending or request.ending
        env.supervisor.submit_steps([again], stream=True, at_front=at_front)

    # Outcomes, in the thread that reads replies -----------------------------------------------------------

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
        env, over = self._envs[request.index], step.terminated or step.truncated
        if request.ending is None and moves_to_next_process(
            retiring=env.retiring, autoreset=self._autoreset, asked_reset=request.asked == "reset", over=over
        ):
            env.retire_process()
            self._ask_again(request, self._reset_message(env), ending=step)
            return
        if (ending := request.ending) is not None:
            info = {**step.info, "final_obs": ending.obs, "final_info": ending.info}
            step = ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
            over = step.terminated or step.truncated
        if env.incarnation != step.incarnation:
            self._episodes.begin_process(env)
        env.incarnation = step.incarnation
        self._episodes.record(env.env_id, over=over, reset=request.was_reset and ending is None)
        if request.failure is not None:
            step = self._with_failure(request, step)
        if self._last is not None:
            # A step that a future hands out may be changed by its owner, unlike a batch that was copied from it.
            kept = step if request.future is None else step._replace(obs=copy.deepcopy(step.obs))
            self._last.keep_step(kept)
        self._deliver(request, step, None, step.incarnation)

    def _with_failure(self, request: EnvRequest, step: EnvStep) -> EnvStep:
        """Return a result that tells of the failure before it."""
        info = {**step.info, "failure": request.failure}
        if request.asked == "reset":
            return step._replace(info=info)
        last = None if self._last is None else self._last.newest(request.index)
        if last is not None:
            info |= {"final_obs": last.obs, "final_info": last.info}
        return step._replace(truncated=True, info=info)

    def _on_failed(self, request: EnvRequest, error: BaseException, incarnation: int) -> None:
        env = self._envs[request.index]
        lost = isinstance(error, ActorError) and not isinstance(error, SerializationError)
        last = None if self._last is None else self._last.newest(env.env_id)
        can_retry = self._on_failure == "replay" and not lost and env.supervisor.may_retry(request, error)
        decision = decide_failure(
            Failed(
                self._on_failure,
                self._autoreset,
                lost=lost,
                was_reset=request.was_reset,
                asked_reset=request.asked == "reset",
                actor_lives=env.actor_lives,
                can_retry=can_retry,
                has_last=last is not None,
            )
        )
        if decision.loses_episode:
            env.lose_episode()
            self._episodes.ended[env.env_id] = decision.resets_next
            env.needs_reset = not decision.resets_next
            self._changes.count += 1
        if decision.discards_process:
            env.supervisor.lifecycle.discard(incarnation, env.env_id, request.asked, error)
        self._act(request, decision, error, incarnation, last)

    def _act(
        self,
        request: EnvRequest,
        decision: FailureDecision,
        error: BaseException,
        incarnation: int,
        last: EnvStep | None,
    ) -> None:
        """Do what was decided about a failure."""
        if decision.action is Action.RAISE:
            self._deliver(request, None, error, incarnation)
        elif decision.action is Action.RETRY:
            bound = None if request.asked == "reset" else incarnation
            self._ask_again(request, request.message, failure=request.failure, bound=bound, at_front=True)
        elif decision.action is Action.RESET:
            env, message = self._envs[request.index], request.message
            if request.asked == "step" or not isinstance(message, Reset):
                message = self._reset_message(env)
            elif request.failure is not None or (self._on_failure == "replay" and not _was_aborted(error)):
                message = message._replace(seed=None)  # inputs that have failed twice are not tried a third time
            self._ask_again(request, message, failure=error)
        else:
            assert last is not None, "without a last result the env is reset at once"
            self._deliver(request, self._report(last, error, incarnation), None, incarnation)

    def _report(self, last: EnvStep, error: BaseException, incarnation: int) -> EnvStep:
        """Return what stands in for the result of an env that was lost: its last observation, truncated."""
        where = error.incarnation if isinstance(error, ActorError) and error.incarnation is not None else incarnation
        reward = np.zeros_like(last.reward) if isinstance(last.reward, np.ndarray) else 0.0
        return EnvStep(last.env_id, last.obs, reward, False, True, {"failure": error}, where + 1)

    def _deliver(
        self, request: EnvRequest, step: EnvStep | None, error: BaseException | None, incarnation: int
    ) -> None:
        env = self._envs[request.index]
        if request.future is None:
            self._pending.complete(ReadyResult(env.env_id, time.monotonic(), step, error))
            env.supervisor.reactor.wake(self._waiter)
        else:
            self._pending.states[env.env_id] = IDLE
            request.future.settle(step, error, incarnation)


def _was_aborted(error: BaseException) -> bool:
    return isinstance(error, ActorDiedError) and error.aborted
