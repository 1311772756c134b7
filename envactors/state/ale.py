"""Capture and restore the state of ALE, including the action that sticky actions repeat, which ALE does not expose.

With ``repeat_action_probability`` p, each frame ignores its action with probability p and repeats the action of the
previous frame. ``cloneState`` contains the random generator that decides this, but not the previous action, and ALE has
no function that returns it. The action matters only if the first frame after the snapshot repeats it, since any other
frame overwrites it. `capture_ale` finds it by trial: it runs the next frames once as they are, and then with each
possible action, until one leads to the same states. Afterwards ALE is in its previous state, except for its screen,
which the next frame draws.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

# The probability of more repeats in a row than the trials cover.
_NEGLIGIBLE = 1e-9


def capture_ale(ale: Any) -> tuple[Any, int | None]:
    """Return the state of ALE, and the action that it repeats; None if no frame will repeat it.

    Raises:
        TypeError: No action leads to the same states. This happens with continuous actions, which have a strength.
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
    """Restore the state of ALE, except for its screen, which the next frame draws."""
    if state[1] is not None:
        _execute(ale, state[1])
    ale.restoreState(state[0])


def _repeated(ale: Any, state: Any, actions: list[int]) -> int | None:
    # If the first frame does not repeat, different actions lead to different memory. That frame then overwrites the
    # previous action, so it need not be found.
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
    raise TypeError(
        "cannot find the action that ALE repeats: sticky actions (repeat_action_probability > 0) can only be captured "
        "with discrete actions"
    )


def _next_frames(ale: Any, state: Any) -> list[bytes]:
    """Return the states of the frames after a state, for as many frames as repeats can last."""
    ale.restoreState(state)
    frames = []
    for _ in range(_frames(ale)):
        ale.act(0)
        frames.append(ale.getRAM().tobytes())
    # The state is pickled because its `serialize()` fails to decode bytes as text in ale-py up to 0.10.
    return [*frames, pickle.dumps(ale.cloneState(include_rng=True))]


def _execute(ale: Any, action: int) -> None:
    """Make an action the previous one: act until at least one frame is not a repeat."""
    for _ in range(_frames(ale)):
        ale.act(action)


def _frames(ale: Any) -> int:
    probability = min(ale.getFloat("repeat_action_probability"), 0.9)
    return math.ceil(math.log(_NEGLIGIBLE) / math.log(probability))
