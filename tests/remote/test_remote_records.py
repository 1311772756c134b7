"""Records on a link: whatever happens to the bytes, only what was sent is received, in order."""

from __future__ import annotations

import faulthandler
import itertools
import select
import socket
import threading
import tracemalloc

import pytest
from budget import examples
from helpers import SOON
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envactors.remote import records as records_module
from envactors.remote.link import Link
from envactors.remote.records import (
    CHUNK,
    HEADER_SIZE,
    LinkCorruptError,
    Record,
    RecordReader,
    RecordWriter,
    frame_head,
)

LONGEST = 1 << 20
numbers = st.integers(0, (1 << 32) - 1)
BYTES = st.integers(0, 255)
payloads = st.binary(max_size=300) | st.integers(0, 300_000).map(lambda size: bytes(range(256)) * (size // 256))
records = st.builds(Record, BYTES, numbers, payloads, BYTES, numbers, st.integers(0, (1 << 64) - 1), st.just(0))
EXAMPLES = pytest.mark.parametrize("examples", [examples(300), pytest.param(100_000, marks=pytest.mark.soak)])


def encode(sent):
    """Returns the bytes of records that are sent one after the other, none of which overtakes another."""
    writer, pieces = RecordWriter(), []
    for record in sent:
        writer.add(record)
        pieces.append(b"".join(writer.take(1 << 30)))
    assert writer.size == 0
    return b"".join(pieces)


def read(data, cuts):
    """Reads bytes in pieces; returns what came out, and whether the link was given up."""
    reader, came = RecordReader(LONGEST), []
    position = 0
    while position < len(data):
        space = reader.space
        assert 0 < len(space) <= LONGEST + HEADER_SIZE
        size = min(len(space), next(cuts, len(data)) or 1, len(data) - position)
        space[:size] = data[position : position + size]
        position += size
        try:
            came += [record._replace(payload=bytes(record.payload)) for record in reader.advance(size)]
        except LinkCorruptError:
            return came, True
    return came, False


def check(examples, *strategies):
    """Runs a property with this many examples."""

    def decorate(function):
        if examples > 1000:
            faulthandler.cancel_dump_traceback_later()  # a dump of a thread that runs on may crash
        limits = settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        limits(given(*strategies)(function))()

    return decorate


@pytest.mark.timeout(3000)
@EXAMPLES
def test_records_come_out_however_they_are_cut(examples):
    @check(examples, st.lists(records, max_size=5), st.lists(st.integers(1, 5000), max_size=40))
    def _(sent, cuts):
        assert read(encode(sent), iter(cuts)) == (sent, False)


@pytest.mark.timeout(3000)
@EXAMPLES
def test_damaged_bytes_are_never_taken_for_a_record(examples):
    @check(examples, st.lists(records, min_size=1, max_size=4), st.data())
    def _(sent, data):
        whole = encode(sent)
        start, end, last = sorted(data.draw(st.tuples(*[st.integers(0, len(whole) - 1)] * 3)))
        piece, other = whole[start:end], whole[end:last]
        damaged = data.draw(
            st.sampled_from(
                [
                    whole[:start] + bytes([whole[start] ^ 1 << data.draw(st.integers(0, 7))]) + whole[start + 1 :],
                    whole[:start] + whole[end:],  # lost
                    whole[:end] + piece + whole[end:],  # repeated
                    whole[:start] + data.draw(st.binary(max_size=200)) + whole[start:],
                    whole[:start] + other + piece + whole[last:],  # swapped
                    whole[end:] + whole[:end],
                    whole[:start],  # and nothing more
                ]
            )
        )
        came, gave_up = read(damaged, iter(data.draw(st.lists(st.integers(1, 5000), max_size=10))))
        assert came == sent[: len(came)]
        assert gave_up or damaged.startswith(encode(came)), "what is left may be the beginning of a record"


@pytest.mark.timeout(3000)
@EXAMPLES
def test_whole_records_that_are_lost_repeated_or_swapped_are_noticed(examples):
    @check(examples, st.lists(records, min_size=2, max_size=5), st.data())
    def _(sent, data):
        writer, pieces = RecordWriter(), []
        for record in sent:
            writer.add(record)
            pieces.append(b"".join(writer.take(1 << 30)))
        which = st.integers(0, len(sent) - 1)
        order = data.draw(st.lists(which, min_size=1, max_size=6))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], enumerate(order)))
        came, gave_up = read(b"".join(pieces[number] for number in order), iter([]))
        assert gave_up == (same < len(order))
        assert came == (sent[: len(came)] if gave_up else sent[:same])
        assert len(came) <= same


