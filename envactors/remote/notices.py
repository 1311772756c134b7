"""Log messages about nodes."""

from __future__ import annotations

import logging

from envactors.actor import recording
from envactors.runtime import Runtime

_log = logging.getLogger("envactors")


def log_node(runtime: Runtime, level: int, name: str, text: str, *args: object) -> None:
    """Log something about a node, with its name as the attribute ``node`` of the record.

    Handlers may block, so this logs in a thread of the runtime.
    """
    recording.recorder.on_notice(None, text % args)
    runtime.log(lambda: _log.log(level, text, *args, extra={"node": name}))
