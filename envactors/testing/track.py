"""What a storm knows of each env, and a result as it was handed out."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from envactors.actor.handle import ActorHandle


class Track:
    """What is known of one env.

    Args:
        env_id: Which.
        handle: Its handle.

    Attributes:
        asked: When it was asked for the result that it owes, None where it owes none.
        action: The action of that step.
        asked_of: The incarnation of its actor when it was.
        incarnation: The process that holds its episode, None where that is not known.
        resets: Whether its next step resets.
        renewed: Whether that is on a new process.
        root_seed: The seed of its last seeded reset.
        last: Its last observation.
        steps: Since that reset.
        is_known: Whether it can be told what its next result must be.
    """

    def __init__(self, env_id: int, handle: ActorHandle) -> None:
        self.env_id = env_id
        self.handle = handle
        self.asked: float | None = None
        self.action: Any = None
        self.asked_of = 0
        self.begin(0)
        self.last: Any = None

    def ask(self, action: Any) -> None:
        """Notes that it is asked to step, or to reset."""
        self.action = action
        self.asked, self.asked_of = time.monotonic(), self.handle.incarnation

    def begin(self, seed: int) -> None:
        """Notes that what it was asked for is a reset, with this seed."""
        self.root_seed, self.resets, self.renewed = seed, True, False
        self.incarnation: int | None = None
        self.steps, self.is_known = 0, True


class Delivered(NamedTuple):
    """One result as it was handed out.

    Attributes:
        track: Of which env.
        obs: Its observation.
        reward: Its reward.
        terminated: Whether the episode reached its end.
        truncated: Whether the episode was cut.
        info: The env's own dict.
        incarnation: The process that it comes from, None where that was not told.
        seed: That of a reset that was asked for by hand; else None.
    """

    track: Track
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int | None
    seed: int | None = None
