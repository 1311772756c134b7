"""Send the log records of env code to the caller, through the channel.

The caller's half, which hands them to its own loggers, is `envactors.backends.log_records`.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping

from envactors.mailbox.channel import Channel
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import safe_repr
from envactors.worker.context import current_actor

# The attributes of a record that are sent unchanged.
_FIELDS = (
    *("name", "levelno", "levelname", "created", "msecs", "relativeCreated", "process", "thread", "threadName"),
    *("pathname", "filename", "module", "lineno", "funcName", "stack_info"),
)
# The attributes that every record has. What else a record has is its ``extra``.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}
_log = logging.getLogger("envactors")
_FORMATTER = logging.Formatter()
# How many records of signal handlers may wait for the frame that the handlers have interrupted.
_MOST_WAITING = 1000


class FrameSender:
    """Sends the frames of several threads over one channel, one after the other.

    Args:
        channel: The channel, which blocks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Frames of signal handlers that have interrupted a `send`, and the count of log records that did not fit.
        self._waiting: deque[Frame] = deque()
        self._dropped = 0
        self._lock = threading.RLock()
        self._is_sending = False

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            OSError: The other end is closed.
        """
        with self._lock:
            if self._is_sending:  # a signal handler has interrupted a `send`, which will send this frame, too
                if frame.kind == Kind.LOGGED and len(self._waiting) >= _MOST_WAITING:
                    self._dropped += 1
                else:
                    self._waiting.append(frame)
                return
            self._is_sending = True
            try:
                self._channel.send(frame)
                while self._waiting:
                    self._channel.send(self._waiting.popleft())
            finally:
                self._is_sending = False
            dropped, self._dropped = self._dropped, 0
        if dropped:
            _log.warning("dropped %d log records of signal handlers, which interrupted the sending of another", dropped)


class RecordForwarder(logging.Handler):
    """Sends log records to the caller.

    Args:
        send: Sends a pickled record.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # env code has forked, and the channel is its parent's
            if logging.lastResort is not None:
                logging.lastResort.handle(record)
            return
        try:
            self._send(pickle.dumps(_fields_of(record)))
        except OSError:
            pass  # the caller has ended
        except Exception:
            self.handleError(record)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields = {name: getattr(record, name) for name in _FIELDS}
    for name in vars(record).keys() - _STANDARD:
        try:
            pickle.dumps(value := getattr(record, name))
        except Exception:  # of many types
            value = safe_repr(value)
        fields[name] = value
    fields["msg"] = record.getMessage()
    fields["exc_text"] = record.exc_text
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _FORMATTER.formatException(record.exc_info)
    who = current_actor()
    if who is not None:
        fields.update(actor=who.name, env_id=who.index, incarnation=who.incarnation)
    return fields


def forward_records(send: Callable[[bytes], None]) -> None:
    """Send everything that is logged in this process, and remove the handlers of preloaded modules."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    logging.root.handlers[:] = [RecordForwarder(send)]


def set_levels(levels: Mapping[str, int]) -> None:
    """Set the levels of loggers, by name, to those of the caller, so that records below them cost nothing."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
