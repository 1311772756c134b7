"""The protocol of a link: records, sent as numbered frames with checksums, in two lanes.

A large payload is split into chunks, one per frame. Frames of the urgent lane go between those of the other one, so a
heartbeat or a kill waits for no payload. Records of one lane keep their order.

The code here does no input and output. Whatever a connection does to the bytes, the reader either yields the records
that were sent or raises: a link that has garbled, lost or repeated anything is given up.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections import deque
from typing import Final, NamedTuple

# Magic number, kind, kind of frame, number of the frame, worker, incarnation, call id, length of the chunk, how much of
# the payload follows in later frames, checksum of the chunk, lane; then the checksum of the header so far, and padding.
_FIELDS = struct.Struct("<HBBIIIQIQIB")
_CHECK = struct.Struct("<I3x")
HEADER_SIZE: Final = _FIELDS.size + _CHECK.size
_MAGIC = 0xEA72
# The longest part of a payload in one frame, in bytes: what an urgent record may have to wait for.
CHUNK: Final = 1 << 16
# The most to read at once, in bytes; several frames fit.
_ROOM = 1 << 18
# Small chunks are copied behind their header, so that fewer buffers are passed to the system.
_SMALL = 1 << 12
# The longest payload, in bytes, unless told otherwise. Senders refuse what is longer, call by call.
LONGEST = 1 << 32


# The place of a part of a memory: where it begins, and its size.
PLACE: Final = struct.Struct("<QQ")


class LinkCorruptError(Exception):
    """The received bytes are not the next record."""


class RecordKind(enum.IntEnum):
    """The kind of a record; requests of the caller first, then what the agent says."""

    LAUNCH = 1  # start a worker: `LaunchOrder`, pickled
    KILL = 2
    ASK_STACKS = 3  # a number for the answer, as the call id
    ECHO = 4  # the newest stamp that has come, as the call id
    END = 5  # end all workers, and the agent
    MEMORY = 6  # the layout of a memory, pickled, its number as the call id; without a payload it is forgotten
    REQUESTS = 7  # rows of requests, the call id of their step; the kind of frame is 1 if results stream
    BEGIN_TIMING = 8  # time steps and resets; the kind of frame is 1 if it is of interest when they ran
    PART = 9  # what a part of a memory holds, behind its place, the number of the memory as the call id
    # The columns of a trajectory that the next request of a worker begins with: a pickled `ColumnsNote` and them.
    COLUMNS = 11

    FRAME = 10  # either way: a frame of a worker's channel

    BEAT = 16  # a stamp, as the call id
    LAUNCHED = 17  # the worker's process id, as the call id
    OUTPUT = 18  # what a worker has printed; the kind of frame is 1 for stdout and 2 for stderr
    PROGRESS = 19  # `ProgressReport` of several workers, pickled
    EXIT = 20  # `ExitNotice`, pickled; nothing more comes of the worker
    # Rows of results, or none; the call id is that of the last finished step, the incarnation the count of overflows.
    RESULTS = 21
    STACKS = 23  # the answer to `ASK_STACKS` of this number: text
    # When the last steps and resets ran, if that is of interest, and how long all of them took, compressed; from
    # `BEGIN_TIMING` on with each heartbeat. The incarnation is the number of spans, the call id the time of the node's
    # clock, in nanoseconds.
    MEASURED = 22


# What overtakes payloads. A LAUNCH does too, so that no KILL comes before the LAUNCH that it belongs to.
URGENT: Final = frozenset(
    RecordKind[name].value for name in ("LAUNCH", "KILL", "ASK_STACKS", "ECHO", "END", "BEAT", "STACKS")
)


class Record(NamedTuple):
    """One record. The fields after the payload are those of a frame; other kinds use them as `RecordKind` says.

    ``lost`` is the length of a payload for which the receiver had no memory, and which it dropped.
    """

    kind: int
    worker: int = 0
    payload: bytes | bytearray | memoryview = b""
    frame_kind: int = 0
    incarnation: int = 0
    call_id: int = 0
    lost: int = 0


class RecordWriter:
    """Turns records into frames; urgent ones go first.

    Attributes:
        size: How many bytes of records are waiting to be taken.
    """

    def __init__(self) -> None:
        self.size: int = 0
        self._number = 0
        # By lane: the records to be sent, each with the part of its payload that was taken already, in bytes.
        self._lanes: tuple[deque[tuple[Record, int]], deque[tuple[Record, int]]] = (deque(), deque())

    def add(self, record: Record) -> None:
        """Queue a record; its payload must not change until it is sent."""
        self._lanes[0 if record.kind in URGENT else 1].append((record, 0))
        self.size += HEADER_SIZE + len(record.payload)

    def take(self, most: int) -> list[bytes | memoryview]:
        """Return the next frames, as buffers: about ``most`` bytes of them, none if nothing is waiting."""
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
        """Drop what was not taken yet."""
        self.size = 0
        for lane in self._lanes:
            lane.clear()


def frame_head(record: Record, number: int, lane: int, chunk: bytes | memoryview, rest: int) -> bytes:
    """Return the header of a frame.

    Args:
        record: The record that the frame is part of.
        number: The number of the frame.
        lane: The lane: 0 is urgent.
        chunk: The part of the payload that follows the header.
        rest: How many bytes of the payload come in later frames.
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
    """A record of which not all frames have come.

    Attributes:
        record: What its frames have in common.
        payload: The payload so far; None if there is no memory for it, and it is dropped as it comes.
        size: The length of the payload.
        left: How much of it has not come.
    """

    record: Record
    payload: bytearray | None
    size: int
    left: int


