"""What travels over a link: whatever a connection does to the bytes, only what was sent comes out, in order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envactors.remote.records import HEADER_SIZE, LinkCorruptError, Record, RecordReader, RecordWriter

LONGEST = 1 << 20
numbers = st.integers(0, (1 << 32) - 1)
payloads = st.binary(max_size=300) | st.integers(0, 300_000).map(lambda size: bytes(range(256)) * (size // 256))
records = st.builds(
    Record, st.integers(0, 255), numbers, payloads, st.integers(0, 255), numbers, st.integers(0, (1 << 64) - 1)
)
EXAMPLES = pytest.mark.parametrize("examples", [150, pytest.param(100_000, marks=pytest.mark.soak)])


def encode(sent):
    writer = RecordWriter()
    return b"".join(writer.head(record) + bytes(record.payload) for record in sent)


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
    """Runs a property with so many examples."""

    def decorate(function):
        limits = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
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
def test_what_a_connection_does_to_the_bytes_is_never_taken_for_a_record(examples):
    @check(examples, st.lists(records, min_size=1, max_size=4), st.data())
    def _(sent, data):
        whole = encode(sent)
        start = data.draw(st.integers(0, len(whole) - 1))
        end = data.draw(st.integers(start, len(whole)))
        piece = whole[start:end]
        damaged = data.draw(
            st.sampled_from(
                [
                    whole[:start] + bytes([whole[start] ^ 1 << data.draw(st.integers(0, 7))]) + whole[start + 1 :],
                    whole[:start] + whole[end:],  # lost
                    whole[:end] + piece + whole[end:],  # repeated
                    whole[:start] + data.draw(st.binary(max_size=200)) + whole[start:],
                    whole[end:] + whole[:end],  # in another order
                ]
            )
        )
        came, _ = read(damaged, iter(data.draw(st.lists(st.integers(1, 5000), max_size=10))))
        assert came == sent[: len(came)]


@pytest.mark.timeout(3000)
@EXAMPLES
def test_bytes_of_somebody_else_are_refused(examples):
    @check(examples, st.binary(min_size=HEADER_SIZE, max_size=2000))
    def _(rubbish):
        assert read(rubbish, iter([])) == ([], True)


def test_a_record_that_claims_too_much_is_refused_before_memory_is_taken():
    writer = RecordWriter()

    class Huge(bytes):
        def __len__(self):
            return LONGEST + 1

    reader, head = RecordReader(LONGEST), writer.head(Record(1, payload=Huge()))
    reader.space[: len(head)] = head
    before = len(reader.space)
    with pytest.raises(LinkCorruptError, match=f"has {LONGEST + 1} bytes: at most {LONGEST} are accepted"):
        reader.advance(len(head))
    assert len(reader.space) == before


def test_a_record_is_not_taken_twice():
    writer = RecordWriter()
    first = writer.head(Record(1))
    assert read(first + first, iter([HEADER_SIZE, HEADER_SIZE])) == ([Record(1)], True)
