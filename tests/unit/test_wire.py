"""Channels over real sockets, in whatever pieces bytes come; pickling and how exceptions travel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fnmatch
import functools
import io
import json
import pickle
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from budget import examples
from helpers import SOON
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.errors import RemoteTraceback, cause_of
from envactors.mailbox import pickling
from envactors.mailbox.channel import Channel, ChannelCorruptError
from envactors.mailbox.messages import Failure, Fault, Frame, Pickled
from envactors.mailbox.pickling import content_of, dumps, loads, pack_failure, try_to_read, unpack_failure

quick = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# Channels ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def socket_pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def bytes_of(sent):
    """What a channel writes for these frames, read by a plain socket that comes and goes."""
    raw = bytearray()
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        channel = Channel(ours)
        for frame in sent:
            channel.send(frame)
        while channel.backlog:
            raw += theirs.recv(1 << 20)
            channel.flush()
        ours.shutdown(socket.SHUT_WR)
        while data := theirs.recv(1 << 20):
            raw += data
    return bytes(raw)


CHUNK = 65536  # what one read takes at most
HEADER = len(bytes_of([Frame(0, 0, 0, b"")]))

edges = [
    0,
    1,
    CHUNK - HEADER - 1,
    CHUNK - HEADER,
    CHUNK - HEADER + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK,
    3_000_000,
]
sizes = st.sampled_from(edges) | st.integers(0, 300) | st.integers(0, 200_000)
frames = st.builds(
    lambda kind, incarnation, call_id, size: Frame(kind, incarnation, call_id, random.Random(size).randbytes(size)),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    sizes,
)
some_frames = st.lists(frames, max_size=6)
# Sizes of the pieces that bytes come in: within headers, about a read, and large.
pieces = st.lists(st.integers(1, 50) | st.sampled_from([HEADER, CHUNK - 1, CHUNK, CHUNK + 1, 500_000]), min_size=1)


def plain(received):
    """Frames with payloads that compare."""
    return [frame._replace(payload=bytes(frame.payload)) for frame in received]


def cut(raw, sizes):
    """The bytes in pieces of these sizes, over and over; the rest of long ones in large pieces."""
    at, count = 0, 0
    while at < len(raw):
        size = sizes[count % len(sizes)] if count < 500 else 1 << 20
        yield raw[at : at + size]
        at, count = at + size, count + 1


def receive_ready(channel):
    """All frames that a channel that does not block can give now."""
    received = []
    with contextlib.suppress(BlockingIOError):
        while (more := channel.receive()) is not None:
            received += more
    return received


@quick
@given(some_frames, pieces)
def test_frames_survive_any_fragmentation(sent, sizes):
    """An end that does not block gives each frame as soon as its last byte is there, and not before."""
    received, arrived_bytes = [], 0
    ends = [sum(HEADER + len(frame.payload) for frame in sent[: i + 1]) for i in range(len(sent))]
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        theirs.setblocking(False)
        channel = Channel(ours)
        for piece in cut(bytes_of(sent), sizes):
            rest = memoryview(piece)
            while rest:
                written = theirs.send(rest)
                rest = rest[written:]
                arrived_bytes += written
                received += receive_ready(channel)
                assert len(received) == sum(1 for end in ends if end <= arrived_bytes)
        assert plain(received) == sent
        theirs.close()
        assert channel.receive() is None


@quick
@given(some_frames, pieces)
def test_blocking_end_receives_frames_in_pieces(sent, sizes):
    raw = bytes_of(sent)
    with socket_pair() as (ours, theirs):

        def write():
            for piece in cut(raw, sizes):
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=write)
        writer.start()
        channel, received = Channel(ours), []
        while (more := channel.receive()) is not None:
            received += more
        writer.join()
    assert plain(received) == sent


@quick
@given(some_frames, some_frames)
def test_frames_echoed_by_the_peer_arrive_unchanged(there, back):
    """The parent's end does not block and keeps what does not fit; the worker's end blocks and answers."""
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        parent, worker, seen, received = Channel(ours), Channel(theirs), [], []

        def work():
            while (more := worker.receive()) is not None:
                seen.extend(more)
            for frame in back:
                worker.send(frame)
            theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=work)
        thread.start()
        for frame in there:
            parent.send(frame)
        while parent.backlog:
            select.select([], [ours], [])
            parent.flush()
        ours.shutdown(socket.SHUT_WR)
        more = []
        while more is not None:
            received += more
            select.select([ours], [], [])
            more = parent.receive()
        thread.join()
    assert plain(seen) == there
    assert plain(received) == back


@quick
@given(some_frames, st.integers(1, 300_000))
def test_backlog_is_sent_later_and_in_order(sent, read_size):
    """The peer reads a little at a time, and the channel writes as much as there is room for."""
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        theirs.setblocking(False)
        sender, receiver, received = Channel(ours), Channel(theirs), []
        for frame in sent:
            sender.send(frame)
        while True:
            had_backlog = sender.backlog
            sender.flush()
            received += receive_ready(receiver)
            if not had_backlog:
                break
    assert plain(received) == sent


def test_send_does_not_block_when_the_peer_does_not_read():
    frame = Frame(1, 2, 3, bytes(1_000_000))
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        channel = Channel(ours)
        assert not channel.backlog
        for _ in range(10):
            channel.send(frame)
            assert channel.backlog
        theirs.close()
        with pytest.raises(OSError) as caught:
            channel.flush()
        assert caught.value.errno == errno.EPIPE
        channel.close()
        assert not channel.backlog


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
def test_send_to_a_closed_peer_raises_broken_pipe(size):
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        theirs.close()
        channel = Channel(ours)
        with pytest.raises(BrokenPipeError) as caught:
            channel.send(Frame(1, 2, 3, bytes(size)))
        assert caught.value.errno == errno.EPIPE


def test_blocking_end_sends_a_whole_frame_despite_a_signal():
    """The system call returns early then, after the part that has fitted."""
    sent = Frame(1, 2, 3, bytes(CHUNK // 2))
    interrupted, received = threading.Event(), []
    with socket_pair() as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

        def interrupt_and_read():
            select.select([theirs], [], [])  # the sender has begun, and its buffer is full
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            interrupted.wait(SOON)
            receiver = Channel(theirs)
            while not received:
                received.extend(receiver.receive())

        before = signal.signal(signal.SIGUSR1, lambda *_: interrupted.set())
        reader = threading.Thread(target=interrupt_and_read)
        reader.start()
        try:
            channel = Channel(ours)
            channel.send(sent)
            assert interrupted.is_set()
            assert not channel.backlog
            reader.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert plain(received) == [sent]


def test_incomplete_frame_is_not_received():
    raw = bytes_of([Frame(1, 2, 3, bytes(2 * CHUNK))])
    for kept in (0, 1, HEADER - 1, HEADER, HEADER + 1, CHUNK, CHUNK + HEADER, 2 * CHUNK):
        with socket_pair() as (ours, theirs):
            theirs.sendall(raw[:kept])
            theirs.close()
            channel, received = Channel(ours), []
            while (more := channel.receive()) is not None:
                received += more
        assert received == []


@quick
@given(st.binary(max_size=400))
def test_garbage_raises_or_yields_frames_of_its_size(garbage):
    """Whatever somebody else writes after a frame: an error, or frames of no more bytes than came."""
    sent = Frame(1, 2, 3, b"whole")
    with socket_pair() as (ours, theirs):
        ours.setblocking(False)
        channel = Channel(ours)
        theirs.sendall(bytes_of([sent]))
        assert plain(receive_ready(channel)) == [sent]
        theirs.sendall(garbage)
        try:
            received = receive_ready(channel)
        except ChannelCorruptError:
            return
        assert sum(HEADER + len(frame.payload) for frame in received) <= len(garbage)


def test_bytes_that_do_not_form_a_frame_are_corruption():
    for garbage in (b"Traceback (most recent call last):\n", b"\xff" * HEADER, b"\0" * HEADER, b"x" * 1000):
        with socket_pair() as (ours, theirs):
            theirs.sendall(garbage)
            with pytest.raises(ChannelCorruptError, match=re.escape(repr(garbage[:HEADER]))):
                Channel(ours).receive()


# Values --------------------------------------------------------------------------------------------------

# The characters that texts have by default: hypothesis takes ten times as long to list those.
text = functools.partial(st.text, st.characters(exclude_categories=["Cs"]))
atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text() | st.binary(max_size=20)
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(values)
def test_plain_values_travel_as_plain_pickle(value):
    data = dumps(value)
    assert b"cloudpickle" not in data
    assert loads(data) == loads(bytearray(data)) == loads(memoryview(data)) == value


def test_text_that_contains_main_arrives_unchanged():
    assert loads(dumps(["__main__", {"__main__": b"__main__"}])) == ["__main__", {"__main__": b"__main__"}]


def test_arrays_arrive_unchanged():
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    again = loads(memoryview(dumps(array)))
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)


def test_large_arrays_can_be_written_to_however_they_were_sent():
    data = dumps([np.zeros(1 << 14)])
    within = content_of(loads(dumps(Pickled(bytes(data)))))
    for (array,) in (loads(data), loads(bytes(data)), loads(memoryview(bytes(data))), within):
        array[0] = 1


class Moment:
    """Is loaded as the time then."""

    def __reduce__(self):
        return time.perf_counter, ()


def test_other_threads_run_while_large_bytes_are_loaded():
    pickled = dumps([Moment(), bytes(50_000_000), Moment()])
    ticks, is_over = [0.0], threading.Event()

    def tick():
        while not is_over.wait(0.0001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    has_run = False
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # they run only while nobody has the GIL
    try:
        for _ in range(100):  # the system may let other processes run at the wrong time
            ticks.clear()
            begun, _, ended = loads(pickled)
            has_run = any(begun < when < ended for when in tuple(ticks))
            if has_run:
                break
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert has_run


@pytest.mark.parametrize("size", [20_000_000, 1 << 24, (1 << 24) - 1])
def test_large_pickles_arrive_unchanged_and_no_part_of_one_does(size):
    value = [bytes([1]) * size, "text", b"2" * 70_000, {3: "x" * 70_000}]
    pickled = dumps(value)
    assert loads(pickled) == value
    with pytest.raises(pickle.UnpicklingError):
        loads(pickled[: len(pickled) // 2])
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads(pickled[:-1])


def test_cached_functions_arrive_with_their_parameters():
    class Lists:
        @functools.cache  # noqa: B019 # the usual idiom of PettingZoo
        def observation_space(self, agent):
            return [agent]

        @staticmethod
        @functools.lru_cache(3, typed=True)
        def double(x):
            return 2 * x

    @functools.cache
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    fibonacci.unit = "rabbits"
    arrived, (lists,) = loads(dumps((fibonacci, [Lists()])))
    assert (arrived(80), arrived.unit, arrived.__wrapped__.__name__) == (fibonacci(80), "rabbits", "fibonacci")
    assert arrived.cache_info().hits > 0  # it calls itself, not a copy without a cache
    assert lists.observation_space("a") is lists.observation_space("a")
    assert lists.double.cache_parameters() == {"maxsize": 3, "typed": True}
    by_name = fnmatch._compile_pattern
    assert loads(dumps([lists, by_name]))[1] is by_name


def test_a_cached_function_that_does_not_call_its_wrapped_one_is_refused():
    """A copy would be made of the function that `functools.wraps` has named."""

    def named(number):
        return number

    cached = functools.wraps(named)(functools.lru_cache(lambda number: number + 1))
    assert cached(1) == 2
    with pytest.raises(pickle.PicklingError, match=r"apply functools\.wraps first"):
        dumps(cached)


def test_cached_properties_and_generic_functions_arrive():
    class Lists:
        @functools.cached_property
        def space(self):
            return [1]

        @functools.singledispatchmethod
        def kind(self, x):
            return "any"

        @kind.register
        def _(self, x: int):
            return "int"

    @functools.singledispatch
    def kind(x):
        return "any"

    @kind.register
    def _(x: int):
        return "int"

    assert (Lists().kind(1), kind(1)) == ("int", "int")
    lists, arrived = loads(dumps((Lists(), kind)))
    assert lists.space is lists.space
    assert [lists.kind(1), lists.kind(""), arrived(1), arrived("")] == ["int", "any"] * 2


def test_lambdas_and_local_classes_arrive():
    offset = 3

    class Local:
        def __init__(self, value):
            self.value = value

    assert loads(dumps(lambda x: x + offset))(4) == 7
    assert loads(dumps(Local(5))).value == 5
    assert loads(dumps({"class": Local}))["class"](6).value == 6


def test_classes_that_come_back_leave_those_of_this_process_as_they_are():
    made = []

    class Base:
        def __init_subclass__(cls):
            made.append(cls)

    class Local(Base):
        registry: ClassVar = []
        count = 0

    registry, data = Local.registry, dumps(Local())
    Local.count = 5
    assert type(loads(data)) is Local
    assert Local.count == 5
    assert Local.registry is registry
    assert made == [Local]


def test_functions_that_arrive_by_value_keep_their_file_for_tracebacks():
    assert loads(dumps(lambda: 1)).__code__.co_filename == __file__


def test_dumps_raises_for_values_that_do_not_pickle():
    with pytest.raises(TypeError, match="pickle"):
        dumps([1, threading.Lock()])


class Interrupted:
    """Pickles, but an exception of a signal handler comes while it does for the first time."""

    was_pickled = False

    def __reduce__(self):
        if not self.was_pickled:
            self.was_pickled = True
            raise TimeoutError("of a signal handler")
        return Interrupted, ()


@pytest.mark.parametrize("pickle_it", [dumps, functools.partial(pickling.pickle_argument, "it")])
def test_an_exception_of_a_signal_handler_while_a_value_is_pickled_is_raised(pickle_it):
    with pytest.raises(TimeoutError, match="of a signal handler"):
        pickle_it(Interrupted())


class Changing:
    """Its dict changes while it is pickled for the first time, as another thread may change it."""

    def __init__(self):
        self.values = {"key": self, "other": 1}
        self.was_pickled = False

    def __getstate__(self):
        if not self.was_pickled:
            self.was_pickled = True
            self.values["new"] = 1
        return {}


def test_a_dict_that_changes_while_it_is_pickled_is_pickled_again():
    assert loads(dumps(Changing().values))["new"] == 1


# Exceptions ----------------------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class MadeOnce(Exception):
    """Its __init__ must not run again, and would show."""

    made = 0

    def __init__(self):
        super().__init__("made")
        type(self).made += 1


class PathError(OSError):
    def __init__(self, path):
        super().__init__(errno.EIO, "no luck with", path)
        self.path = path


class DecodeError(UnicodeDecodeError):
    def __init__(self):
        super().__init__("utf-8", b"ab\xff", 2, 3, "not mine")


class QuietExit(SystemExit):
    def __init__(self, code, why):
        super().__init__(code)
        self.why = why


class MissingPart(ImportError):
    def __init__(self, part):
        super().__init__("a part is missing", name=part, path=f"/lib/{part}")


class OwnReduction(Exception):
    def __init__(self, left, right):
        super().__init__(left + right)
        self.halves = (left, right)

    def __reduce__(self):
        return OwnReduction, self.halves


class OwnReductionEx(Exception):
    def __reduce_ex__(self, protocol):
        return OwnReductionEx, (f"by protocol {protocol}",)


class OwnState(Exception):
    def __setstate__(self, state):
        super().__setstate__({**state, "restored": True})


def with_attributes(error, **attributes):
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


TRAVELLERS = [
    ValueError(),
    ValueError("one", 2, None, ["three"]),
    TwoArguments(3, "detail"),
    KeywordOnly(code=4),
    with_attributes(RuntimeError("attributes"), number=3, array=[1.5], inner={"a": (1, 2)}),
    with_attributes(ValueError("noted"), __notes__=["first note", "second note"]),
    OSError("only a message"),
    OSError(errno.ENOENT, "gone", "a file"),
    OSError(errno.EXDEV, "far", "one file", None, "another"),
    PermissionError(errno.EPERM, "no", b"bytes"),
    BlockingIOError(errno.EAGAIN, "later", 5),
    PathError("/dev/nothing"),
    io.UnsupportedOperation("not here"),
    UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "bad byte"),
    UnicodeEncodeError("ascii", "h\xe9", 1, 2, "bad letter"),
    DecodeError(),
    KeyError("key"),
    KeyError(("a", 1)),
    StopIteration([1, 2]),
    SystemExit(3),
    SystemExit("said why"),
    QuietExit(3, "tired"),
    KeyboardInterrupt(),
    GeneratorExit(),
    ImportError("no module", name="part", path="/lib/part"),
    ModuleNotFoundError("no module", name="other"),
    MissingPart("wheel"),
    SyntaxError("bad", ("file.py", 3, 4, "x = = 1")),
    json.JSONDecodeError("no value", "[1,", 3),
    subprocess.CalledProcessError(3, ["cmd"], b"out", b"err"),
    np.linalg.LinAlgError("singular"),
    concurrent.futures.CancelledError(),
    ea.ActorDiedError("gone", actor="a", index=1, pid=2, incarnation=3, signal=9, stderr_tail="tail", aborted=True),
    ea.ActorTimeoutError("late", actor="a", timeout=2.5, stacks="stacks"),
    ea.RestartsExhaustedError("spent", causes=[ea.ActorDiedError("one", exitcode=3)]),
    with_attributes(ValueError("outer"), inner=TwoArguments(1, "x"), more=[KeywordOnly(code=2), {"k": PathError("p")}]),
    ValueError("in the arguments", TwoArguments(1, "x"), [KeywordOnly(code=2)]),
]


def travel(error):
    """Takes an exception through what the wire does to it."""
    failure = pack_failure(error, Fault.RAISED)
    assert failure.pickled is not None
    return unpack_failure(Failure(*loads(dumps(tuple(failure)))))


def assert_alike(one, other):
    """Equality that goes into containers and exceptions."""
    assert type(one) is type(other)
    if isinstance(one, BaseException):
        assert str(one) == str(other)
        assert_alike(one.args, other.args)
        assert_alike(vars(one), vars(other))
        public = [name for name in dir(one) if not name.startswith("_")]
        for name in public:  # those of C, such as errno and filename, are not in vars
            if not callable(getattr(one, name, None)):
                assert_alike(getattr(one, name, "none"), getattr(other, name, "none"))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_alike(list(one.values()), [other[key] for key in one])
    else:
        assert one == other


def test_exception_keeps_type_arguments_and_attributes():
    for error in TRAVELLERS:
        arrived = travel(error)
        assert arrived is not error
        assert_alike(arrived, error)


@quick
@given(
    st.sampled_from([Exception, ValueError, KeyError, SystemExit, StopIteration]),
    st.lists(values, max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "detail", "_private", "__notes__"]), values),
)
def test_arguments_and_attributes_of_exceptions_arrive(kind, args, attributes):
    error = with_attributes(kind(*args), **attributes)
    assert_alike(travel(error), error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_exception_group_arrives_with_its_leaves():
    leaves = [TwoArguments(1, "x"), ExceptionGroup("inner", [KeywordOnly(code=2)]), OSError(errno.EIO, "no", "file")]  # noqa: F821
    error = with_attributes(ExceptionGroup("outer", leaves), extra=3)  # noqa: F821
    arrived = travel(error)
    assert arrived.exceptions is not error.exceptions
    assert_alike(arrived, error)


def test_exception_is_rebuilt_without_calling_init():
    error = MadeOnce()
    assert (travel(error).args, MadeOnce.made) == (("made",), 1)


def test_custom_reduction_of_an_exception_is_used():
    arrived = travel(OwnReduction("left", "right"))
    assert (arrived.args, arrived.halves) == (("leftright",), ("left", "right"))
    assert travel(OwnReductionEx("x")).args == ("by protocol 5",)
    assert vars(travel(with_attributes(OwnState(), a=1))) == {"a": 1, "restored": True}


def failing(error):
    """An exception that was raised, with a traceback and a cause."""
    try:
        try:
            raise KeyError("the reason")
        except KeyError as reason:
            raise error from reason
    except BaseException as raised:
        return raised


def test_traceback_arrives_as_the_cause():
    arrived = travel(failing(TwoArguments(1, "x")))
    assert isinstance(arrived.__cause__, ea.RemoteTraceback)
    text = arrived.__cause__.text
    assert text in str(arrived.__cause__)
    for part in ("in failing", "KeyError: 'the reason'", "direct cause", "TwoArguments: 1: x"):
        assert part in text


class NoRepr(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


class NoReduction(Exception):
    def __reduce__(self):
        raise RuntimeError("not me")


def test_exception_that_does_not_pickle_arrives_as_text():
    for error in (
        with_attributes(ValueError("stuck"), lock=threading.Lock()),
        ValueError("stuck", threading.Lock()),
        with_attributes(ValueError("stuck"), inner=with_attributes(KeyError(), lock=threading.Lock())),
        NoReduction("stuck"),
    ):
        failure = pack_failure(failing(error), Fault.RAISED)
        assert failure.pickled is None
        assert failure.text == repr(error)
        assert "stuck" in failure.traceback
        assert "in failing" in failure.traceback
        assert unpack_failure(failure) is None


def test_exception_whose_repr_raises_arrives_with_its_type():
    failure = pack_failure(failing(NoRepr("x")), Fault.RESULT)
    assert failure.fault is Fault.RESULT
    assert failure.text == "<NoRepr whose repr raises>"
    assert "in failing" in failure.traceback
    assert type(unpack_failure(failure)) is NoRepr


class NoText(Exception):
    def __str__(self):
        return self.response.text

    __repr__ = __str__


class NoArgs(Exception):
    @property
    def args(self):
        raise RuntimeError("no args")


class NoNotes(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")


class NoCause(Exception):
    @property
    def __cause__(self):
        raise RuntimeError("no cause")


class NoBool(Exception):
    def __bool__(self):
        raise RuntimeError("no bool")


@pytest.mark.parametrize("kind", [NoText, NoArgs, NoNotes, NoCause, NoBool])
def test_exception_of_a_broken_class_arrives_with_its_frames(kind):
    failure = pack_failure(failing(kind("x")), Fault.RAISED)
    assert "in failing" in failure.traceback
    assert kind.__name__ in failure.traceback
    assert kind.__name__ in failure.text
    assert type(unpack_failure(failure)) is kind
    assert type(cause_of(unpack_failure(failure))) is RemoteTraceback


def explode():
    raise RuntimeError("boom on arrival")


class ExplodesOnArrival(Exception):
    def __reduce__(self):
        return explode, ()


class Reading:
    """Raises errors, one at each call, before it returns a value."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return "value"


