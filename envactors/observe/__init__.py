"""Seeing a program from outside, and recording what its actors do.

    program:  server ── answers requests ──▶ snapshot        trace ── writes ──▶ trace_file
                 ▲ Unix socket of the user's own, at one of the `addresses`
    terminal: programs ◀── `envactors top`, `envactors stacks`

The core imports only `server`, by name. The others read public attributes, and those of `envactors.actor.supervisor`.
"""
