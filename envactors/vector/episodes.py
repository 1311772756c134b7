"""Episodes: where each env of a vector is in its episode, its seeds, and its counts of steps and episodes.

Vectors with workers, in-process vectors, and rollouts record their results here. Within a rollout, workers follow the
same rules with `envactors.rollout.env_plan`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

import numpy as np

from envactors.errors import VectorInputError
from envactors.mailbox.messages import episode_seed, renewed_seed
from envactors.vector.fates import Decision, EnvFate
from envactors.vector.options import AUTORESETS, AutoresetRules, OnFailure, VectorSettings
from envactors.vector.recycling import Recycler
from envactors.vector.results import EnvSnapshot
from envactors.vector.selection import Selection

# The flags of an env. All are independent of each other, except that the first two are never set together.
#
#     NO_EPISODE ──a result──▶ neither ──its process ends──▶ EPISODE_LOST ──replayed or reset──▶ neither
#                                 └── a failure without a replay ──┴──▶ NO_EPISODE
#
# An episode that has reached its end counts as running until the next one begins. An env with no flag at all only needs
# an action to make a step, or its autoreset; that is the fast path.
NO_EPISODE: Final = 1  # there is nothing to continue
EPISODE_LOST: Final = 2  # its process has ended, and no result has told the user; a replay may bring it back
NEEDS_RESET: Final = 4  # the user has to reset the env before its next step
NEW_PROCESS: Final = 8  # the env was not reset yet in its current process
RETIRING: Final = 16  # the process is to be replaced before the next reset, unless it is a new one
SEEDED: Final = 32  # each reset of the env gets a seed
NO_RESULT: Final = 64  # the env has not returned anything yet
INTERRUPTED: Final = 128  # an interrupted change has ended the episode; for the text of an error
# The result of a step clears these.
CLEARED_BY_STEPS: Final = NO_EPISODE | EPISODE_LOST | NEEDS_RESET | NO_RESULT | INTERRUPTED

# The methods that set and clear these flags. All envs begin with NO_EPISODE, NEEDS_RESET, NEW_PROCESS, and NO_RESULT.
#
#                           the episode   NEEDS_RESET    NEW_PROCESS   RETIRING         NO_RESULT       INTERRUPTED
#     record, a step        runs          clears                                        clears          clears
#     record, a reset       runs          clears         clears        clears           clears          clears
#     the end of an episode               sets, without                sets, if the
#                                         autoreset                    recycler says so
#     end_without_result    NO_EPISODE    sets, or clears                                               clears
#                                         if `awaits_autoreset`
#     on_process_lost       EPISODE_LOST,                sets
#                           if it ran
#     on_interrupt          NO_EPISODE    sets           sets                                           sets
#     resume                runs                         clears        clears
#     restore               runs          sets or clears clears        clears           sets or clears  clears
#     disable_reset_checks                clears
#
# Without `checks_resets`, neither the end of an episode nor `restore` sets NEEDS_RESET.
#
# The option ``seed_episodes`` sets SEEDED. Nothing clears it. A reset clears RETIRING. But if one `record_sequence` has
# both the end that sets it and a later reset, it stays: the worker of a rollout does not stop there, and its process is
# replaced before a later reset.


class Episodes:
    """The episodes of all envs of a vector.

    Args:
        count: Number of envs.
        settings: The options of the vector.
        recyclers: For each env, decides whether to replace its process after an episode; empty if that never happens.

    Attributes:
        autoreset: What follows from the end of an episode.
        on_failure: What happens after a failure.
        flags: Which of the flags above apply to each env.
        no_flags: The value of ``flags`` while no env has one.
        awaits_autoreset: Whether the next step of an env resets it, by autoreset.
        finished: How many episodes of each env a step has ended. Those that a failure has cut off do not count.
        root_seeds: The seed of each env's last seeded reset.
        next_seeds: The seed of each env's next reset; None if episodes are not seeded.
        failed_resets: How many resets in answer to each env's request have failed.
        episode_numbers: How many episodes have begun since the last seeded reset, if episodes are seeded.
        checks_resets: Whether the user has to reset an env before its first step and, without autoreset, after each
            episode.
    """

    def __init__(self, count: int, settings: VectorSettings, recyclers: Sequence[Recycler] = ()) -> None:
        self.autoreset: AutoresetRules = AUTORESETS[settings.autoreset]
        self.on_failure: OnFailure = settings.on_failure
        self._recyclers = recyclers
        self.flags: bytearray = bytearray([NO_EPISODE | NEEDS_RESET | NEW_PROCESS | NO_RESULT]) * count
        self._renewal_reasons = [""] * count  # why envs are `RETIRING`
        self.failed_resets: list[int] = [0] * count
        self.awaits_autoreset: bytearray = bytearray(count)
        # The steps of each env are the sum of these two: counting a batch of all envs then takes no time.
        self._steps_beside: list[int] = [0] * count
        self._batches = 0
        self.finished: list[int] = [0] * count
        self.root_seeds: list[int | None] = [None] * count
        self.next_seeds: list[int | None] = [None] * count
        self.episode_numbers: list[int] = [0] * count
        self.checks_resets: bool = True
        self.no_flags: bytes = bytes(count)
        if settings.seed_episodes:  # until the first seeded reset, from a random seed
            for index, seed in enumerate(np.random.SeedSequence().generate_state(count).tolist()):
                self.root_seeds[index] = self.next_seeds[index] = seed
                self.flags[index] |= SEEDED

    # Facts -----------------------------------------------------------------------------------------------

    def has_episode(self, index: int) -> bool:
        """Return whether an env has an episode, which runs or is lost."""
        return not self.flags[index] & NO_EPISODE

    def is_lost(self, index: int) -> bool:
        """Return whether the episode of an env is lost, although a replay may bring it back."""
        return bool(self.flags[index] & EPISODE_LOST)

    def needs_reset(self, index: int) -> bool:
        """Return whether the user has to reset an env."""
        return bool(self.flags[index] & NEEDS_RESET)

    def check_steppable(self, ids: Sequence[int]) -> None:
        """Raise `VectorInputError` if one of these envs needs a reset first."""
        if self.flags != self.no_flags:
            for index in ids:
                if self.flags[index] & NEEDS_RESET:
                    reason = ", since a change of its state was interrupted" if self.was_interrupted(index) else ""
                    raise VectorInputError(
                        f"env {index} needs a reset first{reason}: call reset(), or, with a VectorEnv, "
                        f"reset(env_ids=[{index}])"
                    )

    def was_interrupted(self, index: int) -> bool:
        """Return whether an interrupted change has ended the episode of an env, so that it needs a reset."""
        return bool(self.flags[index] & INTERRUPTED)

    def steps(self, index: int) -> int:
        """Return how many steps an env has had."""
        return self._batches + self._steps_beside[index]

    def has_result(self, index: int) -> bool:
        """Return whether an env has returned anything yet."""
        return not self.flags[index] & NO_RESULT

    # Seeds -----------------------------------------------------------------------------------------------

    def set_root_seed(self, index: int, seed: int) -> None:
        """Record a reset with a seed of the user, which begins episode 0."""
        self.root_seeds[index] = seed
        self.episode_numbers[index] = 0
        if self.flags[index] & SEEDED:
            self.next_seeds[index] = seed

    def advance_seed(self, index: int) -> None:
        """Give the next reset another seed, since the current one is used up, by a success or a failure."""
        root_seed = self.root_seeds[index]
        if self.flags[index] & SEEDED and root_seed is not None:
            self.episode_numbers[index] += 1
            self.next_seeds[index] = episode_seed(root_seed, self.episode_numbers[index])

    def seed_of_reset(self, index: int, incarnation: int) -> int | None:
        """Return the seed of an env's next reset without a seed of the user; None lets the env choose."""
        if self.flags[index] & SEEDED:
            return self.next_seeds[index]
        root_seed = self.root_seeds[index]
        if self.flags[index] & NEW_PROCESS and incarnation > 0 and root_seed is not None:
            return renewed_seed(root_seed, incarnation)
        return None

    # Results ---------------------------------------------------------------------------------------------

    def record(self, index: int, *, ends: bool, is_reset: bool) -> None:
        """Record a result of an env.

        Args:
            index: The env.
            ends: Whether it ended an episode.
            is_reset: Whether it is that of a reset, rather than a step.
        """
        self.record_sequence(index, bytes([ends]), bytes([is_reset]))

    def record_bare_step(self, index: int) -> None:
        """Record a step that has not ended its episode, of an env that has no flag which `record` would clear."""
        self._steps_beside[index] += 1

    def record_end_without_reset(self, index: int) -> None:
        """Record the last step of an episode in a process that is replaced now: the next one does the reset.

        If that reset never runs, since the user aborts it, the next step resets the env. Under ``on_failure="raise"``,
        the user has to.
        """
        self._steps_beside[index] += 1
        self.finished[index] += 1
        self.end_without_result(index, awaits_autoreset=self.on_failure != "raise")

    def record_sequence(self, index: int, ends: bytes, resets: bytes) -> None:
        """Record one or more consecutive results of an env in one process, as a rollout has them.

        An end of an episode among them may set `RETIRING`. That outlasts the resets among them: the same process has
        run those.

        Args:
            index: The env.
            ends: For each result, 1 if it ended an episode, else 0.
            resets: For each result, 1 if it was that of a reset, rather than a step.
        """
        self.flags[index] &= ~(CLEARED_BY_STEPS | (NEW_PROCESS | RETIRING if 1 in resets else 0))
        self.awaits_autoreset[index] = False
        self.failed_resets[index] = 0
        reset_count, end_count = resets.count(1), ends.count(1)
        for _ in range(reset_count):
            self.advance_seed(index)
        self._steps_beside[index] += len(ends) - reset_count
        if not end_count:
            return
        until_end = ends.rfind(1) + 1
        later_steps = len(ends) - until_end - resets.count(1, until_end)
        self._end(index, self.steps(index) - later_steps, end_count)
        if until_end == len(ends):
            self._await_reset(index)

    def record_batch(self, envs: Selection, terminated: Any, truncated: Any) -> None:
        """Record results of envs without flags.

        Args:
            envs: The envs.
            terminated: Whether each episode ended, in the same order.
            truncated: Whether each was cut off.
        """
        if envs.is_all:
            self._batches += 1
        else:
            for index in envs.ids:
                self._steps_beside[index] += 1
        if 1 in self.awaits_autoreset:
            for index in envs.ids:
                self._steps_beside[index] -= self.awaits_autoreset[index]  # the result of a reset does not count
                self.awaits_autoreset[index] = False
        if True in terminated.tobytes() or True in truncated.tobytes():
            for place in (terminated | truncated).nonzero()[0].tolist():
                index = envs.ids[place]
                self._end(index, self.steps(index))
                self._await_reset(index)

    def _end(self, index: int, steps: int, count: int = 1) -> None:
        """Record the end of ``count`` episodes, the last one after this number of steps of the env."""
        self.finished[index] += count
        if self.autoreset.resets_within_step:
            for _ in range(count):
                self.advance_seed(index)
        if self._recyclers and (reason := self._recyclers[index].find_reason(steps)):
            self.flags[index] |= RETIRING
            self._renewal_reasons[index] = reason

    def _await_reset(self, index: int) -> None:
        """Have the next step of an env reset it, or else the user, as the rules say after the end of an episode."""
        self.awaits_autoreset[index] = self.autoreset.resets_next_step
        if self.autoreset.needs_reset_after_end and self.checks_resets:
            self.flags[index] |= NEEDS_RESET

    # Losses ----------------------------------------------------------------------------------------------

    def end_without_result(self, index: int, *, awaits_autoreset: bool = False) -> None:
        """End an episode without a result. If the env's next step does not reset it, the user has to."""
        kept = self.flags[index] & ~(EPISODE_LOST | NEEDS_RESET | INTERRUPTED)
        self.flags[index] = kept | NO_EPISODE | (0 if awaits_autoreset else NEEDS_RESET)
        self.awaits_autoreset[index] = awaits_autoreset
        self.failed_resets[index] = 0

    def apply(self, index: int, decision: Decision, *, seed_is_used: bool = False) -> None:
        """Apply a decision about a request without a result to the env's episode and to its next seed.

        Args:
            index: The env.
            decision: The decision.
            seed_is_used: Whether the next seed has been advanced already, with the result that cannot be read.
        """
        failed_resets = self.failed_resets[index]
        if decision.ends_episode:
            self.end_without_result(index, awaits_autoreset=decision.awaits_autoreset)
        if decision.fate is EnvFate.RESET:
            self.failed_resets[index] = failed_resets + 1
        if decision.changes_seed and not seed_is_used:
            self.advance_seed(index)

    def forget_failed_resets(self, index: int) -> None:
        """Forget how many resets have failed in answer to a request, since it was canceled or interrupted."""
        self.failed_resets[index] = 0

    def renewal_reason(self, ids: Iterable[int], reset_ids: Container[int] = ()) -> str:
        """Return why the process of envs must be replaced before their next requests; empty if it stays.

        Args:
            ids: The envs.
            reset_ids: Those whose request is a reset.
        """
        due = (i for i in ids if self.is_retiring(i) and (i in reset_ids or self.awaits_autoreset[i]))
        return next(map(self._renewal_reasons.__getitem__, due), "")

    def is_retiring(self, index: int) -> bool:
        """Return whether the process of an env is to be replaced before its next reset; one without a reset stays."""
        return self.flags[index] & (RETIRING | NEW_PROCESS) == RETIRING

    def on_process_lost(self, index: int) -> None:
        """Record that the process of an env has ended, and with it the episode."""
        self.flags[index] |= NEW_PROCESS | (EPISODE_LOST if self.has_episode(index) else 0)

    def on_interrupt(self, index: int) -> None:
        """Record that an interrupted change has cost an env its episode, and its process."""
        self.end_without_result(index)
        self.on_process_lost(index)
        self.flags[index] |= INTERRUPTED

    def resume(self, index: int) -> None:
        """Record that a replay has brought an env back to where it was, in a process that is not due to retire."""
        self.flags[index] &= ~(NO_EPISODE | EPISODE_LOST | NEW_PROCESS | RETIRING)

    def step_reports_lost_episode(self, index: int) -> bool:
        """Return whether the next step of an env would report that its episode was lost.

        A step that continues the episode does. So does an autoreset, although it needs nothing of the episode before
        it: users want to see each crash. It does not if failures are raised, since that would cost the step its result,
        nor if the process was to be replaced anyway. An env without an episode has lost none.
        """
        if not self.has_episode(index):
            return False
        if not self.awaits_autoreset[index]:
            return True
        return self.on_failure != "raise" and not self.flags[index] & RETIRING

    def restore(self, index: int, snapshot: EnvSnapshot) -> None:
        """Continue from a snapshot; if it has no seed, the seeds of further episodes stay those of the env."""
        root_seed = snapshot.root_seed
        if root_seed is not None:
            # Without seeded episodes nobody has counted them; an env with a result has begun the first one.
            number = snapshot.episode or int(snapshot.last is not None)
            self.root_seeds[index], self.episode_numbers[index] = root_seed, number
            if self.flags[index] & SEEDED:
                self.next_seeds[index] = episode_seed(root_seed, number) if number else root_seed
        self.flags[index] &= ~(CLEARED_BY_STEPS | NEW_PROCESS | RETIRING)
        if snapshot.last is None:
            self.flags[index] |= NO_RESULT
        # At the end of an episode, the env needs a reset by the rules of this vector, which may differ from those of
        # the vector that has made the snapshot.
        must_reset = snapshot.resets_next and self.autoreset.needs_reset_after_end
        self.flags[index] |= NEEDS_RESET if must_reset and self.checks_resets else 0
        self.awaits_autoreset[index] = snapshot.resets_next and not must_reset

    def disable_reset_checks(self) -> None:
        """Leave it to the envs to refuse steps before a reset. An env that crashes from now on still needs one."""
        self.checks_resets = False
        self.flags[:] = bytes(flags & ~NEEDS_RESET for flags in self.flags)
