"""The inputs of a failure, as the caller knows them under the lock of the actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from envactors.mailbox.messages import Replay


class Inputs(NamedTuple):
    """The requests that led to a failure.

    Attributes:
        journal: The requests that bring the env to where it was; None if there were none, or they are not known.
        request: The kind and the pickled fields of the message that was running; None if none was.
        is_complete: Whether nothing is missing: the journal begins with a seeded reset or a saved state, or the request
            needs none.
        is_poison: Whether the same inputs have failed before.
        read_observation: Returns the last observation, and may run code of users; None if there was none.
    """

    journal: Replay | None = None
    request: tuple[int, bytes] | None = None
    is_complete: bool = True
    is_poison: bool = False
    read_observation: Callable[[], Any] | None = None
