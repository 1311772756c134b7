"""Exceptions in the middle of requests, at every line of the library: afterwards everything is usable.

They simulate asynchronous exceptions and those of signal handlers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import itertools
import random
import signal
import sys
import threading
import time

import pytest
from helpers import FORK_SERVER, SOON
from interrupting import Interrupt, interrupt

import envactors as ea
from envactors.testing import EchoEnv

OFTEN = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)


def requests_of(envs, number, futures):
    """The requests of a vector that are interrupted, by name; each asks for the action ``number``."""
    actions = [number] * len(envs)

    def recv():
        envs.send(actions)
        envs.recv(timeout=SOON)

    def submit():
        futures[:] = envs.submit(actions)
        for future in futures:
            future.result(SOON)

    return {
        "step": lambda: envs.step(actions),
        "step of some": lambda: envs.step(actions[:3], env_ids=[2, 0, 3]),
        "reset": lambda: envs.reset(seed=number),
        "send": lambda: envs.send(actions),
        "recv": recv,
        "submit": submit,
        "call": lambda: envs.get_attr("steps"),
    }


def take_all(envs, number):
    """Takes what is still delivered: results of the request that was interrupted, or errors."""
    for _ in range(2 * len(envs)):
        try:
            batch = envs.recv(timeout=SOON)
        except ea.NothingPendingError:
            return
        except ea.VectorStepError as error:
            batch = error.batch
        for env_id, obs in zip(batch.env_ids, batch.obs, strict=True):
            assert obs[0] == env_id
            assert obs[2] in (number, -1), "it is of another request"
    raise AssertionError("results without end")


def check(envs, number):
    """Checks that all envs reset and step, and that the results are those of these requests."""
    obs, _ = envs.reset(seed=number, timeout=SOON)
    assert obs[:, 0].tolist() == list(range(len(envs)))
    assert obs[:, 1].tolist() == [0] * len(envs)
    for count in (1, 2):
        actions = [1000 + 10 * count + env_id for env_id in range(len(envs))]
        obs, *_, infos = envs.step(actions, timeout=SOON)
        assert obs[:, 1:3].tolist() == [[count, action] for action in actions], (count, obs, infos)
    envs.send([2000] * len(envs))
    batch = envs.recv(timeout=SOON)
    assert batch.obs[:, 2].tolist() == [2000] * len(envs)
    with pytest.raises(ea.NothingPendingError):
        envs.recv(timeout=0)


def interrupt_everywhere(backend, name, first, stride):
    """Interrupts a request at lines ``first``, ``first + stride``, ...; returns at how many."""
    with ea.VectorEnv(
        [lambda i=i: EchoEnv(i) for i in range(4)],
        envs_per_actor=2,
        backend=FORK_SERVER if backend == "process" else backend,
        restart=OFTEN,
    ) as envs:
        check(envs, 1)
        for turn in itertools.count():
            number = first + turn * stride
            futures = []
            where = interrupt(requests_of(envs, number, futures)[name], number)
            try:
                if turn % 2 or where is None:
                    take_all(envs, number)
                try:
                    check(envs, number)
                except ea.AlreadyPendingError:  # the request itself had ended, or was not begun, as `recv` after `send`
                    assert name in ("send", "recv", "submit")
                    assert not concurrent.futures.wait(futures, SOON).not_done
                    take_all(envs, number)
                    check(envs, number)
                except ea.VectorStepError:  # of a worker that ends in the thread that calls it
                    if backend != "inline":
                        raise
                    check(envs, number)
            except BaseException as error:
                raise AssertionError(f"{name} interrupted at {where} (line {number}): {error!r}") from error
            if where is None:
                break
        return turn


@pytest.mark.parametrize("name", ["step", "step of some", "reset", "send", "recv", "submit", "call"])
@pytest.mark.parametrize("backend", ["process"])
def test_a_vector_is_usable_after_an_exception_at_some_lines(backend, name):
    stride = 67
    # The same lines in each run; the long test has all of them.
    assert interrupt_everywhere(backend, name, stride // 2, stride) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "step of some", "reset", "send", "recv", "submit", "call"])
@pytest.mark.parametrize("backend", ["process", "inline"])
def test_a_vector_is_usable_after_an_exception_at_any_line(backend, name):
    assert interrupt_everywhere(backend, name, 0, 1) > 50


def storm(seconds, seed):
    """Steps a vector while a signal whose handler raises comes at random moments; returns how many came through."""

    armed = []  # not empty where an exception is expected

    def handle(_signum, _frame):
        if armed:
            armed.clear()
            raise Interrupt

    pauses, stopping, me = random.Random(seed), threading.Event(), threading.main_thread().ident

    def send_signals():
        while not stopping.wait(pauses.uniform(0.0, 0.01)):
            signal.pthread_kill(me, signal.SIGUSR1)

    before, count = signal.signal(signal.SIGUSR1, handle), 0
    sender = threading.Thread(target=send_signals)
    try:
        with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(4)], envs_per_actor=2, restart=OFTEN) as envs:
            envs.reset(seed=seed)
            end = time.monotonic() + seconds
            sender.start()
            is_usable = True
            while time.monotonic() < end:
                try:
                    armed.append(True)
                    if not is_usable:
                        envs.reset(seed=seed, timeout=SOON)
                        is_usable = True
                    envs.step([7] * 4, timeout=SOON)
                    armed.clear()
                except Interrupt:
                    count += 1
                    is_usable = False
            armed.clear()
            stopping.set()
            sender.join()
            envs.reset(timeout=SOON)  # the last interrupt may have begun the replacement of a process
            pids = [actor.pid for actor in envs.actors]
            check(envs, 1)
            assert [actor.pid for actor in envs.actors] == pids
    finally:
        stopping.set()
        if sender.is_alive():
            sender.join()
        signal.signal(signal.SIGUSR1, before)
    return count


# The handler may raise in the callback of a weak reference, and there Python only prints that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_vector_is_usable_after_a_storm_of_signals_whose_handler_raises():
    assert storm(1.0, 4) > 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_vector_is_usable_after_a_long_storm_of_signals(seed):
    assert storm(25.0, seed) > 100


@pytest.mark.parametrize("env_ids", [None, [3, 0, 2]], ids=["all", "some"])
@pytest.mark.parametrize(("backend", "per_actor"), [("process", 2), ("thread", 1), ("inline", 1), ("inline", 4)])
def test_a_vector_is_usable_after_a_lack_of_stack(backend, per_actor, env_ids):
    options = {"backend": backend, "envs_per_actor": per_actor, "restart": OFTEN}
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(4)], **options) as envs:
        check(envs, 1)

        def dive(depth):
            if depth:
                return dive(depth - 1)
            return envs.step([7] * len(env_ids or envs), env_ids=env_ids)

        limit = sys.getrecursionlimit() - len(inspect.stack())
        for spare, takes_all in itertools.product(range(2, 40), (False, True)):
            with contextlib.suppress(RecursionError, ea.EnvActorsError):
                dive(limit - spare)
            if takes_all:
                take_all(envs, 7)  # no action of an earlier step runs
            check(envs, spare)


class Napper:
    def nap(self):
        time.sleep(0.01)  # longer than anybody spins, so that the reply is read at the depth of the wait
        return True


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_call_ends_although_the_thread_that_reads_its_reply_lacks_stack(backend):
    def dive(depth, function):
        return dive(depth - 1, function) if depth else function()

    limit = sys.getrecursionlimit() - len(inspect.stack())
    # Nothing else makes the library look at a call that does not end.
    with ea.spawn(Napper, backend=backend, restart=OFTEN, deadlines=ea.Deadlines(slow=None)) as actor:
        for spare in range(2, 40):
            future = actor.nap()
            with contextlib.suppress(RecursionError, ea.EnvActorsError):
                dive(limit - spare, future.result)
            # Waits without a part of this library.
            assert concurrent.futures.wait([future], SOON).done, spare
            assert future.exception() is None or isinstance(future.exception(), ea.EnvActorsError)
            assert actor.nap().result(SOON)


# Where a change of an actor begins, down to where its worker gets the request.
CHANGING = {"_accept", "enqueue", "dispatch", "start", "send"}


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_process_that_is_replaced_after_an_interrupt_counts_as_no_restart(backend):
    with ea.spawn(EchoEnv, backend=backend, restart=ea.RestartPolicy(max_restarts=0)) as actor:
        for number in itertools.count():
            where = interrupt(lambda: actor.reset().result(SOON), number, only=CHANGING)
            # The call may still find the process that is about to be replaced; a dead actor runs none at all.
            with contextlib.suppress(ea.ActorDiedError):
                actor.reset().result(SOON)
            actor.reset().result(SOON)
            if where is None:
                break
        assert actor.incarnation > 3
        assert actor.stats().restarts == 0
