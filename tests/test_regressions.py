"""What the package once got wrong; each test says what should be."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import SOON, Counter

import envactors as ea
from envactors.actor.interrupts import Shield
from envactors.actor.policy import restart_delay
from envactors.actor.reactor import Reactor
from envactors.arrays.specs import OBJECT, ArraySpec, conform, split_batch
from envactors.errors import twin
from envactors.system import Doorbell
from envactors.wire.messages import Fault
from envactors.wire.pickling import pack_failure, unpack_failure


def travel(error):
    failure = pack_failure(error, Fault.RAISED)
    assert failure.pickled is not None
    return unpack_failure(failure)


class TwoArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


def test_twin_of_a_timeout_keeps_its_message():
    """OSError.__new__ drops the arguments where a subclass has an __init__ of its own."""
    error = ea.ActorTimeoutError("late", timeout=2.0)
    assert (str(twin(error)), twin(error).args) == ("late", ("late",))


def test_end_to_end():
    class Env:
        def hang(self):
            time.sleep(60)

    with ea.spawn(Env, deadlines=ea.Deadlines(call=0.3)) as actor:
        first, queued = actor.hang(), actor.hang()
        assert "deadline" in str(first.exception())
        assert "deadline" in str(queued.exception())


def test_an_exception_that_knows_itself_keeps_its_attributes():
    """rebuild_exception gets the state among its arguments: a cycle through it comes back empty."""
    error, other = ValueError("one"), KeyError("two")
    error.other, other.owner, error.number = other, error, 3
    arrived = travel(error)
    assert vars(arrived).keys() == {"other", "number"}
    assert arrived.other.owner is arrived


def test_slots_arrive():
    """numpy.exceptions.AxisError has __slots__, and its __str__ needs them."""
    with pytest.raises(np.exceptions.AxisError) as caught:
        np.zeros(3).sum(axis=5)
    assert str(travel(caught.value)) == str(caught.value)


class WithNew(Exception):
    def __new__(cls, code, detail):
        return super().__new__(cls, f"{code} {detail}")

    def __init__(self, code, detail):
        super().__init__(f"{code} {detail}")


if sys.version_info >= (3, 11):

    class Group(ExceptionGroup):  # noqa: F821 # of Python 3.11
        """As in Python's documentation of exception groups."""

        def __new__(cls, errors, exit_code):
            self = super().__new__(Group, f"exit code: {exit_code}", errors)
            self.exit_code = exit_code
            return self

        def derive(self, excs):
            return Group(excs, self.exit_code)


class TwoBases(RuntimeError, ImportError):
    """Its memory layout is ImportError's: RuntimeError.__new__ refuses it; should start from the __base__ chain."""


def test_own_new_and_two_builtin_bases():
    assert travel(WithNew(1, "x")).args == ("1 x",)
    assert travel(TwoBases("x")).args == ("x",)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_a_group_with_a_new_of_its_own():
    assert travel(Group([ValueError(1)], 3)).exit_code == 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups and no notes")
def test_a_step_error_pickles_with_nested_failures_and_its_notes():
    outer = ValueError("outer")
    outer.inner = TwoArguments(1, "x")
    group = ExceptionGroup("group", [TwoArguments(1, "x")])  # noqa: F821 # of Python 3.11
    for failure in (outer, group):
        pickle.loads(pickle.dumps(ea.VectorStepError("m", failures={0: failure})))
    error = ea.VectorStepError("m")
    error.add_note("a note")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["a note"]


def test_arrays_without_axes_are_refused_in_words():
    for spec in (None, OBJECT, ArraySpec((), np.int64)):
        with pytest.raises(ea.SpaceMismatchError):
            split_batch(spec, np.array(3), 2, "actions")  # TypeError: len() of unsized object
    with pytest.raises(ea.SpaceMismatchError):
        split_batch(OBJECT, {1, 2}, 2, "actions")  # TypeError: 'set' object is not subscriptable


@pytest.mark.parametrize(
    "call",
    [
        lambda envs: envs.reset(seed=[1.5]),
        lambda envs: envs.reset(seed=[[1]]),
        lambda envs: envs.reset(env_ids=5),
    ],
)
def test_wrong_input_is_a_vector_input_error(call):
    with ea.VectorEnv([Plain]) as envs, pytest.raises(ea.VectorInputError):
        call(envs)


def test_numpy_ints_are_ints():
    with ea.VectorEnv([Plain]) as envs:
        envs.reset()
        envs.send([0])
        assert len(envs.recv(min_envs=np.int64(1)).env_ids) == 1
    ea.Deadlines(step=np.float32(1.5))
    ea.RestartPolicy(max_restarts=np.int64(2))


