"""Seeing a program from outside, and recording what its actors do.

    program:  monitor ── answers requests ──▶ snapshot, stacks, last output       trace ── writes ──▶ a JSON file
                 ▲ Unix socket of the user's own
    terminal: programs ◀── `envactors top`, `envactors stacks`

Nothing in the core imports this package: it reads public attributes, and those of `envactors.actor.supervisor`.
"""
