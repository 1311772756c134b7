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
        may_be_due: Whether `is_due` is ever true.
    """

    def __init__(self, actor: Actor, policy: RecyclePolicy | None) -> None:
        self.envs: range = actor.config.indices
        self.may_be_due: bool = policy is not None or actor.config.backend.traits.is_remote
        self._actor = actor
        self._policy = policy
        # How many steps the env had taken when the current process started.
        self._steps_before = 0
        # The memory in bytes, and the process that was measured. One tuple, since it is set without the lock.
        self._memory = 0, -1
        # The limit that the process had reached at the end of the last episode, for the log.
        self._limit_reached = ""

    def begin_process(self, steps: int) -> None:
        """Record how many steps the first env has taken when a process starts."""
        self._steps_before = steps

    def measure_memory(self) -> None:
        """Measure the memory of the process if it is limited. Call this without the lock, since it may take long."""
        process = self._actor.process
        worker = process.worker
        if self._policy is not None and self._policy.max_memory is not None and worker is not None:
            self._memory = worker.resident_memory(), process.incarnation

    def is_due(self, steps: int) -> bool:
        """Return whether to replace the process after an episode, given how many steps its env has taken."""
        self._limit_reached = ""
        policy, process = self._policy, self._actor.process
        if process.worker is not None and policy is not None:
            memory, measured = self._memory
            memory = memory if measured == process.incarnation else 0
            self._limit_reached = policy.limit_reached(steps=steps - self._steps_before, memory=memory)
        return bool(self._limit_reached) or (self.is_node_draining and len(self.envs) == 1)

    @property
    def reason(self) -> str:
        """Why the process is to be replaced, once that is due."""
        return self._limit_reached or "its node is being drained"

    @property
    def is_node_draining(self) -> bool:
        """Whether the process must move, since its node is being drained."""
        worker = self._actor.process.worker
        return worker is not None and worker.node is not None and worker.node.draining
