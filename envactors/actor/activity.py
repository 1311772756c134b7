"""The call, step, or other request that a worker runs at one time."""

from __future__ import annotations

from typing import NamedTuple


class Activity(NamedTuple):
    """The part of a job that a worker runs at one time, for errors and deadlines: a call, the step of one env, a close.

    Attributes:
        method: Name of the method.
        index: Index of the env in its vector; 0 for a lone actor.
        call_id: Its call id; 0 if it has none yet.
        started_at: When the worker was free to begin it (`time.monotonic`); 0.0 if it has not been sent.
        deadline: How long it may run, in seconds; None for no limit.
    """

    method: str
    index: int  # type: ignore[assignment] # it hides a method of tuples that nobody calls
    call_id: int = 0
    started_at: float = 0.0
    deadline: float | None = None
