"""Seeing a program from outside, and recording what its actors do.

    program:  server ── answers requests ──▶ snapshot        trace ── writes ──▶ trace_file
                 ▲ Unix socket of the user's own, at one of the `addresses`
    terminal: programs ◀── `envactors top`, `envactors stacks`

Importing this package registers the server and the trace of ``ENVACTORS_TRACE`` as a service, which begins with the
first actor. Nothing below this package imports it.
"""

from __future__ import annotations

from envactors import services

TYPE_CHECKING = False  # as in `envactors.services`
if TYPE_CHECKING:
    from envactors.loop import Loop


def _begin(loop: Loop) -> services.Service | None:
    from envactors.observe.server import begin

    return begin(loop)


services.on_start.append(_begin)
