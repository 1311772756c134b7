"""The env of simulated processes: it shows whose result is whose, and behaves as badly as the world wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import envactors as ea
from envactors.testing import EchoEnv
from simulation.world import Violation, World


class EnvFailedError(Exception):
    """What an env raises."""


class SimulatedEnv(EchoEnv):
    """An `EchoEnv` that crashes, hangs, sleeps, or raises at random."""

    world: ClassVar[World]
    # How likely each kind of trouble is, per step or reset.
    trouble: ClassVar[float] = 0.0
    may_hang: ClassVar[bool] = False
    # Every so many actions one ends the process, whatever it is; 0 for none.
    poison: ClassVar[int] = 0
    # The most envs that may run at a time; None for any number.
    limit: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__(episode_length=4)
        self._process = next(process for process in self.world.processes if process.fiber is self.world.fiber)
        self._misbehave()

    @property
    def env_id(self) -> int:
        """Its index in the vector, which a standby's env learns late."""
        actor = ea.current_actor()
        assert actor is not None, "its code runs in workers"
        return actor.index

    @env_id.setter
    def env_id(self, value: int) -> None:
        del value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.log.append((self.env_id, None, self._process.number))
        with self._counted():
            self._misbehave()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.world.log.append((self.env_id, int(action), self._process.number))
        with self._counted():
            self._misbehave()
            if self.poison and int(action) % self.poison == 0:
                self.world.troubles += 1
                self._process.crash()
        obs, reward, terminated, truncated, info = super().step(action)
        if self.world.chance(0.2):
            info = {"token": int(action)}
        return obs, reward, terminated, truncated, info

    def note(self, token: int) -> int:
        """Return the token."""
        self.world.note(f"env {self.env_id} in process {self._process.number} notes {token}")
        self.world.log.append((self.env_id, token, self._process.number))
        self._misbehave()
        return token

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count it among the envs that run."""
        world = self.world
        world.running += 1
        try:
            world.pause_in_env()
            if self.limit is not None and world.running > self.limit:
                world.errors.append(Violation(f"{world.running} envs run at a time"))
            yield
        finally:
            world.running -= 1

    def _misbehave(self) -> None:
        world = self.world
        if not world.chance(self.trouble):
            return
        kind = world.random.choice(("crash", "raise", "nap", "hang" if self.may_hang else "nap"))
        world.note(f"env {self.env_id} in process {self._process.number}: {kind}")
        world.troubles += kind != "nap"
        if kind == "crash":
            self._process.crash()
        elif kind == "raise":
            raise EnvFailedError(f"env {self.env_id} has failed")
        elif kind == "nap":
            self._process.sleep(world.random.choice((0.001, 0.1)))
        else:
            self._process.sleep(None)
