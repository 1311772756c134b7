"""The protocol of a link: records, sent as numbered frames with checksums, in two lanes.

A large payload is split into chunks, one per frame. Frames of the urgent lane go between those of the other lane, so a
heartbeat or a kill does not wait for payloads. Records of one lane keep their order.

This module performs no I/O. Whatever a connection does to the bytes, the reader either yields the records that were
sent or raises: a link that has changed, lost, or repeated any bytes is closed.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections import deque
from typing import Final, NamedTuple

# Magic number, kind, kind of frame, number of the frame, worker, incarnation, call id, length of the chunk, rest of the
# payload in later frames, checksum of the chunk, lane; then the checksum of this header, and padding.
_FIELDS = struct.Struct("<HBBIIIQIQIB")
_CHECK = struct.Struct("<I3x")
HEADER_SIZE: Final = _FIELDS.size + _CHECK.size
_MAGIC = 0xEA72
# The longest chunk of a payload, in bytes, which an urgent record may have to wait for.
CHUNK: Final = 1 << 16
# The most to read at once, in bytes; several frames fit.
_ROOM = 1 << 18
# Small chunks are copied behind their header, so that fewer buffers are passed to the system.
_SMALL = 1 << 12
# The longest payload, in bytes. Senders replace longer ones by failures; see `envactors.remote.oversize`.
LONGEST = 1 << 32


# The place of a part of a memory: its start and its size.
PLACE: Final = struct.Struct("<QQ")


class LinkCorruptError(Exception):
    """The received bytes are not the next record."""


class RecordKind(enum.IntEnum):
    """The kind of a record: first those from the caller, then those from the agent."""

    LAUNCH = 1  # start a worker: `LaunchOrder`, pickled
    KILL = 2
    ASK_STACKS = 3  # the call id is an id for the answer, the kind of frame whether it may interrupt
    ECHO = 4  # the call id is the newest stamp
    END = 5  # end all workers and the agent
    MEMORY = 6  # the layout of a memory, pickled; the call id is that of the memory; no payload: free it
    REQUESTS = 7  # rows of requests; the call id is that of their step; the kind of frame is 1 if results stream
    BEGIN_TIMING = 8  # time steps and resets; the kind of frame is 1 if spans are to be sent
    PART = 9  # the place and the content of a part of a memory; the call id is that of the memory; no content: free it
    STREAM = 12  # send single results of all steps that run
    # A pickled `MirroredPart` and the content of it that the next request of the worker starts with.
    MIRROR = 11

    FRAME = 10  # either way: a frame of a worker's channel

    BEAT = 16  # the call id is a stamp
    LAUNCHED = 17  # the call id is the worker's process id
    OUTPUT = 18  # output of a worker; the kind of frame is 1 for stdout and 2 for stderr
    PROGRESS = 19  # the `ProgressReport`s of several workers, pickled
    EXIT = 20  # an `ExitNotice`, pickled; the last record of the worker
    # Rows of results, or none; the call id is that of the last finished step, the incarnation the count of overflows.
    RESULTS = 21
    STACKS = 23  # the text for the `ASK_STACKS` with this call id
    # Spans, if they are to be sent, and the durations of all steps and resets, compressed; sent with each heartbeat
    # after `BEGIN_TIMING`. The incarnation is the number of spans, the call id the time of the node's clock in
    # nanoseconds.
    MEASURED = 22


# The kinds that overtake payloads. LAUNCH is one of them, so that no KILL overtakes the LAUNCH of its worker.
URGENT: Final = frozenset(
    RecordKind[name].value for name in ("LAUNCH", "KILL", "ASK_STACKS", "ECHO", "END", "BEAT", "STACKS")
)


class Record(NamedTuple):
    """One record.

    The fields after the payload are those of a frame; for other kinds, `RecordKind` says what they mean. ``lost`` is
    the length of a payload that the receiver dropped because it had no memory for it.
    """

    kind: int
    worker: int = 0
    payload: bytes | bytearray | memoryview = b""
    frame_kind: int = 0
    incarnation: int = 0
    call_id: int = 0
    lost: int = 0


class RecordWriter:
    """Turns records into frames, urgent ones first.

    Attributes:
        size: How many bytes of records are waiting to be taken.
    """

    def __init__(self) -> None:
        self.size: int = 0
        self._number = 0
        # The records of each lane, each with the size of the part of its payload that was already taken, in bytes.
        self._lanes: tuple[deque[tuple[Record, int]], deque[tuple[Record, int]]] = (deque(), deque())

    def add(self, record: Record) -> None:
        """Queue a record, whose payload must not change until it is sent."""
        self._lanes[0 if record.kind in URGENT else 1].append((record, 0))
        self.size += HEADER_SIZE + len(record.payload)

    def take(self, most: int) -> list[bytes | memoryview]:
        """Return about ``most`` bytes of the next frames, as buffers; none if nothing is waiting."""
        parts: list[bytes | memoryview] = []
        while most > 0:
            number = 0 if self._lanes[0] else 1
            lane = self._lanes[number]
            if not lane:
                break
            record, start = lane[0]
            total = len(record.payload)
            end = min(start + CHUNK, total)
            chunk = memoryview(record.payload)[start:end]
            head = frame_head(record, self._number, number, chunk, total - end)
            self._number = (self._number + 1) & 0xFFFFFFFF
            if len(chunk) < _SMALL:
                parts.append(head + chunk)
            else:
                parts += (head, chunk)
            most -= HEADER_SIZE + len(chunk)
            self.size -= len(chunk)
            if end == total:
                lane.popleft()
                self.size -= HEADER_SIZE
            else:
                lane[0] = record, end
        return parts

    def clear(self) -> None:
        """Drop the records that were not taken yet."""
        self.size = 0
        for lane in self._lanes:
            lane.clear()


def frame_head(record: Record, number: int, lane: int, chunk: bytes | memoryview, rest: int) -> bytes:
    """Return the header of a frame.

    Args:
        record: The record that the frame is part of.
        number: The number of the frame.
        lane: The lane; 0 is the urgent one.
        chunk: The part of the payload that follows the header.
        rest: The size of the rest of the payload, in later frames.
    """
    kind, worker, _, frame_kind, incarnation, call_id, _ = record
    check = zlib.crc32(chunk)
    fields = _FIELDS.pack(_MAGIC, kind, frame_kind, number, worker, incarnation, call_id, len(chunk), rest, check, lane)
    return fields + _CHECK.pack(zlib.crc32(fields))


class _Frame(NamedTuple):
    """The fields of a header, in their order."""

    magic: int
    kind: int
    frame_kind: int
    number: int
    worker: int
    incarnation: int
    call_id: int
    length: int
    rest: int
    check: int
    lane: int


class _Unfinished(NamedTuple):
    """A record whose frames have not all arrived.

    Attributes:
        record: The fields that its frames share.
        payload: The payload so far; None if there is no memory for it, so that it is dropped.
        size: The length of the payload.
        left: The length of the part that has not arrived.
    """

    record: Record
    payload: bytearray | None
    size: int
    left: int


class RecordReader:
    """Turns bytes into records: read into `space`, then call `advance`.

    Args:
        longest: The longest accepted payload, in bytes; None for `LONGEST`.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = LONGEST if longest is None else longest
        self._number = 0
        self._buffer = memoryview(bytearray(_ROOM))
        # The size of the incomplete frame at the beginning of the buffer.
        self._filled = 0
        # The checked header of that frame; None while it is incomplete.
        self._head: _Frame | None = None
        # The unfinished record of each lane.
        self._unfinished: list[_Unfinished | None] = [None, None]

    @property
    def space(self) -> memoryview:
        """The buffer for the next bytes; never empty."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> list[Record]:
        """Return the records that are complete after ``count`` more bytes.

        Raises:
            LinkCorruptError: The bytes are not the next frame. The link is not usable any more.
        """
        buffer = self._buffer
        start = 0
        end = self._filled + count
        records: list[Record] = []
        while end - start >= HEADER_SIZE:
            if self._head is None:
                self._head = self._read_head(buffer[start : start + HEADER_SIZE])
            head = self._head
            if end - start < HEADER_SIZE + head.length:
                break
            chunk = buffer[start + HEADER_SIZE : start + HEADER_SIZE + head.length]
            if zlib.crc32(chunk) != head.check:
                raise LinkCorruptError(f"frame {head.number} does not match its checksum")
            if (record := self._add_chunk(head, chunk)) is not None:
                records.append(record)
            start += HEADER_SIZE + head.length
            self._head = None
        self._filled = end - start
        if start > 0:
            buffer[: self._filled] = buffer[start:end]
        return records

    def _read_head(self, raw: memoryview) -> _Frame:
        if raw[_FIELDS.size :] != _CHECK.pack(zlib.crc32(raw[: _FIELDS.size])):
            raise LinkCorruptError("the header of a frame does not match its checksum")
        head = _Frame._make(_FIELDS.unpack_from(raw))
        if head.magic != _MAGIC or head.number != self._number or head.lane > 1 or head.length > CHUNK:
            raise LinkCorruptError(f"frame {head.number} came instead of frame {self._number}")
        unfinished = self._unfinished[head.lane]
        if unfinished is not None and (
            unfinished.record != _record_of(head, b"") or unfinished.left != head.length + head.rest
        ):
            raise LinkCorruptError(f"frame {head.number} does not continue the record before it")
        if unfinished is None and head.length + head.rest > self._longest:
            text = f"a record has {head.length + head.rest} bytes: at most {self._longest} are accepted"
            raise LinkCorruptError(text)
        self._number = (self._number + 1) & 0xFFFFFFFF
        return head

    def _add_chunk(self, head: _Frame, chunk: memoryview) -> Record | None:
        """Return the record that this chunk completes, if it does."""
        unfinished = self._unfinished[head.lane]
        if unfinished is None:
            if head.rest == 0:
                return _record_of(head, bytes(chunk))
            size = head.length + head.rest
            unfinished = _Unfinished(_record_of(head, b""), _allocate(size), size, size)
        record, payload, size, left = unfinished
        if payload is not None:
            filled = size - left
            payload[filled : filled + head.length] = chunk
        if head.rest > 0:
            self._unfinished[head.lane] = _Unfinished(record, payload, size, head.rest)
            return None
        self._unfinished[head.lane] = None
        return record._replace(lost=size) if payload is None else record._replace(payload=payload)


def _record_of(head: _Frame, payload: bytes) -> Record:
    return Record(head.kind, head.worker, payload, head.frame_kind, head.incarnation, head.call_id)


def _allocate(size: int) -> bytearray | None:
    try:
        return bytearray(size)
    except MemoryError:
        return None


class LaunchOrder(NamedTuple):
    """The order to start a worker.

    Attributes:
        name: The actor's name.
        env_vars: Environment variables to set before anything is imported.
        memory_id: The id of the memory of its vector; 0 without one.
        envs: How many envs it will have.
    """

    name: str
    env_vars: dict[str, str]
    memory_id: int = 0
    envs: int = 1


class ProgressReport(NamedTuple):
    """The progress of a worker.

    Attributes:
        worker: The id of the worker.
        call_id: The current or last request.
        ended: Whether that request has finished.
        position: The position of the running env in its actor.
        method: The running method; see `envactors.mailbox.control_page`.
        age: How long it has been running, in seconds.
        rss: The resident memory of the worker, in bytes.
    """

    worker: int
    call_id: int
    ended: bool
    position: int
    method: int
    age: float
    rss: int


class ExitNotice(NamedTuple):
    """How a worker has ended.

    Attributes:
        progress: Its last progress; None if it was never started.
        exitcode: Its exit code, if known.
        signal: The number of the signal that ended it, if known.
        refusal: Why it could not be started; empty if it was.
        for_good: Whether another attempt to start it is useless.
        is_helper_lost: Whether it ended with the helper process of its node.
    """

    progress: ProgressReport | None
    exitcode: int | None = None
    signal: int | None = None
    refusal: str = ""
    for_good: bool = False
    is_helper_lost: bool = False
