"""A factory that raises at its actor's first start is not called again; any other failed start is retried."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import SOON, Counter, Echo, wait_until

import envactors as ea

GENEROUS = ea.RestartPolicy(max_restarts=3, backoff=0.0)


class NoSuchEnv(Exception):
    pass


def raising(path):
    """A factory that writes down each of its calls, and raises."""

    def make():
        with Path(path).open("a") as file:
            file.write("x")
        raise NoSuchEnv(f"pid {os.getpid()}")

    return make


def failing_at(path, *calls, how=None):
    """A factory whose calls of these numbers raise, or do what `how` says; the others make a counter."""

    def make():
        with Path(path).open("a") as file:
            file.write("x")
        if Path(path).stat().st_size in calls:
            if how is not None:
                how()
            raise NoSuchEnv
        return Counter()

    return make


def calls_of(path):
    return Path(path).stat().st_size


def check_error(error):
    assert isinstance(error, ea.ActorStartError)
    assert isinstance(error.__cause__, NoSuchEnv)
    assert isinstance(error.__cause__.__cause__, ea.RemoteTraceback)
    assert error.incarnation == 0
    assert "the factory of actor" in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 200


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_a_factory_that_raises_at_the_first_start_is_called_once(backend, tmp_path):
    for number, restart in enumerate([ea.RestartPolicy(max_restarts=0), GENEROUS]):
        path = tmp_path / str(number)
        with ea.spawn(raising(path), backend=backend, restart=restart) as actor:
            for call in (actor.add, actor.add):  # the one that waits for the start, and one after that
                check_error(call().exception(SOON))
            assert actor.state is ea.ActorState.DEAD
            assert actor.stats().restarts == 0
        assert calls_of(path) == 1


def test_a_vector_whose_factories_raise_fails_immediately(tmp_path):
    policy = ea.RestartPolicy(max_restarts=3, backoff=30.0)
    begin = time.monotonic()
    with pytest.raises(ea.ActorStartError) as caught:
        ea.VectorEnv([raising(tmp_path / "calls")] * 2, restart=policy)
    check_error(caught.value)
    assert calls_of(tmp_path / "calls") == 2
    assert time.monotonic() - begin < 30.0  # no wait of the restart policy


def test_a_standby_whose_factory_raises_at_its_first_start_is_given_up(tmp_path, caplog):
    def make():
        if ea.current_actor().name.startswith("standby"):
            raising(tmp_path / "calls")()
        return Echo()

    with caplog.at_level(logging.WARNING, "envactors"), ea.VectorEnv([make] * 2, standbys=1, restart=GENEROUS) as envs:
        wait_until(lambda: any("cannot be restarted" in record.getMessage() for record in caplog.records))
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]
    assert calls_of(tmp_path / "calls") == 1


def test_a_first_start_that_ends_otherwise_is_retried(tmp_path):
    for number, how in enumerate([lambda: os._exit(3), lambda: time.sleep(100)]):
        path = tmp_path / str(number)
        deadlines = ea.Deadlines(start=60.0 if number == 0 else 2.0)
        make = failing_at(path, 1, how=how)
        with ea.spawn(make, deadlines=deadlines, restart=ea.RestartPolicy(max_restarts=9, backoff=0.0)) as actor:
            assert actor.add().result(60) == 1
            assert actor.stats().restarts == calls_of(path) - 1 >= 1


def test_a_factory_that_raises_at_a_later_start_is_retried_and_counted(tmp_path):
    path = tmp_path / "calls"
    with ea.spawn(failing_at(path, 2, 3), restart=GENEROUS) as actor:
        actor.add().result(SOON)
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: actor.incarnation == 3)
        assert actor.add().result(SOON) == 1
        assert actor.stats().restarts == 3
    assert calls_of(path) == 4


def test_a_renewal_revives_an_actor_whose_factory_raised_at_the_first_start(tmp_path):
    with ea.spawn(failing_at(tmp_path / "calls", 1, 2), restart=GENEROUS) as actor:
        check = actor.add().exception(SOON)
        assert isinstance(check.__cause__, NoSuchEnv)
        assert actor.renew().result(SOON) == 2  # the second start raised too, and was retried
        assert actor.add().result(SOON) == 1


def test_retries_of_a_call_do_not_repeat_a_first_start_that_raised(tmp_path):
    with ea.spawn(raising(tmp_path / "calls"), restart=GENEROUS) as actor:
        check_error(actor.options(retries=5).add().exception(SOON))
    assert calls_of(tmp_path / "calls") == 1


def test_starts_that_fail_all_the_time_end_without_a_backoff(tmp_path):
    path = tmp_path / "calls"
    policy = ea.RestartPolicy(max_restarts=math.inf, backoff=0)
    factory = failing_at(path, *range(100), how=lambda: os.kill(os.getpid(), signal.SIGSEGV))
    with ea.spawn(factory, restart=policy) as actor:
        with pytest.raises(ea.RestartsExhaustedError, match=r"10 times in a row, and restart=.*SIGSEGV") as caught:
            actor.add(1).result(2 * SOON)
        assert len(caught.value.causes) == calls_of(path) == 10
