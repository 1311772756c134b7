"""Warnings about calls that take long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from envactors.actor.activity import Activity
from envactors.actor.base import ActorBase
from envactors.actor.evidence import order_stacks

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks, in seconds.
STACKS_PATIENCE = 1.0


def warn(actor: ActorBase, activity: Activity, seconds: float, read_stacks: Callable[[], str]) -> None:
    """Log a warning about a slow activity.

    Args:
        actor: The actor.
        activity: What it runs.
        seconds: How long it has been running.
        read_stacks: Returns the stacks of its worker, perhaps after a while.
    """
    incarnation = actor.incarnation.index
    text = (
        f"{activity.method} of env {activity.env} of actor {actor.name!r} (pid {actor.pid}, incarnation {incarnation}) "
        f"has been running for {seconds:.1f} s (Deadlines(slow={actor.config.deadlines.slow:g})) and continues"
    )

    def log_with_stacks() -> None:
        evidence = order_stacks(read_stacks())
        extra = {"actor": actor.name, "incarnation": incarnation, "env_id": activity.env}
        actor.runtime.log(lambda: _log.warning("%s; the stacks of its worker:\n%s", text, evidence, extra=extra))

    actor.runtime.callbacks.submit(log_with_stacks)
