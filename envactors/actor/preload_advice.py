"""Advice on imports that make starts slow, given once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from envactors.system.choice import PORTABLE

_log = logging.getLogger("envactors")
# What was told already: the modules of one advice, the longest import first.
_advised: set[tuple[str, ...]] = set()


def advise_preload(actor: str, seconds: Mapping[str, float]) -> None:
    """Log what to preload, unless it was logged before, or nothing can be; a log handler may block.

    Args:
        actor: The actor's name.
        seconds: The imports that have made unpickling its factory slow, the longest first.
    """
    modules = tuple(seconds)
    if PORTABLE or modules in _advised:  # there are no fork servers
        return
    _advised.add(modules)
    parts = ", ".join(f"{module} {each:.1f} s" for module, each in seconds.items())
    _log.warning(
        "unpickling the factory of actor %r took %.1f s in its worker, since that imports %s: "
        "ProcessBackend(start_method='forkserver', preload=%r) imports it once for all workers",
        *(actor, sum(seconds.values()), parts, list(modules)),
    )
