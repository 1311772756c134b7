"""Some interleavings of threads that wait; `python -m tests.simulation --interleavings` runs more of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulation.interleavings import as_deviations, as_name, explore, explore_randomly, replay
from simulation.planted_waits import PLANTED, Planted
from simulation.primitives import controlled
from simulation.scenarios import SCENARIOS
from simulation.schedule import Run, Scenario

Build = Callable[[Run], Callable[[], None] | None]
# The scenarios of the explorer's own tests use primitives of this module.
THIS_MODULE = sys.modules[__name__]
# How many schedules of each scenario the default run has, and a long one.
FEW = 20
MANY = 1500
# The most schedules until a planted bug is found.
MOST_PER_BUG = 3000
# The bugs that take long to find.
LONG_SEARCHES = {"replies stay masked after a loop of waits"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_leaves_a_thread_asleep(name: str) -> None:
    report = explore(SCENARIOS[name], bound=2, limit=FEW)
    assert report.violation is None, f"{report.violation}\nschedule {report.name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_leaves_a_thread_asleep_in_a_long_run(name: str) -> None:
    for report in (explore(SCENARIOS[name], bound=2, limit=MANY), explore_randomly(SCENARIOS[name], MANY // 4)):
        assert report.violation is None, f"{report.violation}\nschedule {report.name}"


def as_parameter(planted: Planted) -> Any:
    return pytest.param(planted, marks=[pytest.mark.slow] * (planted.what in LONG_SEARCHES), id=str(planted))


@pytest.mark.parametrize("planted", [as_parameter(one) for one in PLANTED])
def test_a_planted_bug_is_found_and_can_be_replayed(planted: Planted) -> None:
    with planted.context():
        report = explore(planted.scenario, bound=2, limit=MOST_PER_BUG)
        assert report.violation is not None, f"not found in {report.schedules} schedules"
        switches: list[str] = []
        violation = replay(planted.scenario, report.name, switches.append)
    assert str(violation) == str(report.violation)
    assert switches


# The explorer itself -------------------------------------------------------------------------------------


class Counter:
    """A number that several threads raise without a lock."""

    def __init__(self) -> None:
        self.value = 0

    def add(self) -> None:
        value = self.value
        self.value = value + 1


def small_scenario(build: Build) -> Scenario:
    return Scenario("small", (THIS_MODULE,), build, lambda carriers: controlled([THIS_MODULE], carriers))


def lose_an_update(run: Run) -> Callable[[], None]:
    counter = Counter()
    run.add_thread("first", counter.add)
    run.add_thread("second", counter.add)

    def check() -> None:
        assert counter.value == 2, f"the counter is {counter.value}"

    return check


def test_a_lost_update_takes_one_preemption() -> None:
    scenario = small_scenario(lose_an_update)
    sequential = explore(scenario, bound=0)
    assert sequential.violation is None
    assert (sequential.schedules, sequential.is_complete) == (2, True)
    report = explore(scenario, bound=1)
    assert "the counter is 1" in str(report.violation)
    assert report.preemptions == 1
    assert explore_randomly(scenario, 100).violation is not None


def test_a_schedule_is_run_once() -> None:
    names: list[str] = []

    def build(run: Run) -> Callable[[], None]:
        lose_an_update(run)
        return lambda: names.append(as_name(tuple(run.deviations)))

    report = explore(small_scenario(build), bound=2)
    assert report.is_complete
    assert len(set(names)) == report.schedules
    assert len(names) == report.schedules + 1, "the first one runs once more, to fill caches"


def lock_crosswise(run: Run) -> None:
    first, second = threading.Lock(), threading.Lock()

    def take(*locks: threading.Lock) -> None:
        for lock in locks:
            lock.acquire()
        for lock in locks:
            lock.release()

    run.add_thread("forwards", lambda: take(first, second))
    run.add_thread("backwards", lambda: take(second, first))


def miss_a_notification(run: Run) -> None:
    changed = threading.Condition()
    done: list[bool] = []

    def wait() -> None:
        if not done:
            with changed, run.waiting_for(lambda: bool(done)):
                changed.wait(1.0)

    def notify() -> None:
        done.append(True)
        with changed:
            changed.notify()

    run.add_thread("waiter", wait)
    run.add_thread("notifier", notify)


def raise_an_error(run: Run) -> None:
    event = threading.Event()
    run.add_thread("setter", event.set)

    def look() -> None:
        event.is_set()
        if not event.is_set():
            raise LookupError("it is not set")

    run.add_thread("reader", look)


def spin(run: Run) -> None:
    def loop() -> None:
        while True:
            pass

    run.add_thread("spinner", loop)


@pytest.mark.parametrize(
    ("build", "violation"),
    [
        (lock_crosswise, "deadlock"),
        (miss_a_notification, "waiter sleeps although"),
        (raise_an_error, "reader raises LookupError"),
        (spin, "run for ever"),
    ],
)
def test_violations_say_what_is_wrong(build: Build, violation: str) -> None:
    report = explore(small_scenario(build), bound=1)
    assert violation in str(report.violation)
    before = threading.active_count()
    assert str(replay(small_scenario(build), report.name, lambda _: None)) == str(report.violation)
    assert threading.active_count() == before, "a thread is left"


def test_a_deadline_passes_while_nothing_else_happens() -> None:
    def build(run: Run) -> None:
        event = threading.Event()
        began = run.now

        def wait() -> None:
            assert not event.wait(3.0)
            assert run.now == began + 3.0

        run.add_thread("waiter", wait)

    report = explore(small_scenario(build), bound=2)
    assert (report.violation, report.is_complete) == (None, True)


def test_threads_of_others_keep_the_real_primitives() -> None:
    def build(run: Run) -> None:
        assert not isinstance(threading.Lock(), type(real))

    real = threading.Lock()
    scenario = Scenario("small", (), build, lambda carriers: controlled([THIS_MODULE], carriers))
    assert explore(scenario).violation is None
    assert isinstance(threading.Lock(), type(real))


def test_schedules_have_names() -> None:
    for deviations in ((), ((17, 1),), ((17, 1), (42, 2))):
        assert as_deviations(as_name(deviations)) == deviations
    with pytest.raises(ValueError, match="unpack"):
        as_deviations("17")


def test_the_command_counts_schedules() -> None:
    options = ["--interleavings", "--scenario", "one-waiter", "--preemptions", "1"]
    folder = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.simulation", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" schedules, 0 violations")
    assert "all of those with up to 1 preemptions" in done.stdout
