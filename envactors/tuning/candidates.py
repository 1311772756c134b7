"""Settings to try: where the envs run, how many share an actor, how results are received."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from envactors.backends.process import ProcessBackend
from envactors.process.starting import DEFAULT, StartMethod


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the envs.

    Attributes:
        backend: The backend's name.
        envs_per_actor: How many envs share an actor.
        start_method: How processes start.
        copy: Whether observations are copies.
        min_envs: How many results ``recv`` waits for; None for ``step``, which waits for all.
        in_workers: Whether the policy is in the workers, and the envs run rollouts.
    """

    backend: Literal["inline", "thread", "process"]
    envs_per_actor: int
    start_method: StartMethod = DEFAULT
    copy: bool = True
    min_envs: int | None = None
    in_workers: bool = False

    @property
    def extras(self) -> list[str]:
        """The settings that are not the default, apart from where the envs run."""
        extras: list[str] = []
        if self.backend == "process" and self.start_method != DEFAULT:
            extras.append(self.start_method)
        if not self.copy:
            extras.append("copy=False")
        if self.min_envs is not None:
            extras.append(f"recv(min_envs={self.min_envs})")
        if self.in_workers:
            extras.append("rollout")
        return extras

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `VectorEnv` besides the factories; those that have their default values are left out."""
        settings: dict[str, Any] = {}
        if self.envs_per_actor != 1:
            settings["envs_per_actor"] = self.envs_per_actor
        if self.backend != "process":
            settings["backend"] = self.backend
        elif self.start_method != DEFAULT:
            settings["backend"] = ProcessBackend(self.start_method)
        if not self.copy:
            settings["copy"] = False
        return settings

    def line(self, factory: str, num_envs: int) -> str:
        """Return the line of a program that makes such a vector."""
        arguments = [f"[{factory}] * {num_envs}"]
        for name, value in self.settings.items():
            shown = f"ea.ProcessBackend({self.start_method!r})" if isinstance(value, ProcessBackend) else repr(value)
            arguments.append(f"{name}={shown}")
        line = f"envs = ea.VectorEnv({', '.join(arguments)})"
        if self.in_workers:
            return f"{line}  # with set_policy and rollout"
        return line if self.min_envs is None else f"{line}  # with send, and recv(min_envs={self.min_envs})"

    def label(self, num_envs: int) -> str:
        """Return what to call it in a table."""
        actors = -(-num_envs // self.envs_per_actor)
        singular = {"inline": "in-process", "thread": "1 thread", "process": "1 process"}[self.backend]
        plural = {"thread": f"{actors} threads", "process": f"{actors} processes"}.get(self.backend, singular)
        return ", ".join([singular if actors == 1 else plural, *self.extras])


def placements(num_envs: int, cores: int) -> list[Candidate]:
    """Return the ways to place the envs: in-process, on threads, and in several numbers of processes."""
    counts = sorted({min(count, num_envs) for count in (cores, 2 * cores, num_envs)} | ({2} if num_envs > 1 else set()))
    sizes = list(dict.fromkeys(-(-num_envs // count) for count in counts))
    return [
        Candidate("inline", num_envs),
        Candidate("thread", _per_core(num_envs, cores)),
        *(Candidate("process", size) for size in sizes),
    ]


def variants(winner: Candidate, best_processes: Candidate | None, num_envs: int, cores: int) -> list[Candidate]:
    """Return variants of the best placement, and of the best one with processes."""
    tried = [
        dataclasses.replace(winner, copy=False),
        Candidate("process", _per_core(num_envs, cores), in_workers=True),
    ]
    if best_processes is not None:
        if DEFAULT != "loky":
            tried.append(dataclasses.replace(best_processes, start_method="loky"))
        tried.append(dataclasses.replace(best_processes, in_workers=True))
        if num_envs > 1:
            tried.append(dataclasses.replace(best_processes, min_envs=num_envs // 2))
            if best_processes.envs_per_actor != 1:
                tried.append(Candidate("process", 1, min_envs=num_envs // 2))
    return list(dict.fromkeys(tried))


def _per_core(num_envs: int, cores: int) -> int:
    """Return how many envs share an actor if there is one per core."""
    return -(-num_envs // min(cores, num_envs))
