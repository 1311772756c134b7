"""What a user does with rollouts in a history: two at a time at most, in turns with steps."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import envactors as ea
from envactors.actor.future import AwaitableFuture
from envactors.rollout import rollouts, runner
from simulation.policies import PolicyFailedError, SimulatedColumns, SimulatedPolicy
from simulation.rows import RowChecker
from simulation.world import Interrupted, Violation, World

if TYPE_CHECKING:
    from simulation.user import User

# The most steps of a rollout.
_MOST_STEPS = 4
# The most rollouts in flight.
_MOST_IN_FLIGHT = 2


class SimulatedFuture(AwaitableFuture[Any]):
    """A future that lets the world continue while somebody waits for it."""

    world: ClassVar[World]

    def result(self, timeout: float | None = None) -> Any:
        world = self.world
        deadline = None if timeout is None else world.now + timeout
        while not self.done():
            world.interrupt()
            if self.done():
                break
            if deadline is not None and world.now >= deadline:
                raise concurrent.futures.TimeoutError
            if not world.step(deadline) and not self.done():
                raise Violation("a thread waits for a rollout that never ends")
        return super().result(0)


@dataclasses.dataclass
class Flight:
    """A rollout that was started.

    Attributes:
        steps: How many steps it has.
        futures: One for all envs, or one for each actor.
        seed: The seed of its policy.
        number: Its number since the policy was set.
        version: How often parameters were given to the policy.
    """

    steps: int
    futures: list[Any]
    seed: int
    number: int
    version: int

    @property
    def is_done(self) -> bool:
        """Whether all of its results are there."""
        return all(future.done() for future in self.futures)


class RolloutUser:
    """Starts rollouts, waits for them, and has their rows checked.

    Args:
        user: The user, who does the rest.
        autoreset: The vector's.
    """

    def __init__(self, user: User, autoreset: str) -> None:
        self._user = user
        self._autoreset = autoreset
        self._world = user.world
        self._random = user.random
        self._models = user.models
        self._rows: RowChecker
        # Oldest first; those that have ended and were not looked at yet are among them.
        self._flights: list[Flight] = []
        self._seed: int | None = None
        self._number = self._version = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the library use this world's futures, and workers its memory."""
        real = rollouts.Future, runner.Columns
        SimulatedFuture.world = SimulatedColumns.world = SimulatedPolicy.world = self._world
        rollouts.Future = SimulatedFuture  # type: ignore[misc]
        runner.Columns = SimulatedColumns  # type: ignore[misc]
        try:
            yield
        finally:
            rollouts.Future, runner.Columns = real  # type: ignore[misc]

    def begin(self, envs: ea.VectorEnv) -> None:
        """Note what is known of the vector."""
        configs = [actor._supervisor.config for actor in envs.actors]
        actors = [range(config.first_index, config.first_index + len(config.start.factories)) for config in configs]
        self._rows = RowChecker(self._user.checker, actors, self._autoreset)
        SimulatedPolicy.has_extras = self._world.chance(0.3)

    def actions(self) -> list[Callable[[ea.VectorEnv], object]]:
        """Return what the user does at random, besides what is done without rollouts."""
        rarely = [self.take_impatiently, self.ask_too_much, self.wait_for_newest]
        return [self.run] * 4 + [self.start] * 6 + [self.take] * 3 + rarely

    @property
    def is_rolling(self) -> bool:
        """Whether there are rollouts that nobody has looked at."""
        return bool(self._flights)

    @property
    def in_flight(self) -> int:
        """How many rollouts count as in flight: the oldest one that has not ended, and those after it."""
        ended = next((number for number, flight in enumerate(self._flights) if not flight.is_done), len(self._flights))
        return len(self._flights) - ended

    # What the user does ----------------------------------------------------------------------------------

    def run(self, envs: ea.VectorEnv) -> None:
        """Run a rollout and wait for it, or until a timeout passes."""
        if not self._prepare(envs):
            return
        steps = self._random.randint(1, _MOST_STEPS)
        timeout = self._random.choice((None, None, 0.0, 1e-4, 0.05))
        parameters = self._give()
        self._rows.begin()
        before = list(envs._rollouts._runs)
        try:
            future: Any = SimulatedFuture()
            future.set_result(envs.rollout(steps, parameters, timeout=timeout))
        except ea.VectorTimeoutError as error:
            future = error.future
        except Interrupted:
            # The user has lost it; the simulation has not.
            (run,) = (run for run in envs._rollouts._runs if run not in before)
            (future,) = run.futures
        except Exception as error:
            future.set_exception(error)
        self._note(steps, [future])
        if self._world.chance(0.7):
            self.take(envs)

    def start(self, envs: ea.VectorEnv) -> None:
        """Start a rollout, and do not wait for it."""
        if not self._prepare(envs):
            return
        steps, parameters = self._random.randint(1, _MOST_STEPS), self._give()
        self._rows.begin()
        if self._world.chance(0.5):
            self._note(steps, envs.rollout_each(steps, parameters))
        else:
            self._note(steps, [envs.rollout_async(steps, parameters)])

    def take(self, envs: ea.VectorEnv, timeout: float | None = None) -> bool:
        """Wait for the oldest rollout, and check it; return False if its results are not there."""
        del envs
        if not self._flights:
            return False
        flight = self._flights[0]
        for future in self._random.sample(flight.futures, len(flight.futures)):
            try:
                future.result(timeout)
            except Violation:
                raise
            except Exception as error:
                if not future.done():
                    return False  # the timeout has passed, or a signal handler has raised
                if not isinstance(error, (ea.VectorStepError, PolicyFailedError)):
                    raise Violation(f"a rollout fails with {error!r}") from error
        self._flights.pop(0)
        self._rows.check(flight, self._flights)
        return True

    def take_impatiently(self, envs: ea.VectorEnv) -> None:
        """Wait a moment for the oldest rollout."""
        self.take(envs, timeout=self._random.choice((0.0, 1e-4, 0.05)))

    def wait_for_newest(self, envs: ea.VectorEnv) -> None:
        """Wait for the newest rollout, which is read before those that have ended before it, and ask for more."""
        if self._flights:
            with contextlib.suppress(Interrupted):
                for future in self._flights[-1].futures:
                    future.exception()
            self.ask_too_much(envs)

    def take_all(self, envs: ea.VectorEnv) -> None:
        """Wait for all rollouts, and check them."""
        while self._flights:
            self.take(envs)

    def ask_too_much(self, envs: ea.VectorEnv) -> None:
        """Ask for something that is refused while rollouts are in flight."""
        if not self.in_flight:
            return
        ids = list(range(self._user.num_envs))
        actions = np.zeros(len(ids), np.int64)
        asks: list[Callable[[], object]] = [
            lambda: envs.step(actions),
            lambda: envs.send(actions),
            lambda: envs.submit(actions[:1], env_ids=ids[:1]),
            envs.reset,
            lambda: envs.set_policy(SimulatedPolicy),
        ]
        if self.in_flight == _MOST_IN_FLIGHT:
            asks += [lambda: envs.rollout(1), lambda: envs.rollout_async(1), lambda: envs.rollout_each(1)]
        self._check_refused(self._random.choice(asks))

    def check_ended(self) -> None:
        """Check that nobody waits for a rollout of a vector that is closed.

        Raises:
            Violation: Somebody does.
        """
        if self.in_flight:
            raise Violation("the future of a rollout outlives the vector")

    # Before a rollout ------------------------------------------------------------------------------------

    def _prepare(self, envs: ea.VectorEnv) -> bool:
        """Have all envs and the policy be ready for a rollout; return whether they are."""
        if self._flights and not self.in_flight:
            self.take_all(envs)
        if self.in_flight:
            return self.in_flight < _MOST_IN_FLIGHT
        user, models = self._user, self._models
        if self._seed is not None and any(envs._core.slots.states) and self._world.chance(0.3):
            self._check_refused(lambda: envs.rollout_async(1))
        user.take_pending(envs)
        if (self._seed is None or self._world.chance(0.15)) and not self._set_policy(envs):
            return False
        user.take_pending(envs)
        if needing := [env_id for env_id, model in enumerate(models) if model.needs_reset]:
            user.reset(envs, needing)
        return not any(model.is_pending or model.needs_reset for model in models)

    def _set_policy(self, envs: ea.VectorEnv) -> bool:
        seed = next(self._user.tokens)
        try:
            envs.set_policy(SimulatedPolicy, seed=seed)
        except Interrupted:
            return False
        except (ea.ActorError, PolicyFailedError) as error:
            if not self._world.troubles:
                raise Violation(f"nothing has happened, and set_policy raises {error!r}") from error
            return False
        self._seed, self._number, self._version = seed, 0, 0
        return True

    def _give(self) -> Any:
        """Return parameters for the policy, or None for those that it has."""
        if self._world.chance(0.5):
            return None
        self._version += 1
        return {"version": np.array([self._version])}

    def _note(self, steps: int, futures: list[Any]) -> None:
        assert self._seed is not None, "it was set"
        self._world.note(f"the user starts a rollout of {steps} steps with {len(futures)} futures")
        self._flights.append(Flight(steps, futures, self._seed, self._number, self._version))
        self._number += 1

    def _check_refused(self, ask: Callable[[], object]) -> None:
        with contextlib.suppress(ea.AlreadyPendingError):
            ask()
            raise Violation("what is pending keeps nobody from asking for more")
