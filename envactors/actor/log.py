"""The log messages about actors: starts and exits of processes, and calls that take long."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from envactors.actor import recording
from envactors.actor.actor_process import EndReason
from envactors.actor.base import ActorBase
from envactors.actor.evidence import evidence_of, order_stacks
from envactors.actor.job import Activity, ProcessExit, Renewal
from envactors.errors import ActorError, describe_bundle

# Users also get these messages as errors and results, so the null handler keeps them off stderr by default.
_log = logging.getLogger("envactors.actors")
_log.addHandler(logging.NullHandler())
# Users get these messages in no other way, so they are printed by default.
_notices = logging.getLogger("envactors")
# How often at most the log shows why a process of an actor has ended, in seconds: the actor may crash in a loop.
_EVIDENCE_PERIOD = 1.0
# How long a worker may take to write its stacks, in seconds.
STACKS_PATIENCE = 1.0


class ActorLog:
    """Logs messages in the thread for printing: handlers may block, and evidence runs code of users.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: ActorBase) -> None:
        self._actor = actor
        self._evidence_at = -math.inf  # when evidence of an exit was logged last

    def write(self, level: int, text: str, bug: BaseException | None = None, error: ActorError | None = None) -> None:
        """Log a message.

        Args:
            level: The level.
            text: The message.
            bug: An error of this library, whose traceback is logged with it.
            error: The error of an ended process, whose stacks or traceback in the worker are logged with it.
        """
        actor = self._actor
        recording.recorder.on_notice(actor, text)
        index = actor.config.first_index if error is None or error.index is None else error.index
        extra = {"actor": actor.name, "incarnation": actor.process.incarnation, "env_id": index}

        def write_in_printer() -> None:
            now = time.monotonic()
            found = "" if error is None or now < self._evidence_at + _EVIDENCE_PERIOD else evidence_of(error)
            if found:
                self._evidence_at = now
            _log.log(level, "%s", f"{text}\n{found}" if found else text, exc_info=bug, extra=extra)

        actor.runtime.log(write_in_printer)

    def write_start(self, seconds: float) -> None:
        """Record that the process has started, within this time."""
        actor = self._actor
        recording.recorder.on_span(actor, "start", actor.process.launched_at)
        self.write(logging.INFO, f"actor {actor.name!r} has started in {seconds:.3g} s, pid {actor.pid}")

    def write_exit(self, process_exit: ProcessExit) -> None:
        """Record that the process has ended; log it unless that closes the actor."""
        recording.recorder.on_exit(self._actor, process_exit.culprit)
        if process_exit.closes:
            return
        job, error, bundle = process_exit.job, process_exit.error, process_exit.error.bundle
        if process_exit.reason in (EndReason.ABORT, EndReason.RENEW):
            why = job.why if isinstance(job, Renewal) else "on request"
            self.write(logging.INFO, f"actor {self._actor.name!r} gets a new process: {why}")
        else:
            # One warning tells of all actors whose helper was lost.
            level = logging.INFO if process_exit.reason is EndReason.HELPER_LOST else logging.WARNING
            is_final = not process_exit.has_successor and not self._actor.config.is_on_demand
            text = str(error).partition("\n")[0] + ("; it is not restarted" if is_final else "")
            self.write(level, text if bundle is None else f"{text}; {describe_bundle(bundle)}", error=error)

    def write_end_of_standby(self, error: ActorError) -> None:
        """Warn that a standby is dead."""
        text = f"actor {self._actor.name!r} cannot be restarted; the actors that it served continue: {error}"
        self._actor.runtime.log(lambda: _notices.warning("%s", text))


def warn_of_slow(actor: ActorBase, activity: Activity, seconds: float, read_stacks: Callable[[], str]) -> None:
    """Log a warning about a slow activity.

    Args:
        actor: The actor.
        activity: What it runs.
        seconds: How long it has been running.
        read_stacks: Returns the stacks of its worker, perhaps after a while.
    """
    incarnation, slow = actor.process.incarnation, actor.config.deadlines.slow
    text = (
        f"{activity.method} of env {activity.index} of actor {actor.name!r} (pid {actor.pid}, "
        f"incarnation {incarnation}) has been running for {seconds:.1f} s (Deadlines(slow={slow:g})) and continues"
    )

    def log_with_stacks() -> None:
        evidence = order_stacks(read_stacks())
        extra = {"actor": actor.name, "incarnation": incarnation, "env_id": activity.index}
        actor.runtime.log(lambda: _notices.warning("%s; the stacks of its worker:\n%s", text, evidence, extra=extra))

    actor.runtime.callbacks.submit(log_with_stacks)