@pytest.mark.timeout(3000)
@EXAMPLES
def test_arbitrary_bytes_are_rejected(examples):
    @check(examples, st.binary(min_size=HEADER_SIZE, max_size=2000))
    def _(rubbish):
        assert read(rubbish, iter([])) == ([], True)


@pytest.mark.timeout(3000)
@EXAMPLES
def test_headers_that_a_stranger_has_made_take_no_more_memory_than_is_allowed(examples):
    """Whose checksums are right, so that only what they say can be wrong."""
    lengths = st.integers(0, CHUNK) | st.integers(0, (1 << 32) - 1)
    rests = st.sampled_from([0, 1, LONGEST]) | st.integers(0, 2 * LONGEST) | st.integers(0, (1 << 64) - 1)
    bytes_, words = st.integers(0, 255), st.sampled_from([0, 1, 2, (1 << 32) - 1])
    magic, lane = st.sampled_from([records_module._MAGIC] * 3 + [0]), st.sampled_from([0, 1, 1, 2])

    @check(
        examples, magic, bytes_, bytes_, words, words, st.tuples(lengths, rests), words, lane, st.binary(max_size=200)
    )
    def _(magic, kind, frame_kind, number, worker, lengths, check, lane, after):
        length, rest = lengths
        fields = records_module._FIELDS.pack(magic, kind, frame_kind, number, worker, 0, 0, length, rest, check, lane)
        head = fields + records_module._CHECK.pack(records_module.zlib.crc32(fields))
        reader = RecordReader(LONGEST)
        reader.space[: len(head)] = head
        wrong = magic == 0 or number != 0 or lane > 1 or length > CHUNK or length + rest > LONGEST
        tracemalloc.start()
        try:
            reader.advance(len(head))
            assert not wrong
            assert len(reader.space) <= LONGEST + HEADER_SIZE
        except LinkCorruptError:
            assert wrong or (length == 0 and check != 0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()
        came, _ = read(head + after, iter([]))
        assert len(came) <= 1


def test_a_record_that_claims_too_much_is_rejected_before_memory_is_taken():
    reader = RecordReader(LONGEST)
    head = frame_head(Record(1), 0, 1, bytes(CHUNK), LONGEST + 1 - CHUNK)
    reader.space[: len(head)] = head
    before = len(reader.space)
    with pytest.raises(LinkCorruptError, match=f"has {LONGEST + 1} bytes: at most {LONGEST} are accepted"):
        reader.advance(len(head))
    assert len(reader.space) == before


def test_a_record_is_not_taken_twice():
    first = encode([Record(1)])
    assert read(first + first, iter([HEADER_SIZE, HEADER_SIZE])) == ([Record(1)], True)


def link_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for sock in (ours, theirs):  # small ones, so that hardly any write is complete
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    return Link(ours), Link(theirs)


def test_records_of_many_threads_come_whole_and_each_threads_in_order():
    link, other = link_pair()
    sizes, count = [0, 1, 4095, 4096, 70_000, 131_072, 400_000], 40
    done = threading.Event()

    def payload(thread, number):
        return bytes([thread, number]) * (sizes[(thread + number) % len(sizes)] // 2)

    def send(thread):
        for number in range(count):
            if number % 5 == 0:
                link.cork()
            link.send(Record(thread, number, payload(thread, number)))
            if number % 5 == 3:
                link.uncork()

    def flush():
        while not done.wait(0.0):
            link.flush()
            select.select([], [link.fileno()], [], 0.01)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    threads += [threading.Thread(target=flush)]
    for thread in threads:
        thread.start()
    came = []
    while len(came) < 3 * count:
        assert select.select([other], [], [], SOON)[0], f"{len(came)} have come"
        came += other.receive()
    done.set()
    for thread in threads:
        thread.join(SOON)
    assert link.backlog == 0
    for thread in range(3):
        own = [(record.worker, bytes(record.payload)) for record in came if record.kind == thread]
        assert own == [(number, payload(thread, number)) for number in range(count)]
    link.close()
    assert other.receive() is None
    other.close()
