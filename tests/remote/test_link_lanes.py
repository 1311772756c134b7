"""Frames of two lanes on one link: urgent records overtake, and each lane keeps its order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.remote import records
from envactors.remote.records import CHUNK, URGENT, LinkCorruptError, Record, RecordKind, RecordReader, RecordWriter

KINDS = [RecordKind.FRAME, RecordKind.RESULTS, RecordKind.BEAT, RecordKind.KILL]


def feed(reader, data):
    came, position = [], 0
    while position < len(data):
        space = reader.space
        size = min(len(space), len(data) - position)
        space[:size] = data[position : position + size]
        position += size
        came += reader.advance(size)
    return came


def test_an_urgent_record_waits_for_one_chunk_at_most():
    writer, reader = RecordWriter(), RecordReader()
    writer.add(Record(RecordKind.FRAME, 1, bytes(10 * CHUNK)))
    first = b"".join(writer.take(1))
    assert len(first) <= CHUNK + records.HEADER_SIZE
    writer.add(Record(RecordKind.BEAT, call_id=5))
    rest = b"".join(writer.take(1 << 30))
    assert [record.kind for record in feed(reader, first + rest)] == [RecordKind.BEAT, RecordKind.FRAME]
    assert writer.size == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3 * CHUNK), st.integers(0, 2 * CHUNK)), max_size=8))
def test_records_of_each_lane_come_whole_and_in_order(turns):
    writer, reader, wire = RecordWriter(), RecordReader(), b""
    sent = []
    for number, (kind, size, taken) in enumerate(turns):
        sent.append(Record(kind, number, bytes([number]) * size))
        writer.add(sent[-1])
        wire += b"".join(writer.take(taken))
    came = feed(reader, wire + b"".join(writer.take(1 << 30)))
    for urgent in (True, False):
        lane = [record for record in came if (record.kind in URGENT) is urgent]
        assert lane == [record for record in sent if (record.kind in URGENT) is urgent]


@pytest.mark.parametrize("change", [{"kind": RecordKind.RESULTS}, {"worker": 8}, {"call_id": 4}, {"incarnation": 1}])
def test_a_frame_that_does_not_continue_the_record_before_it_is_rejected(change):
    record = Record(RecordKind.FRAME, 7, bytes(2 * CHUNK), call_id=3)
    heads = [
        records.frame_head(record, 0, 1, bytes(CHUNK), CHUNK),
        records.frame_head(record._replace(**change), 1, 1, bytes(CHUNK), 0),
    ]
    with pytest.raises(LinkCorruptError, match="frame 1 does not continue the record before it"):
        feed(RecordReader(), b"".join(head + bytes(CHUNK) for head in heads))


def test_a_payload_that_does_not_fit_into_memory_is_dropped_and_reported(monkeypatch):
    writer, reader = RecordWriter(), RecordReader()
    writer.add(Record(RecordKind.FRAME, 7, bytes(5 * CHUNK), call_id=3))
    writer.add(Record(RecordKind.FRAME, 8, b"next"))
    monkeypatch.setattr(records, "_allocate", lambda size: None)
    came = feed(reader, b"".join(writer.take(1 << 30)))
    assert came == [Record(RecordKind.FRAME, 7, call_id=3, lost=5 * CHUNK), Record(RecordKind.FRAME, 8, b"next")]
