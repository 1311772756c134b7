"""Episodes: resets, seeds, counts, recycling."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from envactors.mailbox.messages import episode_seed, renewed_seed
from envactors.vector.episodes import (
    EPISODE_LOST,
    NEEDS_RESET,
    NEW_PROCESS,
    NO_EPISODE,
    NO_RESULT,
    RETIRING,
    SEEDED,
    Episodes,
)
from envactors.vector.options import AUTORESETS, Autoreset, VectorSettings
from envactors.vector.results import EnvSnapshot, EnvStep
from envactors.vector.selection import Selection


def test_a_new_env_needs_a_reset_and_then_only_actions():
    episodes = Episodes(2, VectorSettings())
    assert episodes.flags[0] == NO_EPISODE | NEEDS_RESET | NEW_PROCESS | NO_RESULT
    episodes.record(0, ends=False, is_reset=True)
    assert list(episodes.flags) == [0, NO_EPISODE | NEEDS_RESET | NEW_PROCESS | NO_RESULT]
    assert [*map(episodes.steps, range(2))] == [0, 0]


def test_each_value_of_autoreset_has_its_rules():
    assert [rules.name for rules in AUTORESETS.values()] == [*AUTORESETS] == [*get_args(Autoreset)]


@pytest.mark.parametrize(
    ("autoreset", "awaits_autoreset", "needs_reset"),
    [("next_step", True, False), ("same_step", False, False), ("disabled", False, True)],
)
def test_the_end_of_an_episode(autoreset, awaits_autoreset, needs_reset):
    episodes = Episodes(1, VectorSettings(autoreset=autoreset))
    episodes.record(0, ends=False, is_reset=True)
    episodes.record(0, ends=True, is_reset=False)
    assert list(map(bool, episodes.awaits_autoreset)) == [awaits_autoreset]
    assert bool(episodes.flags[0] & NEEDS_RESET) == needs_reset
    assert (episodes.steps(0), episodes.finished) == (1, [1])


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("seeded", [False, True])
def test_many_results_at_once_count_as_one_by_one(autoreset, seeded):
    each, at_once = Episodes(1, VectorSettings(autoreset=autoreset)), Episodes(1, VectorSettings(autoreset=autoreset))
    for episodes in (each, at_once):
        if seeded:
            episodes.flags[0] |= SEEDED
        episodes.set_root_seed(0, 7)
        episodes.record(0, ends=False, is_reset=True)
    ends, resets = [0, 0, 1, 0, 0, 1], [0, 0, 0, autoreset == "next_step", 0, 0]
    for end, reset in zip(ends, resets, strict=True):
        each.record(0, ends=bool(end), is_reset=bool(reset))
    at_once.record_sequence(0, bytes(ends), bytes(resets))
    for name in ("flags", "next_seeds", "episode_numbers"):
        assert getattr(each, name) == getattr(at_once, name)
    for name in ("finished", "awaits_autoreset"):
        assert list(getattr(each, name)) == list(getattr(at_once, name))
    assert each.steps(0) == at_once.steps(0)


def test_a_batch_counts_as_one_by_one():
    each, batch = Episodes(3, VectorSettings()), Episodes(3, VectorSettings())
    for episodes in (each, batch):
        for index in range(3):
            episodes.record(index, ends=False, is_reset=True)
    for terminated in ([False, True, False], [False, False, True]):
        was_reset = each.awaits_autoreset.copy()
        for index, ends in enumerate(terminated):
            each.record(index, ends=ends, is_reset=bool(was_reset[index]))
        batch.record_batch(Selection([0, 1, 2], slice(None), is_all=True), np.array(terminated), np.zeros(3, bool))
        assert [*map(each.steps, range(3))] == [*map(batch.steps, range(3))]
        assert each.awaits_autoreset == batch.awaits_autoreset


def test_a_lost_process_ends_the_episode_until_a_replay_or_a_reset():
    episodes = Episodes(1, VectorSettings())
    episodes.record(0, ends=False, is_reset=True)
    episodes.on_process_lost(0)
    assert episodes.flags[0] == EPISODE_LOST | NEW_PROCESS
    episodes.resume(0)
    assert episodes.flags[0] == 0
    episodes.on_process_lost(0)
    episodes.end_without_result(0, awaits_autoreset=True)
    assert episodes.flags[0] == NO_EPISODE | NEW_PROCESS
    assert list(map(bool, episodes.awaits_autoreset)) == [True]
    episodes.end_without_result(0)
    assert episodes.flags[0] & NEEDS_RESET
    assert list(map(bool, episodes.awaits_autoreset)) == [False]


def test_the_first_reset_of_a_renewed_env_has_a_derived_seed():
    episodes = Episodes(1, VectorSettings())
    assert episodes.seed_of_reset(0, 1) is None, "the env was never seeded"
    episodes.set_root_seed(0, 5)
    assert episodes.seed_of_reset(0, 0) is None
    assert episodes.seed_of_reset(0, 2) == renewed_seed(5, 2)
    episodes.record(0, ends=False, is_reset=True)
    assert episodes.seed_of_reset(0, 2) is None


def test_seeded_episodes_have_the_seeds_of_the_formula():
    episodes = Episodes(1, VectorSettings(seed_episodes=True))
    assert episodes.root_seeds[0] is not None
    episodes.set_root_seed(0, 5)
    assert episodes.seed_of_reset(0, 3) == 5
    for number in (1, 2, 3):
        episodes.record(0, ends=False, is_reset=True)
        assert episodes.seed_of_reset(0, 0) == episode_seed(5, number)


def test_a_snapshot_without_a_seed_leaves_the_seeds_of_the_env():
    """Each further reset used to get the same seed."""
    episodes = Episodes(1, VectorSettings(seed_episodes=True))
    episodes.set_root_seed(0, 7)
    episodes.record(0, ends=False, is_reset=True)
    last = EnvStep(0, None, 0.0, terminated=False, truncated=False, info={}, incarnation=0)
    episodes.restore(0, EnvSnapshot(0, b"", 0, None, 0, resets_next=False, is_start=True, last=last))
    for number in (1, 2, 3):
        assert episodes.seed_of_reset(0, 0) == episode_seed(7, number)
        episodes.record(0, ends=False, is_reset=True)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_snapshot_of_unseeded_episodes_does_not_repeat_the_seed_of_its_episode(has_begun):
    episodes = Episodes(1, VectorSettings(seed_episodes=True))
    last = EnvStep(0, None, 0.0, terminated=False, truncated=False, info={}, incarnation=0) if has_begun else None
    episodes.restore(0, EnvSnapshot(0, b"", 0, 7, 0, resets_next=False, is_start=True, last=last))
    assert episodes.seed_of_reset(0, 0) == (episode_seed(7, 1) if has_begun else 7)


class StepLimit:
    """Recycles a process after some steps."""

    def __init__(self, most):
        self.most = most

    def find_reason(self, steps):
        return "it is old" if steps >= self.most else ""


def test_recycling_is_due_at_the_end_of_an_episode_until_the_next_reset():
    episodes = Episodes(1, VectorSettings(), [StepLimit(2)])
    episodes.record(0, ends=False, is_reset=True)
    episodes.record(0, ends=True, is_reset=False)
    assert not episodes.flags[0] & RETIRING
    episodes.record(0, ends=False, is_reset=True)
    episodes.record(0, ends=True, is_reset=False)
    assert episodes.flags[0] & RETIRING
    episodes.record(0, ends=False, is_reset=True)
    assert not episodes.flags[0] & RETIRING


def test_recycling_stays_due_after_a_reset_in_the_same_sequence_as_the_end():
    """A rollout cannot replace the process between the two. A reset by the user can, once the rollout has ended."""
    episodes = Episodes(1, VectorSettings(), [StepLimit(2)])
    episodes.record(0, ends=False, is_reset=True)
    episodes.record_sequence(0, ends=bytes([0, 1, 0, 0]), resets=bytes([0, 0, 1, 0]))
    assert episodes.is_retiring(0)
    episodes.record_sequence(0, ends=bytes([0, 0]), resets=bytes([1, 0]))
    assert not episodes.is_retiring(0)


def test_without_reset_checks_only_a_crash_needs_a_reset():
    episodes = Episodes(1, VectorSettings(autoreset="disabled"))
    episodes.disable_reset_checks()
    episodes.record(0, ends=True, is_reset=False)
    assert not episodes.flags[0] & NEEDS_RESET
    episodes.end_without_result(0)
    assert episodes.flags[0] & NEEDS_RESET