class Plain:
    def reset(self, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        return np.zeros(2), 0.0, False, False, {}


def test_no_backoff_stays_no_backoff():
    assert restart_delay(ea.RestartPolicy(5000, 600.0, backoff=0.0, backoff_max=30.0), [0.0] * 1024, 0.0) == 0.0


def test_huge_ints_are_refused_or_taken():
    ea.RestartPolicy(max_restarts=10**400)  # OverflowError: int too large to convert to float


def test_no_value_changes_silently():
    """Same kind, and another number: 300 becomes 44."""
    with pytest.raises(ea.SpaceMismatchError):
        conform(ArraySpec((), np.int8), 300, "the action")
    with pytest.raises(ea.SpaceMismatchError):
        conform(ArraySpec((), np.int64), 2**63, "the action")


def test_a_list_of_small_ints_goes_into_uint8():
    """Python's ints have no dtype: [1, 2, 3] for Box(0, 255, (3,), uint8)."""
    assert conform(ArraySpec((3,), np.uint8), [1, 2, 3], "the action").dtype == np.uint8


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_handlers_that_raise_inside_the_shield_leave_no_handler_replaced(method):
    """A signal whose handler raises, just before each line of the shield itself."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signum, boom) for signum in signals]
    stuck = []
    try:
        for signum in signals:
            for line in range(14):
                for one in signals:
                    signal.signal(one, boom)
                shield = Shield()
                raise_at_line(getattr(Shield, method).__code__, line, signum, shield)
                try:
                    with shield:
                        pass
                except Boom:
                    pass
                stuck += [(signum, line, one) for one in signals if signal.getsignal(one) is not boom]
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)
    assert not stuck


def raise_at_line(code, line, signum, shield):
    count = 0

    def trace(frame, event, _arg):
        nonlocal count
        if frame.f_code is not code:
            return None
        if event == "line":
            if count == line:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signum)
            count += 1
        return trace

    sys.settrace(trace)
    try:
        with shield:
            pass
    except Boom:
        pass
    finally:
        sys.settrace(None)


def test_a_denied_restart_is_no_restart():
    """The supervisor counts the loss that was refused: after a renewal it bars a restart the window has room for."""

    class Env:
        def die(self):
            import os

            os._exit(1)

        def ok(self):
            return 1

    window = 3.0
    with ea.spawn(Env, restart=ea.RestartPolicy(max_restarts=1, window=window, backoff=0.0)) as actor:
        actor.ok().result()
        begin = time.monotonic()
        actor.die().exception()  # granted
        actor.ok().result()
        time.sleep(max(0.0, begin + 2.0 - time.monotonic()))
        actor.die().exception()  # refused: two within the window
        assert actor.ok().exception() is not None
        actor.renew().result()
        time.sleep(max(0.0, begin + window + 0.3 - time.monotonic()))
        actor.die().exception()  # the only restart granted is older than the window
        assert actor.ok().result() == 1


def test_a_late_reply_is_not_taken_for_a_death():
    """One descriptor's number goes from a channel to a sentinel while the channel's event is on its way.

    So a live process was taken for dead, and left running without its actor.
    """
    taken_for_dead = threading.Event()
    reactor = Reactor(tuple)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(reactor.join, SOON)
        cleanup.callback(reactor.stop)
        doorbells = [cleanup.enter_context(contextlib.closing(Doorbell())) for _ in range(3)]
        sentinel, *channels = doorbells
        numbers = [os.dup(channel.fileno()) for channel in channels]
        for number in numbers:
            cleanup.callback(os.close, number)
        handled = []

        def reuse(number, other):
            if not handled:
                reactor.unwatch_channel(other)
                os.dup2(sentinel.fileno(), other)
                reactor.watch(other, lambda _mask: taken_for_dead.set())
                cleanup.callback(reactor.unwatch, other)
            handled.append(number)

        first, second = numbers
        cleanup.enter_context(reactor._pump_lock)
        reactor._mask(True)  # the reactor's own thread stays away
        reactor.watch_channel(first, lambda _mask: reuse(first, second))
        reactor.watch_channel(second, lambda _mask: reuse(second, first))
        for channel in channels:
            channel.ring()
        reactor._handle_replies(reactor._replies.poll(0))
        assert len(handled) == 1
        assert not taken_for_dead.is_set()


def test_in_line_threads_that_work_at_the_same_time_keep_each_other_from_nothing():
    """A thread that came later and left later put back the other's mark, and that one never worked again."""
    entered, go = threading.Event(), threading.Event()

    class Process:
        turns = 0

        def work(self):
            self.turns += 1
            if threading.current_thread() is other:
                entered.set()
                assert go.wait(SOON)
            elif not entered.is_set():
                other.start()
                assert entered.wait(SOON)
            return False

    with ea.spawn(Plain, backend="inline") as actor:
        supervisor = actor._supervisor
        real, supervisor._process = supervisor._process, Process()
        other = threading.Thread(target=supervisor.work)
        try:
            supervisor.work()
            go.set()
            other.join(SOON)
            supervisor.work()
            assert supervisor._process.turns == 3
        finally:
            supervisor._process = real


def test_an_actor_whose_death_was_raised_where_its_handle_is_known_is_freed():
    def lose():
        with ea.spawn(Counter, restart=ea.RestartPolicy(backoff=0.01)) as actor:
            with pytest.raises(ea.ActorDiedError):
                actor.die().result()
            actor.add(1).result()
            return weakref.ref(actor._supervisor)

    supervisor = lose()
    gc.collect()
    assert supervisor() is None
