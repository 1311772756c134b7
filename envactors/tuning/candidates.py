"""Settings to try: where the envs run, how many share an actor, how results are received."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from envactors.tuning.measure import Actions, measure_recv, measure_rollout, measure_step
from envactors.vector_env import VectorEnv


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the envs.

    Attributes:
        backend: The backend's name.
        envs_per_actor: How many envs share an actor.
        copy: Whether observations are copies.
        min_envs: How many results ``recv`` waits for; None for ``step``, which waits for all.
        in_workers: Whether the policy is in the workers, and the envs run rollouts.
    """

    backend: Literal["inline", "thread", "process"]
    envs_per_actor: int
    copy: bool = True
    min_envs: int | None = None
    in_workers: bool = False

    @property
    def extras(self) -> list[str]:
        """The settings that are not the default, apart from where the envs run."""
        extras = {
            "copy=False": not self.copy,
            f"recv(min_envs={self.min_envs})": self.min_envs is not None,
            "rollout": self.in_workers,
        }
        return [name for name, is_set in extras.items() if is_set]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `VectorEnv` besides the factories; those that have their default values are left out."""
        settings = {"envs_per_actor": self.envs_per_actor, "backend": self.backend, "copy": self.copy}
        defaults = {"envs_per_actor": 1, "backend": "process", "copy": True}
        return {name: value for name, value in settings.items() if value != defaults[name]}

    def measure(self, envs: VectorEnv, actions: Actions, seconds: float) -> float:
        """Return the env-steps per second of a vector with these settings.

        Args:
            envs: The vector. Its policy, if the candidate needs one, is `Actions.make_policy`.
            actions: What the envs do.
            seconds: How long to measure.
        """
        if self.in_workers:
            return measure_rollout(envs, seconds)
        if self.min_envs is None:
            return measure_step(envs, actions, seconds)
        return measure_recv(envs, actions, seconds, self.min_envs)

    def line(self, factory: str, num_envs: int) -> str:
        """Return the line of a program that makes such a vector."""
        line = f"envs = ea.VectorEnv({self._arguments(factory, num_envs)})"
        if self.in_workers:
            return f"{line}  # with set_policy and rollout"
        return line if self.min_envs is None else f"{line}  # with send, and recv(min_envs={self.min_envs})"

    def drop_in_line(self, factory: str, num_envs: int) -> str:
        """Return the same line for the drop-in for Gymnasium."""
        return f"envs = ActorVectorEnv({self._arguments(factory, num_envs)})"

    def _arguments(self, factory: str, num_envs: int) -> str:
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        return ", ".join([f"[{factory}] * {num_envs}", *settings])

    def label(self, num_envs: int) -> str:
        """Return the name of the candidate in a table."""
        actors = -(-num_envs // self.envs_per_actor)
        place = "in-process"
        if self.backend != "inline":
            plural = {"thread": "threads", "process": "processes"}[self.backend]
            place = f"1 {self.backend}" if actors == 1 else f"{actors} {plural}"
        return ", ".join([place, *self.extras])


def placements(num_envs: int, cores: int) -> list[Candidate]:
    """Return the ways to place the envs: in-process, on threads, and in several numbers of processes."""
    sizes = [-(-num_envs // min(count, num_envs)) for count in sorted({2, cores, 2 * cores, num_envs})]
    return [
        Candidate("inline", num_envs),
        Candidate("thread", _per_core(num_envs, cores)),
        *(Candidate("process", size) for size in dict.fromkeys(sizes)),
    ]


def variants(winner: Candidate, best_processes: Candidate | None, num_envs: int, cores: int) -> list[Candidate]:
    """Return variants of the best placement, and of the best one with processes."""
    tried = [dataclasses.replace(winner, copy=False), Candidate("process", _per_core(num_envs, cores), in_workers=True)]
    if best_processes is not None:
        tried.append(dataclasses.replace(best_processes, in_workers=True))
        if num_envs > 1:
            one_each = dataclasses.replace(best_processes, envs_per_actor=1)
            tried += [dataclasses.replace(each, min_envs=num_envs // 2) for each in (best_processes, one_each)]
    return list(dict.fromkeys(tried))


def _per_core(num_envs: int, cores: int) -> int:
    """Return how many envs share an actor if there is one per core."""
    return -(-num_envs // min(cores, num_envs))
