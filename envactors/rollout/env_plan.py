"""The rules of episodes in a rollout: which kind of step an env takes next, and the seeds of its resets.

    an episode runs        KIND_STEP     also after its end, if the vector does not check resets
    a reset is due         KIND_RESET    by autoreset or, in `RolloutEnvs`, after a failure
    the episode is over    KIND_REPEAT   and nothing resets the env before the end of the rollout

Caller and worker decide in turns, by the same rules:

    step                      who decides its kind and seed                    from
    first of an order         the caller, with `next_kind`                     flags and seeds in `Episodes`
    later ones of the order   the worker, with `EnvPlan.pass_boundary`         its plan, at each boundary of episodes
    a failed one              the caller, which writes KIND_TRUNCATED          the fate of the env
    in-process                the caller, with `next_kind`, each step          flags and seeds in `Episodes`

The worker writes the kinds of complete steps to the trajectory. Within an episode it writes none: it has cleared them
all before, and KIND_STEP is 0. The caller records them in `Episodes`, which arrives at the same next kind and seed as
the worker's plan.

For example, an order has five steps, with ``autoreset="next_step"`` and seeded episodes. The current episode has number
7, and ends with step 2. Each line has the worker's plan before a step, and the boundary that it passes after it:

    step    kind          seed                next_episode    boundary
    0       KIND_STEP     that of episode 8   8
    1       KIND_STEP     that of episode 8   8
    2       KIND_STEP     that of episode 8   8               the episode ends: the next kind is `kind_after_end`
    3       KIND_RESET    that of episode 8   8               episode 8 has begun: its successor is due next
    4       KIND_STEP     that of episode 9   9
"""

from __future__ import annotations

import dataclasses
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


def kind_after_end(episodes: Episodes) -> int:
    """Return the kind of the step after the end of an episode, as `next_kind` does once `Episodes` has recorded it."""
    if episodes.autoreset.needs_reset_after_end and episodes.checks_resets:
        return KIND_REPEAT
    return KIND_RESET if episodes.autoreset.resets_next_step else KIND_STEP


def next_kind(episodes: Episodes, index: int) -> int:
    """Return the kind of an env's next step."""
    if episodes.awaits_autoreset[index]:
        return KIND_RESET
    return KIND_REPEAT if episodes.needs_reset(index) else KIND_STEP


@dataclasses.dataclass(eq=False, slots=True)
class EnvPlan:
    """What an env does next: its kind of step, and the seeds of its resets.

    The worker changes its plan at each boundary: after a reset, and after the end of an episode. The caller keeps the
    plan that it has sent. When it accepts steps, it advances the seeds of that plan, and not its kind.

    Attributes:
        first_step: First step of the order for this env.
        kind: Kind of its next step.
        kind_after_end: Kind of the step after the end of an episode.
        resets_within_step: Whether a step that ends an episode also resets the env.
        seed: Seed of its next reset; None lets the env choose.
        root_seed: Seed that the seeds of later episodes are derived from; None if episodes are not seeded.
        next_episode: Number of its next episode, which ``seed`` is for if episodes are seeded.
    """

    first_step: int
    kind: int
    kind_after_end: int
    resets_within_step: bool
    seed: int | None
    root_seed: int | None
    next_episode: int

    def pass_boundary(self) -> bool:
        """Continue after a reset, or after the end of an episode; return whether the next episode has begun."""
        has_begun = self.kind == KIND_RESET or self.resets_within_step
        self.kind = KIND_STEP if has_begun else self.kind_after_end
        self.advance_seeds(int(has_begun))
        return has_begun

    def advance_seeds(self, count: int) -> None:
        """Have episodes begin, which take the seeds of this plan one after the other."""
        self.seed = self.seed_after(count)
        self.next_episode += count

    def seed_after(self, count: int) -> int | None:
        """Return the seed of the episode that begins after ``count`` others; None lets the env choose."""
        if count == 0:
            return self.seed
        return None if self.root_seed is None else episode_seed(self.root_seed, self.next_episode + count)

    def fields(self) -> tuple[Any, ...]:
        """Return its attributes in their order, which are pickled in a tenth of the time."""
        return tuple(getattr(self, name) for name in self.__slots__)
