"""Seeing a program from outside, and recording what its actors do.

    program:  server ── answers requests ──▶ snapshot        trace ── writes ──▶ trace_file
                 ▲ Unix socket of the user's own, at one of the `addresses`
    terminal: programs ◀── `envactors top`, `envactors stacks`

Importing this package registers the server and the trace of ``ENVACTORS_TRACE`` as a service, which begins with the
first actor. Nothing below this package imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors import services

if TYPE_CHECKING:
    from envactors.runtime import Runtime


def _begin(runtime: Runtime) -> services.Service | None:
    from envactors.observe.server import begin

    return begin(runtime.loop)


services.on_start.append(_begin)
