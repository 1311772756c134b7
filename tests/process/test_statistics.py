"""Statistics: durations that workers measure, and the summaries of a vector env."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import time

import numpy as np
import pytest
from helpers import SOON, Counter, wait_for_path, wait_until
from hypothesis import given
from hypothesis import strategies as st
from nodes import preloading_backend

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.mailbox.control_page import TIMED
from envactors.mailbox.durations import HISTOGRAM, METHOD_RESET, METHOD_STEP, count, merge, summarize
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv, FaultyEnv


class Paced(EchoEnv):
    """Takes this long for a step, and twice as long for a reset."""

    def __init__(self, env_id, seconds=0.002, length=10):
        super().__init__(env_id, length)
        self.seconds = seconds

    def reset(self, **kwargs):
        time.sleep(2 * self.seconds)
        return super().reset(**kwargs)

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


def histograms_of(envs, durations):
    """Counts (env, method, seconds)."""
    found = np.zeros((envs, 2), HISTOGRAM)
    cells = memoryview(found).cast("B")
    for env, method, seconds in durations:
        count(cells.cast("q"), cells.cast("d"), env, method, seconds)
    return found


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_durations_to_about_a_tenth(durations):
    found = summarize(histograms_of(2, [(1, METHOD_RESET, seconds) for seconds in durations]))
    counted = found[1][1]
    assert counted.count == len(durations)
    assert math.isclose(counted.total, sum(durations), rel_tol=1e-9)
    assert counted.max == max(durations)
    ordered = sorted(durations)
    for share, quantile in ((0.5, counted.p50), (0.99, counted.p99)):
        true = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        assert 0.79 * true <= quantile <= 1.26 * true
    assert found[1][0] == found[0][1] == (0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 2.0**-20, 2.0**11, 1e8])
def test_very_short_and_very_long_times_are_counted(seconds):
    counted = summarize(histograms_of(1, [(0, METHOD_STEP, seconds)]))[0][0]
    assert (counted.count, counted.total, counted.max) == (1, seconds, seconds)


def test_the_times_of_processes_add_up():
    times, other = (
        histograms_of(2, [(0, METHOD_STEP, 0.5)] * 3),
        histograms_of(2, [(0, METHOD_STEP, 1.5), (1, METHOD_RESET, 2.0)]),
    )
    merge(times, other)
    (steps, _), (_, resets) = summarize(times)
    assert (steps.count, steps.total, steps.max) == (4, 3.0, 1.5)
    assert (resets.count, resets.total) == (1, 2.0)


BACKENDS = {
    "process": {},
    "thread": {"backend": "thread"},
    "inline": {"backend": "inline"},
}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_steps_and_resets_are_timed_from_the_first_look_on(options, autoreset):
    factories = [lambda i=i: Paced(i) for i in range(3)]
    with ea.VectorEnv(factories, envs_per_actor=2, autoreset=autoreset, **options) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step([0, 1, 2])
        assert envs.actors[0]._actor.page.counters[TIMED] == 0
        before = envs.stats()
        assert before.steps == [4] * 3
        assert [counted.count for counted in (*before.step_seconds, *before.reset_seconds)] == [0] * 6
        assert (before.batches, before.wait_seconds, before.caller_seconds) == (0, 0.0, 0.0)
        for _ in range(24):
            envs.step([0, 1, 2])
            time.sleep(0.001)
        stats = envs.stats()
    assert [counted.count for counted in stats.step_seconds] == [now - 4 for now in stats.steps]
    assert [counted.count for counted in stats.reset_seconds] == [2] * 3
    for counted, least in ((stats.step_seconds, 0.002), (stats.reset_seconds, 0.004)):
        assert min(one.p50 for one in counted) > 0.85 * least
        assert all(one.p50 <= one.p99 <= one.max for one in counted)
        assert all(one.total >= one.count * least for one in counted)
    assert stats.batches == 24
    assert stats.caller_seconds >= 23 * 0.001
    assert stats.wait_seconds >= 24 * 0.002


def least_cpu_seconds(envs):
    """Return the CPU time that a step of one env takes, without what other programs add to some of them."""
    batches, took = 10, []
    for _ in range(3):
        begun = time.process_time()
        for _ in range(batches):
            envs.step(np.zeros(envs.num_envs, np.int64))
        took.append(time.process_time() - begun)
    return min(took) / batches / envs.num_envs


def test_timing_and_tracing_cost_at_most_three_percent_of_steps_that_take_100_us():
    def make():
        return ea.VectorEnv([EchoEnv] * 8, backend="inline", envs_per_actor=4)

    with make() as plain, make() as timed, make() as traced:
        for envs in (plain, timed, traced):
            envs.reset(seed=0)
        timed.stats()
        took = {"plain": [], "timed": [], "traced": []}
        for _ in range(100):  # in short turns, since other programs make all of them slower at times
            took["plain"].append(least_cpu_seconds(plain))
            took["timed"].append(least_cpu_seconds(timed))
            with ea.trace(os.devnull):
                took["traced"].append(least_cpu_seconds(traced))
    for kind in ("timed", "traced"):
        more = [seconds - plain for seconds, plain in zip(took[kind], took["plain"], strict=True)]
        assert statistics.median(more) < 0.03 * 100e-6, (kind, took)


def test_durations_of_lost_processes_are_kept():
    with ea.VectorEnv([lambda i=i: Paced(i, 0.0) for i in range(2)], on_failure="renew") as envs:
        envs.stats()
        envs.reset(seed=0)
        for turn in range(30):
            if turn % 10 == 5:
                incarnation = envs[1].incarnation
                os.kill(envs[1].pid, signal.SIGKILL)
                wait_until(lambda incarnation=incarnation: envs[1].incarnation > incarnation)
            envs.step([0, 1])
        stats = envs.stats()
    assert stats.step_seconds[0].count == stats.steps[0]
    assert stats.actors[1].incarnation == 3
    assert stats.step_seconds[1].count >= 30 - 2 * 3 - 3
    assert stats.step_seconds[1].count <= stats.steps[1]


def test_a_standby_that_is_taken_is_timed():
    with ea.VectorEnv([EchoEnv] * 2, on_failure="renew", standbys=1) as envs:
        envs.stats()
        envs.reset(seed=0)
        os.kill(envs[1].pid, signal.SIGKILL)
        wait_until(lambda: envs[1].incarnation == 1)
        envs.step([1, 1])
        envs.step([1, 1])
        before = envs.stats().step_seconds[1].count
        for _ in range(5):
            envs.step([1, 1])
        assert envs.stats().step_seconds[1].count == before + 5


def test_steps_on_nodes_are_timed_there():
    backend = preloading_backend(LocalNodes(2), __name__, heartbeat=0.1)
    with ea.VectorEnv([lambda i=i: Paced(i) for i in range(4)], envs_per_actor=2, backend=backend) as envs:
        envs.stats()
        envs.reset(seed=0)
        for _ in range(7):
            envs.step(np.zeros(4, np.int64))
        wait_until(lambda: [counted.count for counted in envs.stats().step_seconds] == [7] * 4)
        assert min(counted.p50 for counted in envs.stats().step_seconds) > 0.0017
        node = envs.actors[0].node
        assert envs.stats().actors[0].node == node
        assert envs.stats().actors[0].rss > 1_000_000
        envs.actors[0].kill(restart=True)
        wait_until(lambda: envs.actors[0].incarnation == 1)
        assert [counted.count for counted in envs.stats().step_seconds] == [7] * 4


def test_waits_of_recv_and_of_steps_in_two_halves_count_too():
    with ea.VectorEnv([lambda i=i: Paced(i, 0.1) for i in range(2)]) as envs:
        envs.reset(seed=0)
        envs.stats()
        envs.send([1, 2])
        received = 0
        while received < 2:
            received += len(envs.recv(min_envs=1).env_ids)
        assert envs.stats().batches == 0
        access = VectorAccess(envs)
        access.start_step([1, 2])
        access.finish_step()
        stats = envs.stats()
        assert stats.batches == 1
        assert stats.wait_seconds > 0.1, "each of the two waits takes most of the steps' 0.1 s"


def test_one_line_says_where_the_time_goes():
    with ea.VectorEnv([lambda i=i: Paced(i, 0.02 if i == 1 else 0.002) for i in range(3)]) as envs:
        envs.reset(seed=0)
        assert str(envs.stats()) == "0 steps, 0 episodes; nothing was timed yet"
        for _ in range(5):
            envs.step([0, 1, 2])
            time.sleep(0.02)
        stats = envs.stats()
    assert stats.caller_seconds >= 4 * 0.02
    assert stats.wait_seconds >= stats.step_seconds[1].total >= 5 * 0.02
    assert stats.step_seconds[1].p99 >= 0.018
    assert re.fullmatch(r"envs \d+ %, caller \d+ %, envactors \d+ %; slowest env \d \(p99 .+ ms\)", str(stats))


def test_the_stats_of_an_actor_show_what_it_is_doing(tmp_path):
    with ea.spawn(Counter, name="busy") as actor:
        actor.add(1).result(SOON)
        idle = actor.stats()
        assert (idle.completed, idle.state, idle.pid, idle.node) == (1, ea.ActorState.IDLE, actor.pid, None)
        assert (idle.method, idle.elapsed, idle.incarnation) == (None, 0.0, 0)
        assert idle.rss > 1_000_000
        assert 0 < idle.started_in < SOON
        running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "go on"))
        wait_for_path(tmp_path / "begun")
        queued = actor.add(1)
        busy = actor.stats()
        assert (busy.state, busy.method, busy.queued) == (ea.ActorState.BUSY, "touch_then_wait", 1)
        assert 0 < busy.elapsed < SOON
        (tmp_path / "go on").touch()
        running.result(SOON)
        queued.result(SOON)
    closed = actor.stats()
    assert (closed.state, closed.pid, closed.rss, closed.completed) == (ea.ActorState.CLOSED, None, 0, 3)


def test_a_running_step_is_named():
    with ea.VectorEnv([lambda: FaultyEnv(EchoEnv())] * 2, on_failure="renew", deadlines=ea.Deadlines(step=1.0)) as envs:
        envs.reset(seed=0)
        envs[1].arm("hang_in_c").result(SOON)
        envs.send([1, 1])
        wait_until(lambda: envs.stats().actors[1].method == "step")
        wait_until(lambda: envs.stats().actors[1].elapsed > 0.1)
        assert isinstance(ea.VectorStats, type)
        assert envs.stats().actors[0].method is None
        envs.recv()
