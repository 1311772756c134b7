"""Pass the log records of env code in workers on to the loggers of this process.

`envactors.worker.log_records` sends them.
"""

from __future__ import annotations

import logging
import pickle


def handle_record(payload: bytes | memoryview) -> None:
    """Pass a log record of a worker on to the logger of the same name."""
    record = logging.makeLogRecord(pickle.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def levels_of_loggers() -> dict[str, int]:
    """Return the levels that were set in this process, by logger; that of the root logger under the empty name."""
    loggers = logging.root.manager.loggerDict.items()  # some are placeholders, which have no level
    levels = {name: level for name, logger in loggers if (level := getattr(logger, "level", logging.NOTSET))}
    return {**levels, "": max(logging.root.level, logging.root.manager.disable + 1)}
