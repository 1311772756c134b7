"""The parts of a vector around its actors, and how they are put together."""

from __future__ import annotations

from envactors.arrays.specs import Spec
from envactors.options import RecyclePolicy
from envactors.vector.build import VectorActors, share_rows
from envactors.vector.collector import Collector
from envactors.vector.episodes import Changes, Episodes
from envactors.vector.failure_policy import Autoreset, OnFailure
from envactors.vector.pending import Pending
from envactors.vector.results import Batcher, LastResults
from envactors.vector.rows import RowReader
from envactors.vector.shm_step import SharedMemoryStepper
from envactors.vector.starter import Starter
from envactors.vector.transitions import Transitions
from envactors.wire.messages import Description


class VectorParts:
    """The parts of one vector.

    Args:
        built: Its actors.
        description: What the values of its envs look like.
        autoreset: What happens at the end of an episode.
        on_failure: What happens after a failure.
        recycle: When a process is replaced between two episodes.
        copy: Whether batches are copied out of shared memory.

    Attributes:
        autoreset: What happens at the end of an episode.
        inline: Whether the envs run in the threads that call them.
        action_spec: The spec of one env's action; None if the envs have no action space.
        reward_spec: The spec of one env's reward.
        waiter: What actors give to `Reactor.wake` when a result is there; not the facade, which they must not keep.
        pending: What is in flight.
        episodes: The bookkeeper.
        transitions: Asks envs in frames, and handles failures.
        batcher: Makes batches of single results.
        stepper: Steps through shared memory; None without any.
        starter: Starts steps and resets.
        collector: Waits for results and delivers them.
    """

    def __init__(
        self,
        built: VectorActors,
        description: Description,
        autoreset: Autoreset,
        on_failure: OnFailure,
        recycle: RecyclePolicy | None,
        *,
        copy: bool,
    ) -> None:
        envs, changes = built.envs, Changes()
        last = None if on_failure == "raise" else LastResults(len(envs))
        self.autoreset: Autoreset = autoreset
        self.inline = built.backend.inline
        self.action_spec: Spec | None = description.action
        self.reward_spec: Spec = description.reward
        self.waiter = waiter = object()
        self.pending = pending = Pending(len(envs))
        self.episodes = episodes = Episodes(envs, autoreset, recycle, changes)
        self.transitions = Transitions(envs, pending, episodes, last, autoreset, on_failure, waiter, changes)
        self.batcher = Batcher(description.observation, description.reward)
        self.stepper: SharedMemoryStepper | None = None
        shared = share_rows(built, description, same_step=autoreset == "same_step")
        if shared is not None:
            reader = RowReader(shared[0], copy=copy)
            if last is not None:
                last.reader = reader
            self.stepper = SharedMemoryStepper(
                reader, shared[1], envs, pending, episodes, self.transitions, last, changes, waiter
            )
        self.starter = Starter(envs, pending, self.transitions, self.stepper, description.action, inline=self.inline)
        self.collector = Collector(envs, pending, self.batcher, self.stepper, waiter)

    def release(self) -> None:
        """Let go of what refers to shared memory, once the vector is closed; none of it is used any more."""
        self.stepper = self.starter = self.collector = self.transitions = None  # type: ignore[assignment]
