"""Another thread of the user, which calls methods of envs and waits for each result."""

from __future__ import annotations

import concurrent.futures

import envactors as ea
from simulation.checker import Checker
from simulation.envs import EnvFailedError
from simulation.world import Event, Fiber, Violation

_NEVER = float("inf")
# How long it waits for a result, in seconds; None for no limit.
_PATIENCE = (None, None, 0.0, 0.01)
# The most calls that it makes.
_MOST_CALLS = 10
# Its tokens begin here; those of the other thread are smaller.
_FIRST_TOKEN = 1 << 30


class Companion:
    """A thread beside that of a `User`.

    Args:
        envs: The vector.
        checker: Gets to know that its calls run at any time.
    """

    def __init__(self, envs: ea.VectorEnv, checker: Checker) -> None:
        self._envs = envs
        self._checker = checker
        self._world = checker.world
        self.fibers = [Fiber(self._world, self._run, "companion")]
        self._world.sources.append(self)

    def add_events(self, events: list[Event]) -> None:
        if self.fibers[0].can_run:
            events.append(("the companion continues", self.fibers[0].resume))

    def wakes_at(self) -> float:
        return _NEVER

    def check_ended(self) -> None:
        """Check that it does not wait any more."""
        if not self.fibers[0].ended:
            raise Violation("another thread waits for what never comes")

    def _run(self) -> None:
        world, checker = self._world, self._checker
        for token in range(_FIRST_TOKEN, _FIRST_TOKEN + world.random.randrange(_MOST_CALLS)):
            env_id = world.random.randrange(self._envs.num_envs)
            checker.models[env_id].foreign += 1
            checker.retries[token] = 0
            world.note(f"the companion calls env {env_id} with {token}")
            try:
                future = self._envs[env_id].note(token)
                checker.asked_before[token] = checker.last_token
                answer = future.result(world.random.choice(_PATIENCE))
            except ea.ActorClosedError:
                return
            except (ea.ActorError, EnvFailedError, concurrent.futures.TimeoutError):
                continue
            if answer != token:
                world.errors.append(Violation(f"a call with {token} returns {answer}"))
