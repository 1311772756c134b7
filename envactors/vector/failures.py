"""The error of a step or a rollout in which some envs have failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.errors import ActorError, VectorStepError
from envactors.mailbox.pickling import safe_str


def step_error(
    failures: dict[int, BaseException],
    batch: Any,
    count: int,
    caller: str,
    describe_actor: Callable[[int], str] | None = None,
) -> VectorStepError:
    """Return the error of some failures.

    Args:
        failures: The failures, by env.
        batch: The results of the other envs.
        count: How many envs there are in all.
        caller: Name of the user's method.
        describe_actor: Describes the actor of an env; None to leave that out.
    """
    failures = dict(sorted(failures.items()))
    first, cause = next(iter(failures.items()))
    # An `ActorError` already names the actor.
    where = "" if describe_actor is None or isinstance(cause, ActorError) else f" ({describe_actor(first)})"
    text = f"{len(failures)} of {count} envs failed in {caller}; env {first}{where}: {safe_str(cause)}"
    error = VectorStepError(text, failures=failures, batch=batch)
    error.__cause__ = cause
    return error