class RecordReader:
    """Turns bytes into records: read into `space`, then call `advance`.

    Args:
        longest: The longest payload that is accepted, in bytes; None for `LONGEST`.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = LONGEST if longest is None else longest
        self._number = 0
        self._buffer = memoryview(bytearray(_ROOM))
        # How many bytes of an incomplete frame are at its beginning.
        self._filled = 0
        # The header of the frame that comes, once it was checked.
        self._head: _Frame | None = None
        # By lane.
        self._unfinished: list[_Unfinished | None] = [None, None]

    @property
    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> list[Record]:
        """Return the records that are complete with so many more bytes.

        Raises:
            LinkCorruptError: The bytes are not the next frame; nothing after this can be relied upon.
        """
        buffer, start, end = self._buffer, 0, self._filled + count
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
            raise LinkCorruptError(f"frame {head.number} came where frame {self._number} was to come")
        unfinished = self._unfinished[head.lane]
        if unfinished is not None and (
            unfinished.record != _record_of(head, b"") or unfinished.left != head.length + head.rest
        ):
            raise LinkCorruptError(f"frame {head.number} does not continue the record before it")
        if unfinished is None and head.length + head.rest > self._longest:
            raise LinkCorruptError(
                f"a record has {head.length + head.rest} bytes: at most {self._longest} are accepted"
            )
        self._number = (self._number + 1) & 0xFFFFFFFF
        return head

    def _add_chunk(self, head: _Frame, chunk: memoryview) -> Record | None:
        """Return the record that is complete with this chunk, if one is."""
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
    """What starts a worker.

    Attributes:
        name: The actor's name.
        env_vars: Environment variables to set before anything is imported.
        memory: The number of the memory that steps may go through, 0 for none.
        envs: How many envs it will have.
    """

    name: str
    env_vars: dict[str, str]
    memory: int = 0
    envs: int = 1


class ProgressReport(NamedTuple):
    """What a worker is at.

    Attributes:
        worker: The worker.
        call_id: The request that it runs or ran last.
        ended: Whether that request has finished.
        position: The position in its actor of the env that runs.
        method: What that runs; see `envactors.mailbox.control_page`.
        age: How long it has run, in seconds.
        rss: Its resident memory, in bytes.
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
        progress: What it was at; None if it never was.
        exitcode: Its exit code.
        signal: The signal that ended it; both None if that is not known.
        refusal: Why it could not be started; empty if it was.
        for_good: Whether no other start can succeed either.
    """

    progress: ProgressReport | None
    exitcode: int | None = None
    signal: int | None = None
    refusal: str = ""
    for_good: bool = False
