"""The policy that simulated processes run in rollouts, and the memory that it and the envs write to."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.rollout.columns import Columns
from simulation.memory import Cells
from simulation.world import World

# The range of random numbers: actions that follow from them are at least as large, which no token of the user's is.
LEAST, _MOST = 1 << 33, 1 << 40
# Where the actions of new parameters begin.
_PER_VERSION = 1 << 41
# How often the policy misbehaves, compared with an env: it is called once for all envs of its process.
_SHARE = 0.5
# A process that ends within a step makes at most this many stores before: often it has just chosen the actions.
_MOST_LAST_STORES = 3, 20


class PolicyFailedError(Exception):
    """Raised by the policy."""


def choose(
    obs: npt.NDArray[np.int64], starts: npt.NDArray[np.bool_], rng: np.random.Generator, version: int
) -> npt.NDArray[np.int64]:
    """Return actions that follow from everything that a policy is told, no two of which are the same."""
    draws = rng.integers(LEAST, _MOST, size=len(obs))
    return (draws ^ obs[:, 3] ^ (starts.astype(np.int64) << 20)) + version * _PER_VERSION


class SimulatedPolicy:
    """A policy that crashes, hangs, or raises at random."""

    world: ClassVar[World]
    # How likely trouble is, per call.
    trouble: ClassVar[float] = 0.0
    may_hang: ClassVar[bool] = False
    # Whether it returns more than actions.
    has_extras: ClassVar[bool] = False

    def __init__(self) -> None:
        self._process = next(process for process in self.world.processes if process.fiber is self.world.fiber)
        self._version = 0
        self._misbehave([])

    def load(self, parameters: dict[str, Any]) -> None:
        """Take over the version of parameters."""
        self._misbehave([])
        self._version = int(parameters["version"][0])

    def __call__(self, obs: Any, context: ea.PolicyContext) -> Any:
        self.world.pause_worker()
        self._misbehave(context.env_ids.tolist())
        actions = choose(obs, context.starts, context.rng, self._version)
        return (actions, {"ages": obs[:, 1]}) if self.has_extras else actions

    def _misbehave(self, env_ids: list[int]) -> None:
        world = self.world
        if not world.chance(self.trouble * _SHARE):
            return
        kind = world.random.choice(("crash", "die", "raise", "nap", *(("hang", "slow") if self.may_hang else ("nap",))))
        world.note(f"the policy in process {self._process.number}: {kind}")
        world.troubles += kind not in ("nap", "slow")
        if kind == "crash":
            self._process.crash()
        elif kind == "die":
            self._process.fiber.stores_left = world.random.randint(1, world.random.choice(_MOST_LAST_STORES))
        elif kind == "raise":
            raise PolicyFailedError("the policy has failed")
        elif kind == "nap":
            self._process.sleep(world.random.choice((0.001, 0.1, 0.3)))
        elif kind == "slow":
            self._process.sleep(world.random.choice((1.1, 1.6)))  # too long for an env
        else:
            world.hang(self._process.number, env_ids or self._process.hosted_ids(), in_policy=True)
            self._process.sleep(world.random.choice((None, 2.4, 2.6, 3.6)))


class _Array:
    """An array of a trajectory, each store to which may be interrupted."""

    def __init__(self, world: World, array: npt.NDArray[Any]) -> None:
        self._world = world
        self._array = array

    def __getitem__(self, key: Any) -> Any:
        found = self._array[key]
        return _Array(self._world, found) if isinstance(key, int) and isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._world.at_store()
        self._array[key] = value

    def __len__(self) -> int:
        return len(self._array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class SimulatedColumns(Columns):
    """The columns of a simulated worker: it may stop before each store, but for those of a large or unusual info."""

    world: ClassVar[World]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in ("_rewards", "_terminated", "_truncated", "_ops", "_flat_starts", "_checks", "_done", "_encodings"):
            setattr(self, name, Cells(self.world, getattr(self, name)))
        self.chosen: Any = Cells(self.world, self.chosen)
        self._only_obs = _Array(self.world, self._only_obs)
        if self.my_action is not None:
            self.my_action = _Array(self.world, self.my_action)  # type: ignore[assignment]
        trajectory: Any = self.trajectory
        trajectory.observations = [_Array(self.world, array) for array in trajectory.observations]
        for name in ("rewards", "terminated", "truncated", "ops", "starts"):
            setattr(trajectory, name, _Array(self.world, getattr(trajectory, name)))
