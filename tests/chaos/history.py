"""Per-env bookkeeping of a chaos run, and one delivered result."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from envactors.actor.handle import ActorView


class EnvHistory:
    """State of one env, as far as the results so far tell it.

    Args:
        env_id: Index of the env.
        handle: Handle of the env's actor.

    Attributes:
        requested_at: Time of the pending request (`time.monotonic`); None if none is pending.
        action: Action of the last request.
        requested_incarnation: Incarnation of the actor when the last request was made.
        incarnation: Incarnation that holds the current episode; None if unknown.
        resets: True if the next step resets the env.
        renewed: True if that reset runs in a new process.
        root_seed: Seed of the last seeded reset.
        last_obs: Last observation.
        steps: Steps since the last seeded reset.
        delivered_steps: All steps whose results were delivered, without failed ones.
        is_predictable: False once a result was wrong, until the next seeded reset.
    """

    def __init__(self, env_id: int, handle: ActorView) -> None:
        self.env_id = env_id
        self.handle = handle
        self.requested_at: float | None = None
        self.action: Any = None
        self.requested_incarnation = 0
        self.delivered_steps = 0
        self.begin_episode(0)
        self.last_obs: Any = None

    def record_request(self, action: Any) -> None:
        """Record that a step or reset was requested."""
        self.action = action
        self.requested_at, self.requested_incarnation = time.monotonic(), self.handle.incarnation

    def begin_episode(self, seed: int) -> None:
        """Record that the pending request is a reset with this seed."""
        self.root_seed, self.resets, self.renewed = seed, True, False
        self.incarnation: int | None = None
        self.steps, self.is_predictable = 0, True


class Delivered(NamedTuple):
    """One result as the vector env delivered it.

    Attributes:
        history: History of the env.
        obs: Observation.
        reward: Reward.
        terminated: True if the episode has terminated.
        truncated: True if the episode was truncated.
        info: The env's info dict.
        incarnation: Incarnation that made the result; None if the call does not say.
        seed: Seed of an explicit reset; None for any other result.
    """

    history: EnvHistory
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int | None
    seed: int | None = None
