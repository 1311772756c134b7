"""`ActorVecEnv`: a vector env of PufferLib over actors.

    async_reset ──▶ resets all envs           recv ──▶ a batch: the results of all envs, or of a part of them
    send ─────────▶ starts steps of the envs of the last batch

PufferLib resets an env in the step after the end of its episode, which is ``autoreset="next_step"``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pufferlib.spaces import joint_space
from pufferlib.vector import RECV, RESET, recv_precheck, send_precheck

from envactors.actor.handle import ActorView
from envactors.errors import NothingPendingError, VectorStepError
from envactors.integrations.failures import or_first_failure
from envactors.integrations.pufferlib.adapter import ARRAYS
from envactors.vector.access import VectorAccess
from envactors.vector.env import VectorEnv

# Observations, rewards, terminals, truncations, infos, agent ids, masks.
Received = tuple[Any, Any, Any, Any, list[Any], Any, Any]


class Sizes(NamedTuple):
    """How many envs there are, and how they are shared out.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of processes.
        batch_size: Number of envs of a batch.
        contiguous: True if a batch has neighboring envs.
    """

    num_envs: int
    num_workers: int
    batch_size: int
    contiguous: bool


class ActorVecEnv:
    """Steps many envs of PufferLib as one, in actors; made by `make`.

    Args:
        envs: The vector env.
        sizes: How many envs there are.

    Attributes:
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.
        driver_env: Reads attributes of the first env in its worker.
        single_observation_space: Observation space of one agent.
        single_action_space: Action space of one agent.
        observation_space: Observation space of a batch.
        action_space: Action space of a batch.
        num_environments: Number of envs, as in PufferLib.
        num_agents: Number of agents of all envs.
        agents_per_batch: Number of agents in the results of one ``recv``.
        num_workers: Number of processes.
        emulated: As in PufferLib.
    """

    def __init__(self, envs: VectorEnv, sizes: Sizes) -> None:
        self.vector = envs
        described = envs[0].call("envactors_description").result()
        self.driver_env: DriverEnv = DriverEnv(envs[0], described)
        self.single_observation_space: Any = described["single_observation_space"]
        self.single_action_space: Any = described["single_action_space"]
        self.emulated: Any = described["emulated"]
        self._agents_per_env: int = described["num_agents"]
        self.num_environments: int = sizes.num_envs
        self.num_workers: int = sizes.num_workers
        self.num_agents: int = sizes.num_envs * self._agents_per_env
        self.agents_per_batch: int = sizes.batch_size * self._agents_per_env
        self.observation_space: Any = joint_space(self.single_observation_space, self.agents_per_batch)
        self.action_space: Any = joint_space(self.single_action_space, self.agents_per_batch)
        self.agent_ids: npt.NDArray[np.int_] = np.arange(self.num_agents).reshape(sizes.num_workers, -1)
        self.initialized = False
        self.flag: int = RESET
        self._ids_by_env = self.agent_ids.reshape(sizes.num_envs, -1)
        self._parts = PartialBatches(envs, sizes) if sizes.batch_size < sizes.num_envs else None
        self._batch: list[int] = list(range(sizes.num_envs))
        self._reset: Results | None = None

    @property
    def num_envs(self) -> int:
        """Number of agents of a batch, as in PufferLib."""
        return self.agents_per_batch

    def async_reset(self, seed: int | None = 0) -> None:
        """Reset all envs, env ``i`` with the seed ``seed + i``, and discard results that nobody has received.

        It waits for the resets.
        """
        self._discard()
        obs, infos = or_first_failure(lambda: self.vector.reset(seed))
        self._reset = Results(obs, [info.get("infos", []) for info in infos])
        if self._parts is not None:
            self._parts.restart(self._reset)
        self.flag = RECV

    def _discard(self) -> None:
        """Wait for the steps that are pending, which may be those of other envs than the last batch's."""
        access = VectorAccess(self.vector)
        wait = self.vector.recv if self._parts is not None else lambda: access.gather(None, None, "step_wait")
        while True:
            try:
                wait()
            except VectorStepError:
                continue
            except NothingPendingError:
                return

    def recv(self) -> Received:
        """Wait for the results of a batch of envs.

        Returns:
            ``(observations, rewards, terminals, truncations, infos, agent_ids, masks)``, with the agents along axis 0.

        Raises:
            pufferlib.APIUsageError: There was no `async_reset`.
            Exception: The exception from the first env that failed.
        """
        recv_precheck(self)
        if self._parts is not None:
            self._batch, results = self._parts.receive()
        elif self._reset is not None:
            results = self._reset
        else:
            obs, *_, infos = or_first_failure(lambda: VectorAccess(self.vector).gather(None, None, "step_wait"))[1:6]
            results = Results.of_step(obs, infos)
        self._reset = None
        obs, rewards, terminals, truncations, masks = (
            results.arrays[name].reshape(-1, *results.arrays[name].shape[2:]) for name in ARRAYS
        )
        infos = [info for infos in results.infos for info in infos]
        return obs, rewards, terminals, truncations, infos, self._ids_by_env[self._batch].ravel(), masks

    def send(self, actions: Any) -> None:
        """Start a step of each env of the batch that `recv` has returned.

        Args:
            actions: One action per agent, along axis 0.

        Raises:
            pufferlib.APIUsageError: There was no `recv`, or the first actions are not of ``action_space``.
        """
        actions = send_precheck(self, actions)
        actions = actions.reshape(len(self._batch), self._agents_per_env, *self.single_action_space.shape)
        if self._parts is None:
            VectorAccess(self.vector).start_steps(None, actions)
        else:
            self.vector.send(actions, self._batch)

    def reset(self, seed: int | None = 42) -> tuple[Any, list[Any]]:
        """Reset all envs and return the observations and infos of the first batch."""
        self.async_reset(seed)
        obs, _, _, _, infos, _, _ = self.recv()
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, list[Any]]:
        """Step a batch: `send` and `recv`, without the ids and masks."""
        self.send(actions)
        return self.recv()[:5]

    def notify(self) -> None:
        """Call ``notify`` of all envs, and wait for it."""
        self.vector.call("notify")

    def close(self) -> None:
        """Close the envs and end their processes, within the close deadline."""
        self.vector.close()


