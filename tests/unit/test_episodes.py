"""The bookkeeper of a vector: whichever way results come, the books are the same."""

from __future__ import annotations

import types

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.arrays.slab import RESET, STEP, Layout, Slab
from envactors.vector.env_state import EnvState
from envactors.vector.episodes import Episodes

COUNT = 3
SCALAR = ea.ArraySpec((), np.dtype(np.float64))
flags = st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).map(lambda values: np.array(values, np.bool_))


class Books:
    """A bookkeeper of envs without processes."""

    def __init__(self, autoreset, recycle=None, count=COUNT):
        self.memory = 100
        worker = types.SimpleNamespace(is_leaving=False, resident_memory=lambda: self.memory)
        self.core = types.SimpleNamespace(process=types.SimpleNamespace(worker=worker))
        handle = types.SimpleNamespace(_supervisor=types.SimpleNamespace(core=self.core), _env=0)
        self.envs = [EnvState(env_id, handle) for env_id in range(count)]
        self.episodes = Episodes(self.envs, autoreset, recycle)
        layout = Layout(SCALAR, SCALAR, SCALAR, count)
        self.rows = Slab(layout, bytearray(layout.size))
        self.autoreset = autoreset
        self.reset_by_hand(range(count))

    def reset_by_hand(self, env_ids):
        env_ids = list(env_ids)
        for env_id in env_ids:
            self.episodes.record(env_id, over=False, reset=True)
        for env_id in env_ids:
            if self.envs[env_id].retiring:
                self.envs[env_id].retiring = False
                self.episodes.begin_process(self.envs[env_id])

    @property
    def state(self):
        return (
            self.episodes.steps.tolist(),
            self.episodes.episodes.tolist(),
            self.episodes.ended.tolist(),
            [(env.needs_reset, env.retiring, env.steps_before) for env in self.envs],
            self.episodes.changes > 0,
        )


def record(books, way, terminated, truncated):
    """One step of every env, as `SharedMemoryStepper.gather` and `Transitions` tell of it."""
    resets = books.episodes.ended.copy()
    terminated, truncated = terminated & ~resets, truncated & ~resets  # a reset ends no episode
    if way == "all at once":
        books.episodes.record_all(terminated, truncated, resets if resets.any() else None)
        return
    groups = [[0], [1], [2]] if way == "one by one" else [[2, 0], [1]]
    over = terminated | truncated
    for group in groups:
        if len(group) == 1:
            books.episodes.record(group[0], over=bool(over[group[0]]), reset=bool(resets[group[0]]))
        else:
            books.rows.terminated[:], books.rows.truncated[:] = terminated, truncated
            books.rows.ops[:] = np.where(resets, RESET, STEP)
            books.episodes.record_rows(group, books.rows)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("recycle", [None, ea.RecyclePolicy(max_steps=3)], ids=["keeps", "recycles"])
@settings(max_examples=examples(60))
@given(st.lists(st.tuples(flags, flags), max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_books_are_the_same_whichever_way_results_come(autoreset, recycle, rounds, full):
    mixed, *others = [Books(autoreset, recycle) for _ in range(4)]
    ways = ("all at once", "one by one", "in groups")
    for turn, (terminated, truncated) in enumerate(rounds):
        for books, way in zip(others, ways, strict=True):
            record(books, way, terminated, truncated)
        record(mixed, ways[0] if full[turn] else ways[1], terminated, truncated)
        states = [books.state for books in (mixed, *others)]
        assert states == [states[0]] * 4
        # By hand what the facade asks for before the next step.
        due = [env.env_id for env in mixed.envs if env.needs_reset or env.retiring]
        for books in (mixed, *others):
            books.reset_by_hand(due)


@pytest.mark.parametrize("way", ["all at once", "one by one"])
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
        assert books.episodes.ended.tolist() == ended.tolist()


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_after_the_end_of_an_episode_an_env_is_reset_as_it_was_agreed(autoreset):
    books = Books(autoreset)
    books.episodes.record(1, over=True, reset=False)
    assert books.episodes.ended.tolist() == [False, autoreset == "next_step", False]
    assert [env.needs_reset for env in books.envs] == [False, autoreset == "disabled", False]
    assert (books.episodes.changes > 0) is (autoreset == "disabled"), (
        "prepared steps look again where one needs a reset"
    )


def test_an_env_that_is_not_strict_needs_no_reset_after_its_episode():
    books = Books("disabled")
    books.envs[0].strict = False
    for env_id in (0, 1):
        books.episodes.record(env_id, over=True, reset=False)
    assert [env.needs_reset for env in books.envs] == [False, True, False]


@pytest.mark.parametrize("way", ["all at once", "one by one"])
def test_a_process_is_replaced_after_so_many_steps_of_its_own(way):
    books = Books("same_step", ea.RecyclePolicy(max_steps=4))
    never, always = np.zeros(COUNT, np.bool_), np.ones(COUNT, np.bool_)
    retired = []
    for turn in range(1, 13):
        record(books, way, always if turn % 2 == 0 else never, never)
        if books.envs[0].retiring:
            retired.append(turn)
            books.envs[0].retiring = False
            books.episodes.begin_process(books.envs[0])
    assert retired == [4, 8, 12]


def test_a_process_is_replaced_above_so_much_memory_and_only_between_episodes():
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
