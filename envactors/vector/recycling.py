"""When the process of an actor is replaced between two episodes: it has reached a limit, or must leave its node."""

from __future__ import annotations

from envactors.actor.actor import Actor
from envactors.options import RecyclePolicy


class Recycler:
    """Decides when to replace the process of an actor between two episodes.

    Args:
        actor: The actor.
        policy: Limits of a process, which has a single env; None for no limits.

    Attributes:
        envs: The envs of the actor.
        can_recycle: Whether the process may ever have to be replaced.
    """

    def __init__(self, actor: Actor, policy: RecyclePolicy | None) -> None:
        self.envs: range = actor.config.indices
        self.can_recycle: bool = policy is not None or actor.config.backend.traits.is_remote
        self._actor = actor
        self._policy = policy
        # How many steps the env had taken when the current process started.
        self._steps_before = 0

    def begin_process(self, steps: int) -> None:
        """Record how many steps the first env has taken when a process starts."""
        self._steps_before = steps

    def find_reason(self, steps: int) -> str:
        """Return why to replace the process after an episode; empty if it stays.

        Args:
            steps: How many steps its env has taken.
        """
        policy, worker, reason = self._policy, self._actor.process.worker, ""
        if worker is not None and policy is not None:
            memory = 0 if policy.max_memory is None else worker.resident_memory()
            reason = policy.limit_reached(steps=steps - self._steps_before, memory=memory)
        return reason or (self._actor.reason_to_move if len(self.envs) == 1 else "")