def test_an_exception_that_comes_once_is_raised_and_another_one_is_that_of_the_bytes():
    assert try_to_read(Reading()) == ("value", None)
    with pytest.raises(ZeroDivisionError):
        try_to_read(Reading(ZeroDivisionError()))
    error = ZeroDivisionError()
    assert try_to_read(Reading(error, ValueError())) == (None, error)
    with pytest.raises(KeyboardInterrupt):
        try_to_read(Reading(KeyboardInterrupt(), KeyboardInterrupt()))


def test_bytes_that_have_changed_or_take_long_are_not_read_again(monkeypatch):
    error = ZeroDivisionError()
    assert try_to_read(Reading(error), lambda: False) == (None, error)
    monkeypatch.setattr(pickling, "_QUICK", 0.0)
    assert try_to_read(Reading(error)) == (None, error)


def test_unpack_failure_returns_none_unless_it_unpickles_to_an_exception():
    exploding = pack_failure(ExplodesOnArrival(), Fault.RAISED).pickled
    for pickled in (exploding, b"", b"garbage", pickle.dumps("no exception"), pickle.dumps(ValueError)):
        assert unpack_failure(Failure(Fault.RAISED, pickled, "text", "traceback")) is None


def test_exception_that_refers_to_itself_keeps_its_attributes():
    """rebuild_exception gets the state among its arguments: a cycle through it comes back empty."""
    error, other = ValueError("one"), KeyError("two")
    error.other, other.owner, error.number = other, error, 3
    arrived = travel(error)
    assert vars(arrived).keys() == {"other", "number"}
    assert arrived.other.owner is arrived


def test_slots_of_exceptions_arrive():
    """numpy.exceptions.AxisError has __slots__, and its __str__ needs them."""
    # In NumPy itself before 1.25.
    with pytest.raises(getattr(np, "exceptions", np).AxisError) as caught:
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


def test_exception_with_its_own_new_and_two_builtin_bases_arrives():
    assert travel(WithNew(1, "x")).args == ("1 x",)
    assert travel(TwoBases("x")).args == ("x",)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_exception_group_with_its_own_new_arrives():
    assert travel(Group([ValueError(1)], 3)).exit_code == 3
