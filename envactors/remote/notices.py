"""News about nodes, for the log and for a trace."""

from __future__ import annotations

import logging

from envactors.actor import recording

_log = logging.getLogger("envactors")


def tell_node(level: int, name: str, text: str, *args: object) -> None:
    """Log something about a node, with its name as the attribute ``node`` of the record."""
    _log.log(level, text, *args, extra={"node": name})
    if recording.recorder is not None:
        recording.recorder.on_notice(None, text % args)
