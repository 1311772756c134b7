"""The rules of episodes in a rollout: which kind of step an env takes next.

    an episode runs        KIND_STEP
    a reset is due         KIND_RESET    by autoreset or, in `RolloutEnvs`, after a failure
    the episode is over    KIND_REPEAT   and nothing resets the env before the end of the rollout

`next_kind` says so from the flags of `envactors.vector.episodes`, in-process and for the first step of an order. The
worker, which has no such flags, continues with `EnvPlan.pass_boundary`. Afterwards, `Episodes.record_sequence` records
the kinds that the worker has written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from envactors.mailbox.messages import episode_seed

if TYPE_CHECKING:  # workers do not import it
    from envactors.vector.episodes import Episodes

# Kinds of steps. `KIND_STEP` and `KIND_RESET` are also the flags by which `Episodes.record_sequence` and
# `Journal.record_steps` tell resets from steps.
KIND_STEP: Final = 0
KIND_RESET: Final = 1  # the env was reset, and its action ignored
KIND_REPEAT: Final = 2  # the last observation was repeated
KIND_TRUNCATED: Final = 3  # the env failed: the row has its last observation, or that of a reset in the next process

# The kind of the step after the end of an episode, by the option ``autoreset``. Under ``"same_step"``, the step that
# ends the episode has also reset the env.
KIND_AFTER_END: Final[Mapping[str, int]] = {"next_step": KIND_RESET, "same_step": KIND_STEP, "disabled": KIND_REPEAT}


def next_kind(episodes: Episodes, index: int) -> int:
    """Return the kind of an env's next step."""
    if episodes.resets_next[index]:
        return KIND_RESET
    return KIND_REPEAT if episodes.needs_reset(index) else KIND_STEP


@dataclasses.dataclass(eq=False, slots=True)
class EnvPlan:
    """What an env does next. The worker changes it at the boundaries of episodes.

    Attributes:
        first_step: First step of the order for this env.
        kind: Kind of its next step.
        kind_after_end: Kind of the step after the end of an episode.
        seed: Seed of its next reset; None lets the env choose.
        root_seed: Seed that the seeds of later episodes are derived from; None if episodes are not seeded.
        episode: Index of its next episode, which ``seed`` is for if episodes are seeded.
    """

    first_step: int
    kind: int
    kind_after_end: int
    seed: int | None
    root_seed: int | None
    episode: int

    @property
    def resets_within_step(self) -> bool:
        """Whether a step that ends an episode also resets the env."""
        return self.kind_after_end == KIND_STEP

    def pass_boundary(self) -> bool:
        """Continue after a reset, or after the end of an episode; return whether the next episode has begun."""
        has_begun = self.kind == KIND_RESET or self.resets_within_step
        self.kind = KIND_STEP if has_begun else self.kind_after_end
        if has_begun:
            self.seed = None
            if self.root_seed is not None:
                self.episode += 1
                self.seed = episode_seed(self.root_seed, self.episode)
        return has_begun

    def fields(self) -> tuple[Any, ...]:
        """Return its attributes, which are pickled in a tenth of the time."""
        return self.first_step, self.kind, self.kind_after_end, self.seed, self.root_seed, self.episode
