"""What travels over a link: records, each with a number, a checksum, and the worker that it belongs to.

The parser does no input and output. Whatever a connection does to the bytes, it either yields the records that were
sent, in order, or raises: a link that has garbled, lost or repeated anything is given up.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import Final, NamedTuple

# Magic number, kind, kind of frame, number of the record, worker, incarnation, call id, length of the payload, checksum
# of the payload; then the checksum of the header so far, and padding, so that large arrays behind it stay aligned.
_FIELDS = struct.Struct("<HBBIIIQQI")
_CHECK = struct.Struct("<I8x")
HEADER_SIZE: Final = _FIELDS.size + _CHECK.size
_MAGIC = 0xEA71
# The most to read at once, in bytes. Longer payloads get a buffer of their own.
_CHUNK = 1 << 17
# The longest payload, in bytes, unless told otherwise.
LONGEST: Final = 1 << 32


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


class Record(NamedTuple):
    """One record. The fields after the payload are those of a frame; other kinds use them as `RecordKind` says."""

    kind: int
    worker: int = 0
    payload: bytes | bytearray | memoryview = b""
    frame_kind: int = 0
    incarnation: int = 0
    call_id: int = 0


class RecordWriter:
    """Turns records into bytes."""

    def __init__(self) -> None:
        self._number = 0

    def head(self, record: Record) -> bytes:
        """Return the header of the next record; its payload follows."""
        kind, worker, payload, frame_kind, incarnation, call_id = record
        number, self._number = self._number, (self._number + 1) & 0xFFFFFFFF
        length, check = len(payload), zlib.crc32(payload)
        fields = _FIELDS.pack(_MAGIC, kind, frame_kind, number, worker, incarnation, call_id, length, check)
        return fields + _CHECK.pack(zlib.crc32(fields))


class RecordReader:
    """Turns bytes into records: read into `space`, then call `advance`.

    Args:
        longest: The longest payload that is accepted, in bytes.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._number = 0
        # What is read into: a chunk that is used again and again or, while a larger record comes, a buffer of its size.
        self._chunk = self._buffer = memoryview(bytearray(_CHUNK))
        # How many bytes of an incomplete record are at its beginning.
        self._filled = 0
        # The header of the record that comes, once it was checked.
        self._head: tuple[int, ...] | None = None

    @property
    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> list[Record]:
        """Return the records that are complete with so many more bytes.

        Raises:
            LinkCorruptError: The bytes are not the next record; nothing after this can be relied upon.
        """
        buffer, start, end = self._buffer, 0, self._filled + count
        records: list[Record] = []
        wanted = HEADER_SIZE
        while end - start >= HEADER_SIZE:
            if self._head is None:
                self._head = self._read_head(buffer[start : start + HEADER_SIZE])
            _, kind, frame_kind, _, worker, incarnation, call_id, length, check = self._head
            wanted = HEADER_SIZE + length
            if end - start < wanted:
                break
            payload = buffer[start + HEADER_SIZE : start + wanted]
            if zlib.crc32(payload) != check:
                raise LinkCorruptError(f"record {self._number - 1} does not match its checksum")
            kept = bytes(payload) if buffer is self._chunk else payload
            records.append(Record(kind, worker, kept, frame_kind, incarnation, call_id))
            start += wanted
            self._head, wanted = None, HEADER_SIZE
        self._filled = end - start
        if self._filled == 0:
            self._buffer = self._chunk
        elif wanted > len(buffer):
            self._buffer = memoryview(bytearray(wanted))
        if start > 0 or self._buffer is not buffer:
            self._buffer[: self._filled] = buffer[start:end]
        return records

    def _read_head(self, head: memoryview) -> tuple[int, ...]:
        if head[_FIELDS.size :] != _CHECK.pack(zlib.crc32(head[: _FIELDS.size])):
            raise LinkCorruptError("the header of a record does not match its checksum")
        fields = _FIELDS.unpack_from(head)
        magic, number, length = fields[0], fields[3], fields[7]
        if magic != _MAGIC or number != self._number:
            raise LinkCorruptError(f"record {number} came where {self._number} was to come")
        if length > self._longest:
            raise LinkCorruptError(f"a record has {length} bytes: at most {self._longest} are accepted")
        self._number = (self._number + 1) & 0xFFFFFFFF
        return fields


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
        method: What that runs; see `envactors.wire.control_page`.
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
