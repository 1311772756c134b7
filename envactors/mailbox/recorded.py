"""The recorded requests of an env: a new worker repeats them, and errors show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envactors.mailbox.messages import REQUESTS, RecordedSteps, Replay, Reset, Set, Step
from envactors.mailbox.pickling import content_of, loads
from envactors.mailbox.specs import leaves, reader


def requests_of(replay: Replay) -> Iterator[Any]:
    """Yield the entries of a replay as messages."""
    for entry in replay.entries:
        if isinstance(entry, RecordedSteps):
            yield from _steps_of(replay, entry)
        else:
            kind, payload = entry
            yield REQUESTS[kind](*loads(payload))


def copy_replay(replay: Replay) -> Replay:
    """Return a copy that does not grow with the journal."""
    return replay._replace(entries=list(map(_copy, replay.entries)))


def _copy(entry: RecordedSteps | tuple[int, bytes]) -> RecordedSteps | tuple[int, bytes]:
    if not isinstance(entry, RecordedSteps):
        return entry
    return RecordedSteps([bytearray(column) for column in entry.columns], bytearray(entry.resets))


def _steps_of(replay: Replay, steps: RecordedSteps) -> Iterator[Any]:
    action, count = replay.action, len(steps.resets)
    pairs = zip([] if action is None else leaves(action), steps.columns, strict=True)
    columns = [np.ndarray((count, *leaf.shape), leaf.dtype, column) for leaf, column in pairs]
    for row, is_reset in enumerate(steps.resets):
        if is_reset:
            yield Reset(replay.env, None, None)
        else:
            assert action is not None, "actions in rows have a spec"
            yield Step(replay.env, reader(action, columns, row)(), replay.resets_within_step, None)


def inputs_of(replay: Replay | None, last: tuple[int, bytes]) -> list[tuple[Any, ...]]:
    """Return the requests of a replay, and the message after it, as errors show them: methods and arguments."""
    requests = [] if replay is None else [*(Set(*loads(one)) for one in replay.attributes), *requests_of(replay)]
    return [*map(_as_input, requests), input_of(*last)]


def input_of(kind: int, payload: bytes) -> tuple[Any, ...]:
    """Return a pickled message as errors show it: its method, and its arguments, unpickled."""
    return _as_input(REQUESTS[kind](*loads(payload)))


def _as_input(message: Any) -> tuple[Any, ...]:
    if isinstance(message, Reset):
        return "reset", message.seed, content_of(message.options)
    if isinstance(message, Step):
        return "step", content_of(message.action)
    return (type(message).__name__.lower(), *map(content_of, message[1:]))
