"""One env of a vector: what it owes, where its episode stands; and the future of its next result."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.actor.requests import Request
from envactors.actor.states import ActorState
from envactors.actor.turn import Turn
from envactors.errors import ActorError, SerializationError
from envactors.options import RecyclePolicy
from envactors.system import resident_memory
from envactors.vector.batch import EnvStep
from envactors.wire.messages import Kind, Reset, Step, Transition
from envactors.wire.pickling import dumps

if TYPE_CHECKING:
    from envactors.vector.plane import Plane

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "renew", "replay"]
Arrived = Callable[["EnvFuture"], None]


class EnvFuture(ActorFuture):
    """The future of one env's reset or step; resolves to an `EnvStep`."""

    def __init__(self, slot: Slot, method: Literal["reset", "step"], was_reset: bool, arrived: Arrived | None) -> None:
        super().__init__(slot.handle._supervisor, slot.handle._lifeline)
        self.method = method
        self.was_reset = was_reset
        self.failure: BaseException | None = None
        self.asked: Reset | None = None
        self.message: Reset | Step | None = None
        self.retried = False
        self.ending: EnvStep | None = None
        self.when = 0.0
        self._slot = slot
        self._arrived = arrived

    @property
    def env_id(self) -> int:
        """Which env."""
        return self._slot.env_id

    @property
    def collected(self) -> bool:
        """Whether the result is handed out by `VectorEnv.recv` rather than by this future."""
        return self._arrived is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended with an exception."""
        return self.settled() and self.exception() is not None

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        slot = self._slot
        if not self.settled():
            step: EnvStep | None = None
            if error is None:
                result = EnvStep(slot.env_id, *Transition(*value), incarnation)
                if slot.leaves_with(self, result):
                    return  # goes on with a reset in another process
                step = slot.completed(self, result)
            else:
                step = slot.failed(self, error, incarnation)
                if step is None and slot.recovers(self):
                    return  # goes on with another reset
                if step is not None:
                    error = None
            if self._arrived is None:
                slot.owed = None
            super().settle(step, error, incarnation)
        if self._arrived is not None and slot.owed is self:
            self.when = time.monotonic()
            self._arrived(self)

    def discard(self) -> None:
        self._slot.owed = None
        super().discard()


class Ledger:
    """What is counted of the envs of one vector, an entry an env.

    Attributes:
        ended: Whether the next step resets, by autoreset.
        steps: How many steps it has made, beside those of all envs.
        rounds: How many steps all envs have made together.
        episodes: How many episodes have ended.
    """

    def __init__(self, count: int) -> None:
        self.rounds = 0
        self.ended = np.zeros(count, np.bool_)
        self.steps = np.zeros(count, np.int64)
        self.episodes = np.zeros(count, np.int64)


class Slot:
    """One env of a vector.

    Attributes:
        env_id: Its number.
        handle: Its handle.
        owed: What will give the result that was asked for and not handed out yet.
        needs_reset: Whether it must be reset before it can step.
        strict: Whether one that was never reset, or whose episode is over, must be reset before it can step; otherwise
            only one that was lost.
        incarnation: The process that holds its episode; None where it has none.
        root_seed: The seed of its last seeded reset.
        last: Its last complete result, where losses are renewed; `Slot.newest` knows of those in shared memory too.
        leaving: Whether its process is to be replaced before its next episode.
    """

    def __init__(
        self,
        env_id: int,
        handle: ActorHandle,
        ledger: Ledger,
        autoreset: Autoreset,
        on_failure: OnFailure,
        recycle: RecyclePolicy | None,
    ) -> None:
        self.env_id = env_id
        self.handle = handle
        self.owed: EnvFuture | Turn | None = None
        self.needs_reset = self.strict = True
        self.incarnation: int | None = None
        self.root_seed: int | None = None
        self.last: EnvStep | None = None
        self.leaving = False
        self._recycle = recycle
        self._steps_before = 0
        self._plane: weakref.ReferenceType[Plane] | None = None
        self._last_asked = 0
        self._ledger = ledger
        self._autoreset = autoreset
        self._on_failure = on_failure

    @property
    def plane(self) -> Plane | None:
        """The shared memory, where the vector has one."""
        return None if self._plane is None else self._plane()

    def attach(self, plane: Plane) -> None:
        """Has the env step through shared memory; held weakly, so that nothing keeps a vector that is dropped."""
        self._plane = weakref.ref(plane)

    @property
    def ended(self) -> bool:
        """Whether the next step resets, by autoreset."""
        return bool(self._ledger.ended[self.env_id])

    def reset(self, seed: int | None, options: dict[str, Any] | None, arrived: Arrived | None) -> EnvFuture:
        """Starts a reset."""
        if seed is not None:
            self.root_seed = seed
        self._leave()
        future = EnvFuture(self, "reset", True, arrived)
        future.asked = self._reset_message(seed, options)
        return self._owe(future, future.asked, None)

    def step(self, action: Any, arrived: Arrived | None) -> EnvFuture:
        """Starts a step, or the reset that stands in for it after the end of an episode."""
        if self.ended and self._autoreset == "next_step":
            # Where losses are renewed they are reported first, also one between two episodes.
            bound = None if self._on_failure == "raise" or self.leaving else self.incarnation
            self._leave()
            return self._owe(EnvFuture(self, "step", True, arrived), self._reset_message(None, None), bound)
        return self._owe(EnvFuture(self, "step", False, arrived), self._step_message(action), self.incarnation)

    def take_over(self, was_reset: bool, action: Any, arrived: Arrived) -> EnvFuture:
        """Makes the future that stands for a step, or an autoreset, that has failed in a turn or was lost with it."""
        self._disturb()
        future = self.owed = EnvFuture(self, "step", was_reset, arrived)
        future.message = self._reset_message(None, None) if was_reset else self._step_message(action)
        return future

    def lose(self, was_reset: bool, action: Any, arrived: Arrived) -> Request:
        """Makes the request that stands for a step, or an autoreset, that was lost in a turn."""
        future = self.take_over(was_reset, action, arrived)
        assert future.message is not None, "it was just made"
        kind, method = (Kind.RESET, "reset") if was_reset else (Kind.STEP, "step")
        # A reset needs nothing of the process that is gone, so that one that had not begun can still be done.
        bound = None if was_reset and self._on_failure == "raise" else self.incarnation
        return Request(kind, dumps(tuple(future.message)), method, self.env_id, None, 0, future, bound)

    def _reset_message(self, seed: int | None, options: dict[str, Any] | None) -> Reset:
        return Reset(self.handle._env, seed, options, self.root_seed)

    def _step_message(self, action: Any) -> Step:
        return Step(self.handle._env, action, self._autoreset == "same_step" and not self.leaving, self.root_seed)

    def _owe(self, future: EnvFuture, message: Reset | Step, bound: int | None) -> EnvFuture:
        self._disturb()
        self.owed = future
        future.message = message
        try:
            self._ask(future, message, bound)
        except BaseException:
            self.owed = None
            raise
        return future

    def _ask(self, future: EnvFuture, message: Reset | Step, bound: int | None, first: bool = False) -> None:
        kind, method = (Kind.RESET, "reset") if isinstance(message, Reset) else (Kind.STEP, "step")
        self.handle._supervisor.ask(kind, message, future, method, self.handle._env, bound=bound, first=first)

    # Outcomes, in whichever thread reads replies ---------------------------------------------------------

    def completed(self, future: EnvFuture, step: EnvStep) -> EnvStep:
        """Takes in a result; returns what is handed out for it."""
        if future.ending is not None:
            info = {**step.info, "final_obs": future.ending.obs, "final_info": future.ending.info}
            step = future.ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
        over = step.terminated or step.truncated
        if self.incarnation != step.incarnation:
            self._steps_before = self._steps
        self.incarnation = step.incarnation
        self.end(over)
        self._ledger.steps[self.env_id] += not future.was_reset
        self._ledger.episodes[self.env_id] += over
        if future.failure is not None:
            step = self._mark(future, step)
        if self._on_failure != "raise":
            # Who gets the step itself, and not a batch that was copied from it, may change it.
            self.last = step if future.collected else step._replace(obs=copy.deepcopy(step.obs))
            if self.plane is not None:
                self._last_asked = int(self.plane.slab.asked[self.env_id])
        return step

    def newest(self) -> EnvStep | None:
        """The last complete result."""
        if self.plane is not None and self.plane.given[self.env_id] > self._last_asked:
            return self.plane.last(self.env_id)
        return self.last

    def end(self, over: bool) -> None:
        """Takes in whether an episode has ended."""
        self._ledger.ended[self.env_id] = over and self._autoreset == "next_step"
        self.needs_reset = self.strict and over and self._autoreset == "disabled"
        if over:
            self.grow_old()
        if self.needs_reset:
            self._disturb()

    @property
    def _steps(self) -> int:
        return int(self._ledger.steps[self.env_id]) + self._ledger.rounds

    def grow_old(self) -> None:
        """Looks, at an episode's end, whether the process has done enough or takes too much memory."""
        policy, pid = self._recycle, self.handle.pid
        if policy is None or pid is None:
            return
        steps = self._steps - self._steps_before
        if (policy.max_steps is not None and steps >= policy.max_steps) or (
            policy.max_rss is not None and resident_memory(pid) > policy.max_rss
        ):
            self.leaving = True
            self._disturb()

    def _leave(self) -> None:
        """Replaces the process, if that is due, before what is asked next."""
        if self.leaving:
            self.leaving = False
            if self.handle.state in (ActorState.DEAD, ActorState.CLOSED):
                return
            self.handle._supervisor.renew(ActorFuture(self.handle._supervisor, None))

    def leaves_with(self, future: EnvFuture, step: EnvStep) -> bool:
        """Where a step resets, and the process is to be replaced: has the reset done in the next one."""
        over = step.terminated or step.truncated
        if not (self.leaving and self._autoreset == "same_step" and future.method == "step" and over):
            return False
        future.ending = step
        self._leave()
        self._ask(future, self._reset_message(None, None), None)
        return True

    def _disturb(self) -> None:
        """Says that the next step of all envs has something to look at."""
        if self.plane is not None:
            self.plane.clear = False

    def _mark(self, future: EnvFuture, step: EnvStep) -> EnvStep:
        info = {**step.info, "failure": future.failure}
        if future.method == "reset":
            return step._replace(info=info)
        last = self.newest()
        if last is not None:
            info |= {"final_obs": last.obs, "final_info": last.info}
        return step._replace(truncated=True, info=info)

    def failed(self, future: EnvFuture, error: BaseException, incarnation: int) -> EnvStep | None:
        """Takes in a failure; returns what is handed out in its place, None where nothing is."""
        lost = isinstance(error, ActorError) and not isinstance(error, SerializationError)
        if self._on_failure == "replay" and not lost and self._retries(future, error, incarnation):
            return None
        renews = self._on_failure != "raise" and self.handle.state not in (ActorState.DEAD, ActorState.CLOSED)
        if renews or lost or future.was_reset:
            self._ledger.ended[self.env_id] = False
            self.needs_reset, self.incarnation = True, None
        failed_before = future.failure is not None
        future.failure = error if renews else None
        if not renews:
            return None
        if not lost:
            self._condemn(future, error, incarnation)
        if future.asked is not None:
            # As it was asked for; but inputs that have failed twice are not tried a third time.
            again = future.asked._replace(seed=None) if failed_before else future.asked
            self._ask(future, again, None)
            return None
        last = self.newest()
        if self._autoreset == "same_step" or last is None:
            self._ask(future, self._reset_message(None, None), None)
            return None
        self._ledger.ended[self.env_id] = self._autoreset == "next_step"
        self.needs_reset = self._autoreset != "next_step"
        where = error.incarnation if lost and isinstance(error, ActorError) else incarnation
        reward = np.zeros_like(last.reward) if isinstance(last.reward, np.ndarray) else 0.0
        info = {"failure": error}
        return EnvStep(self.env_id, last.obs, reward, False, True, info, (where or 0) + 1)

    def _retries(self, future: EnvFuture, error: BaseException, incarnation: int) -> bool:
        """Asks the same again of a new process that is brought to the same point, where that is worth a try."""
        message = future.message
        seeded = isinstance(message, Reset) and message.seed is not None
        if message is None or not self.handle._supervisor.may_retry(self.env_id, seeded, error):
            return False
        self._condemn(future, error, incarnation)
        future.retried = True
        self._ask(future, message, None if future.method == "reset" else incarnation, first=True)
        return True

    def recovers(self, future: EnvFuture) -> bool:
        """Whether a failed future goes on with another request."""
        retried, future.retried = future.retried, False
        return retried or future.failure is not None

    def _condemn(self, future: EnvFuture, error: BaseException, incarnation: int) -> None:
        self.handle._supervisor.condemn(incarnation, self.env_id, future.method, error)
