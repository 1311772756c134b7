"""Control pages and doorbells of all workers: few descriptors, a page for one worker at a time, bells for several."""

from __future__ import annotations

import itertools
import os
import signal

import numpy as np
import pytest
from budget import examples
from helpers import SOON, run_script, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.backends.process import ProcessWorker
from envactors.mailbox.control_page import FINISHED, PAGE, POSTED
from envactors.mailbox.durations import METHOD_RESET, Histograms
from envactors.process import pages
from envactors.process.pages import PagePool
from envactors.system.choice import PORTABLE
from envactors.system.descriptors import count_descriptors
from envactors.testing import EchoEnv


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40))
def test_a_page_has_one_owner_at_a_time_and_is_empty_when_it_is_handed_out(choices):
    """Each choice gives one of the pages back, or takes another one, for this many envs."""
    before, pool, taken = count_descriptors(), PagePool(), []
    for mark, (choice, envs) in enumerate(choices, 1):
        if choice < len(taken):
            pool.give_back(taken.pop(choice)[0])
            continue
        slot = pool.take(envs)
        counters = slot.page.counters
        assert not any(counters[: PAGE // 8])
        counters[POSTED], counters[FINISHED] = mark, 7
        slot.begin_timing()
        assert slot.page.histograms(envs).durations() == Histograms(envs).durations(), "another worker's do not count"
        assert len(slot.page.spans.read(0)[0]) == 0
        slot.page.spans.add(1.0, 1.0 + mark, mark, envs - 1, METHOD_RESET)
        taken.append((slot, envs, mark))
        for other, its_envs, its_mark in taken:
            assert other.page.counters[POSTED] == its_mark
            counted = other.page.histograms(its_envs).durations()[-1][1]
            assert (counted.count, counted.total) == (1, its_mark)
            assert other.page.spans.read(0)[0]["call_id"].tolist() == [its_mark]
        places = sorted(other.place for other, _, _ in taken)
        assert all(one.start + one.size <= next_one.start for one, next_one in itertools.pairwise(places))
        assert len({id(other.file) for other, _, _ in taken}) == 1, "no page is two workers'"
    slots = [slot for slot, _, _ in taken]
    taken.clear()
    slot = other = counters = None
    while slots:
        pool.give_back(slots.pop())
    assert count_descriptors() == before


def test_places_that_were_given_back_are_taken_again():
    pool = PagePool()
    kept, first = pool.take(3), pool.take(3)
    pool.give_back(first)
    for _ in range(100):
        again = pool.take(3)
        assert again.place == first.place
        pool.give_back(again)
    pool.give_back(kept)


def test_an_actor_takes_few_descriptors():
    done = run_script(
        """
        import envactors as ea
        from envactors.system.descriptors import count_descriptors

        class Env:
            def ping(self):
                return 1

        with ea.ActorPool(Env, 10) as first:
            [actor.ping().result(30) for actor in first.actors]
            before = count_descriptors()
            with ea.ActorPool(Env, 10) as second:
                [actor.ping().result(30) for actor in second.actors]
                print((count_descriptors() - before) / 10)
        """
    )
    assert (done.stdout, done.stderr) == ("11.0\n" if PORTABLE else "4.0\n", "")


@pytest.fixture
def one_bell(monkeypatch):
    """All workers share one pair of doorbells."""
    monkeypatch.setattr(pages, "PAGES", PagePool())
    monkeypatch.setattr("envactors.backends.process.PAGES", pages.PAGES)
    monkeypatch.setattr(pages, "_BELLS", 1)


def test_envs_that_share_their_bells_step_together_and_one_by_one(one_bell):
    with ea.VectorEnv([EchoEnv] * 6, envs_per_actor=2) as envs, ea.VectorEnv([EchoEnv] * 2) as others:
        envs.reset(seed=0)
        others.reset(seed=0)
        for turn in range(50):
            obs = envs.step([turn] * 6)[0]
            assert (np.asarray(obs)[:, 2] == turn).all()
            envs.step([turn] * 3, env_ids=[4, 0, 3])
            others.step([turn] * 2)
        envs.send([1] * 6)
        received = []
        while len(received) < 6:
            received += envs.recv(min_envs=1, timeout=SOON).env_ids.tolist()
        assert sorted(received) == [*range(6)]


def test_calls_behind_steps_of_several_actors_with_one_bell_all_come(one_bell):
    with ea.VectorEnv([EchoEnv] * 4) as envs:
        envs.reset(seed=0)
        for turn in range(30):
            envs.send([turn] * 4)
            futures = [envs[env_id].get("action_space") for env_id in range(4)]
            assert len(envs.recv(timeout=SOON).env_ids) == 4
            for future in futures:
                future.result(SOON)


def test_a_crashed_worker_does_not_take_a_doorbell_with_it(one_bell):
    with ea.VectorEnv([EchoEnv] * 3, on_failure="renew", restart=ea.RestartPolicy(backoff=0.0)) as envs:
        envs.reset(seed=0)
        for turn in range(3):
            os.kill(envs[turn].pid, signal.SIGKILL)
            wait_until(lambda turn=turn: envs[turn].incarnation == 1)
            envs.reset(seed=0)
            for action in range(20):
                envs.step([action] * 3)


class Mortal:
    """Ends its process, and notes that it was asked to.

    Args:
        notes: A file that gets a line.
    """

    def __init__(self, notes):
        self.notes = notes

    def die(self):
        with self.notes.open("a") as file:
            file.write("asked\n")
        os._exit(3)


def test_the_call_of_an_ended_worker_is_known_after_its_page_is_reused(tmp_path, monkeypatch):
    """A call that had begun is not repeated, and its error names it."""
    reap, taken = ProcessWorker.reap, []

    def reap_and_start_another(self):
        status = reap(self)
        taken.append(pages.PAGES.take())
        return status

    monkeypatch.setattr(ProcessWorker, "reap", reap_and_start_another)
    restart = ea.RestartPolicy(max_restarts=5, backoff=0.0)
    # Another worker keeps the file of the pages open.
    with (
        ea.spawn(EchoEnv),
        ea.spawn(lambda: Mortal(tmp_path / "notes"), restart=restart) as actor,
        pytest.raises(ea.ActorDiedError, match="in die"),
    ):
        actor.die().result(SOON)
    assert (tmp_path / "notes").read_text() == "asked\n"
    for slot in taken:
        pages.PAGES.give_back(slot)
