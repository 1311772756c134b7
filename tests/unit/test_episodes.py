"""The bookkeeper of a vector: whichever way results come, the books are the same."""

from __future__ import annotations

import types

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plainrows import make_slots

import envactors as ea
from envactors.envs.episodes import Episodes
from envactors.envs.selection import Selection
from envactors.mailbox.messages import episode_seed

COUNT = 3
# The envs that step together.
STEPS = {
    "all at once": [Selection([0, 1, 2], is_all=True)],
    "some at once": [Selection([2, 0]), Selection([1])],
}
flags = st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).map(lambda values: np.array(values, np.bool_))


class Books:
    """A bookkeeper of envs without processes, each in an actor of its own or all in one."""

    def __init__(self, autoreset, recycle=None, *, packed=False):
        self.memory = 100
        self.worker = types.SimpleNamespace(is_leaving=False, resident_memory=lambda: self.memory)
        self.core = types.SimpleNamespace(process=types.SimpleNamespace(worker=self.worker))
        start = types.SimpleNamespace(factories=[None] * (COUNT if packed else 1))
        supervisor = types.SimpleNamespace(core=self.core, config=types.SimpleNamespace(start=start))
        self.slots = make_slots(COUNT, autoreset=autoreset)
        self.slots.has_last[:] = bytes([True]) * COUNT
        self.envs = self.slots.of
        self.episodes = Episodes(self.slots, [supervisor] * COUNT, recycle)
        self.reset_by_hand(range(COUNT))

    def reset_by_hand(self, env_ids):
        for env_id in env_ids:
            slot = self.envs[env_id]
            slot.incarnation += slot.retiring
            slot.holds = slot.incarnation
            self.episodes.record(env_id, over=False, reset=True)
            self.slots.note_usual(env_id)

    @property
    def state(self):
        return (
            self.episodes.steps.tolist(),
            self.episodes.episodes.tolist(),
            self.slots.ended.tolist(),
            [(env.needs_reset, env.retiring, env.steps_before, env.counted_in) for env in self.envs],
            self.slots.unusual,
        )


def record(books, way, terminated, truncated):
    """One step of every env, as `Stepper.gather` tells of it."""
    resets = books.slots.ended.copy()
    terminated, truncated = terminated & ~resets, truncated & ~resets  # a reset ends no episode
    for envs in STEPS.get(way, ()):
        chosen = [env_id for env_id in envs.env_ids if resets[env_id]]
        books.episodes.record_all(envs, terminated[envs.env_ids], truncated[envs.env_ids], chosen)
    if way in STEPS:
        return
    over = terminated | truncated
    for env_id in range(COUNT):
        books.episodes.record(env_id, over=bool(over[env_id]), reset=bool(resets[env_id]))


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("recycle", [None, ea.RecyclePolicy(max_steps=3)], ids=["keeps", "recycles"])
@settings(max_examples=examples(60))
@given(st.lists(st.tuples(flags, flags), max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_books_are_the_same_whichever_way_results_come(autoreset, recycle, rounds, full):
    mixed, *others = [Books(autoreset, recycle) for _ in range(4)]
    ways = ("all at once", "one by one", "some at once")
    for turn, (terminated, truncated) in enumerate(rounds):
        for books, way in zip(others, ways, strict=True):
            record(books, way, terminated, truncated)
        record(mixed, ways[0] if full[turn] else ways[1], terminated, truncated)
        states = [books.state for books in (mixed, *others)]
        assert states == [states[0]] * 4
        # By hand what the facade asks for before the next step.
        due = [env.index for env in mixed.envs if env.needs_reset or env.retiring]
        for books in (mixed, *others):
            books.reset_by_hand(due)


@pytest.mark.parametrize("way", ["all at once", "some at once", "one by one"])
@settings(max_examples=examples(60))
@given(st.lists(st.tuples(flags, flags), max_size=12))
def test_steps_and_episodes_are_counted_once_each(way, rounds):
    """A step that resets, after the end of an episode, is no step of it."""
    books = Books("next_step")
    steps, ends, ended = np.zeros(COUNT, int), np.zeros(COUNT, int), np.zeros(COUNT, bool)
    for terminated, truncated in rounds:
        over = (terminated | truncated) & ~ended
        steps += ~ended
        ends += over
        ended = over
        record(books, way, terminated, truncated)
        assert books.episodes.steps.tolist() == steps.tolist()
        assert books.episodes.episodes.tolist() == ends.tolist()
        assert books.slots.ended.tolist() == ended.tolist()


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_after_the_end_of_an_episode_an_env_is_reset_as_it_was_agreed(autoreset):
    books = Books(autoreset)
    books.episodes.record(1, over=True, reset=False)
    assert books.slots.ended.tolist() == [False, autoreset == "next_step", False]
    assert [env.needs_reset for env in books.envs] == [False, autoreset == "disabled", False]
    assert books.slots.unusual == ({1} if autoreset == "disabled" else set()), "its next step is looked at"


def test_an_env_that_is_not_strict_needs_no_reset_after_its_episode():
    books = Books("disabled")
    books.envs[0].strict = False
    for env_id in (0, 1):
        books.episodes.record(env_id, over=True, reset=False)
    assert [env.needs_reset for env in books.envs] == [False, True, False]


@pytest.mark.parametrize("way", ["all at once", "one by one"])
def test_a_process_is_replaced_after_max_steps(way):
    books = Books("same_step", ea.RecyclePolicy(max_steps=4))
    never, always = np.zeros(COUNT, np.bool_), np.ones(COUNT, np.bool_)
    retired = []
    for turn in range(1, 13):
        record(books, way, always if turn % 2 == 0 else never, never)
        if books.envs[0].retiring:
            retired.append(turn)
            assert books.slots.unusual == {0, 1, 2}, "their next steps are looked at"
            books.reset_by_hand(range(COUNT))
            assert not books.slots.unusual
    assert retired == [4, 8, 12]


def test_a_process_above_max_rss_is_replaced_only_between_episodes():
    books = Books("same_step", ea.RecyclePolicy(max_rss=200))
    books.episodes.record(0, over=True, reset=False)
    assert not books.envs[0].retiring
    books.memory = 201
    books.episodes.record(0, over=False, reset=False)
    assert not books.envs[0].retiring, "in the middle of an episode"
    books.episodes.record(0, over=True, reset=False)
    assert books.envs[0].retiring
    books.core.process = None
    books.episodes.record(1, over=True, reset=False)
    assert not books.envs[1].retiring, "there is no process"


@pytest.mark.parametrize("packed", [False, True])
def test_an_env_leaves_a_drained_node_with_its_episode_unless_it_shares_its_process(packed):
    books = Books("same_step", packed=packed)
    books.worker.is_leaving = True
    books.episodes.record(0, over=False, reset=False)
    assert not books.envs[0].retiring
    books.episodes.record(0, over=True, reset=False)
    assert books.envs[0].retiring is not packed


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_each_episode_has_a_seed_of_its_own(autoreset):
    books = Books(autoreset)
    books.episodes.seed_episodes()
    slot = books.envs[0]
    slot.seed_with(7)
    assert slot.next_seed == 7
    seeds = []
    books.episodes.record(0, over=False, reset=True)
    for _ in range(3):
        seeds.append(slot.next_seed)
        books.episodes.record(0, over=True, reset=False)
        if autoreset == "next_step":
            books.episodes.record(0, over=False, reset=True)
    assert seeds == [episode_seed(7, number) for number in (1, 2, 3)]
    assert len({7, *seeds}) == 4
    assert books.envs[1].next_seed not in {7, *seeds}
