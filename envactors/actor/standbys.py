"""Processes that are started before they are needed: whoever loses its own takes one of these.

A standby is an actor like any other, watched and restarted by its own supervisor, of which nothing is asked. What is
taken is its process alone, with channel and all (`Incarnation.move`); it is told whose it is now by an `Adopt` in
place of a `Start`. The standby itself then starts another in the background.
"""

from __future__ import annotations

import logging
import time

from envactors.actor.incarnation import Incarnation
from envactors.actor.states import BACKOFF, LAUNCHING, LIVE, Plan
from envactors.actor.supervisor import Supervisor

_log = logging.getLogger("envactors")


class Standby(Supervisor):
    """An actor whose process is there to be taken."""

    def give(self, delay: float) -> Incarnation | None:
        """Gives the process away where it is ready, and starts another after ``delay`` seconds.

        Called under the taker's lock. From here on nothing that comes from the process changes anything, until it is
        the taker's: all of it will be told again.
        """
        with self._lock:
            process = self._process
            if self._phase is not LIVE or process is None or process.silent:
                return None
            self._process = None
            self._phase = BACKOFF
            self._set_timer("backoff", time.monotonic() + delay)
            return process

    def begin_close(self, timeout: float | None) -> None:
        """As for any actor, but for a process that is still starting nobody waits."""
        with self._change:
            if self._phase is LAUNCHING:
                self.kill(restart=False)
            else:
                super().begin_close(timeout)

    def _settle_dead(self) -> None:
        name, final = self.plan.name, self._final
        # Somebody's handler may block, and this is no place for it.
        self.reactor.printing.submit(lambda: _log.warning("%s is given up, what it was for goes on: %s", name, final))
        super()._settle_dead()


class Standbys:
    """The standbys of one vector; kept by their handles, not by this."""

    def __init__(self) -> None:
        self._members: list[Standby] = []

    def make(self, plan: Plan) -> Standby:
        """Adds one."""
        standby = Standby(plan)
        self._members.append(standby)
        return standby

    def take(self, delay: float) -> Incarnation | None:
        """Takes a process that is ready, None where there is none; see `Standby.give`."""
        for standby in self._members:
            process = standby.give(delay)
            if process is not None:
                return process
        return None
