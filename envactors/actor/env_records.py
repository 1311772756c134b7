"""The caller's half of what env code logs: the levels that it has set, and the records that come."""

from __future__ import annotations

import logging
import pickle


def levels_of_loggers() -> dict[str, int]:
    """Return the levels that were set here, by logger; that of the root logger under the empty name."""
    levels = {
        name: logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
    }
    return {**levels, "": max(logging.root.level, logging.root.manager.disable + 1)}


def handle_record(payload: bytes | bytearray | memoryview) -> None:
    """Have the logger of the same name handle what was logged in a worker."""
    record = logging.makeLogRecord(pickle.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