class Results(NamedTuple):
    """The results of envs.

    Attributes:
        arrays: Each of `ARRAYS`, with the envs along axis 0 and their agents along axis 1.
        infos: A list of infos per env.
    """

    arrays: dict[str, npt.NDArray[Any]]
    infos: list[list[Any]]

    @classmethod
    def of_step(cls, obs: Any, infos: list[dict[str, Any]]) -> Results:
        """Return the results of a step of the vector.

        A failed env has the arrays of its step before: its agents get no rewards, and are truncated.
        """
        collected = []
        for index, info in enumerate(infos):
            own = [one for one in info.get("infos", ()) if one]
            if "failure" in info:
                own = [{"failure": info["failure"]}]
                obs["rewards"][index] = 0
                obs["terminals"][index] = False
                obs["truncations"][index] = True
            collected.append(own)
        return cls(obs, collected)


class PartialBatches:
    """Collects results of envs until there is a batch of them.

    Args:
        envs: The vector env.
        sizes: How many envs there are, and how many of them are a batch.
    """

    def __init__(self, envs: VectorEnv, sizes: Sizes) -> None:
        self._envs = envs
        self._sizes = sizes
        self._results = Results({}, [[] for _ in range(sizes.num_envs)])
        self._ready: list[int] = []

    def restart(self, results: Results) -> None:
        """Begin with the results of a reset of all envs."""
        self._results = Results({name: array.copy() for name, array in results.arrays.items()}, list(results.infos))
        self._ready = list(range(self._sizes.num_envs))

    def receive(self) -> tuple[list[int], Results]:
        """Wait for a batch, and return the ids and results of its envs.

        Raises:
            Exception: The exception from the first env that failed.
        """
        while (batch := self._complete()) is None:
            received = or_first_failure(lambda: self._envs.recv(min_envs=1))
            arrays, infos = Results.of_step(received.obs, received.infos)
            for name, array in arrays.items():
                self._results.arrays[name][received.env_ids] = array
            for env_id, info in zip(received.env_ids.tolist(), infos, strict=True):
                self._results.infos[env_id] = info
                self._ready.append(env_id)
        self._ready = [env_id for env_id in self._ready if env_id not in batch]
        arrays = {name: array[batch] for name, array in self._results.arrays.items()}
        return batch, Results(arrays, [self._results.infos[env_id] for env_id in batch])

    def _complete(self) -> list[int] | None:
        """Return the envs of a batch that is complete, or None."""
        size, ready = self._sizes.batch_size, self._ready
        if not self._sizes.contiguous:
            return ready[:size] if len(ready) >= size else None
        counts = np.bincount(np.asarray(ready, int) // size, minlength=self._sizes.num_envs // size)
        block = int(counts.argmax())
        return list(range(block * size, (block + 1) * size)) if counts[block] == size else None


class DriverEnv:
    """Reads attributes of the first env, which policies need. Each read is a call to its worker.

    Args:
        handle: Handle of the env.
        known: Attributes that are known already.
    """

    def __init__(self, handle: ActorView, known: dict[str, Any]) -> None:
        self._handle = handle
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._handle.get(name).result()
