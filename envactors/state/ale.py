"""The state of ALE, with the one part of it that ALE keeps to itself: the action that sticky actions repeat.

With ``repeat_action_probability`` p each frame repeats, with probability p, the action that was executed in the frame
before, whatever action it is given. ``cloneState`` has the generator that decides so, but not that action, and nothing
reads it. It matters only if the frames after the snapshot begin with repeats: the first other frame overwrites it.
Therefore it is found by trial: the frames that follow are executed once with it, and then with each action in its
place, until one has led to the same states. In the end ALE is where it was, except for its screen, which the next frame
draws.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

# How unlikely a longer row of repeats than the trials cover is.
_NEGLIGIBLE = 1e-9


def capture_ale(ale: Any) -> tuple[Any, int | None]:
    """Return the state of ALE, and the action that it repeats; None if no frame will.

    Raises:
        TypeError: None of the actions is the one, as with actions of various strengths.
    """
    state = ale.cloneState(include_rng=True)
    if not ale.getFloat("repeat_action_probability") or ale.game_over():  # a reset forgets the action
        return state, None
    minimal = [action.value for action in ale.getMinimalActionSet()]
    actions = [*minimal, *(action.value for action in ale.getLegalActionSet() if action.value not in minimal)]
    repeated = _repeated(ale, state, actions)
    ale.restoreState(state)
    return state, repeated


def restore_ale(ale: Any, state: tuple[Any, int | None]) -> None:
    """Put ALE into a state. Its screen follows with the next frame."""
    if state[1] is not None:
        _execute(ale, state[1])
    ale.restoreState(state[0])


def _repeated(ale: Any, state: Any, actions: list[int]) -> int | None:
    # If the first frame is no repeat, the action is forgotten with it. If it is one, trying it changes nothing.
    first = None
    for action in actions:
        ale.restoreState(state)
        ale.act(action)
        ram = ale.getRAM().tobytes()
        if first is not None and ram != first:
            return None
        first = ram
    expected = _next_frames(ale, state)
    for action in actions:
        _execute(ale, action)
        if _next_frames(ale, state) == expected:
            _execute(ale, action)
            return action
    ale.restoreState(state)
    raise TypeError("it is not one of its actions, at full strength, that ALE's sticky actions repeat")


def _next_frames(ale: Any, state: Any) -> list[bytes]:
    """Return the states that follow on a state, of as many frames as may repeat an action."""
    ale.restoreState(state)
    frames = []
    for _ in range(_frames(ale)):
        ale.act(0)
        frames.append(ale.getRAM().tobytes())
    # Not its `serialize()`, which takes bytes for text up to ale-py 0.10.
    return [*frames, pickle.dumps(ale.cloneState(include_rng=True))]


def _execute(ale: Any, action: int) -> None:
    """Make an action the last one that was executed: act until at least one frame has not been a repeat."""
    for _ in range(_frames(ale)):
        ale.act(action)


def _frames(ale: Any) -> int:
    probability = min(ale.getFloat("repeat_action_probability"), 0.9)
    return math.ceil(math.log(_NEGLIGIBLE) / math.log(probability))
