"""Steps that are posted at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.rows import ActorRows
from envactors.envs.selection import Selection
from envactors.mailbox.control_page import FINISHED, ControlPage


class Part(NamedTuple):
    """The part of one actor in a step.

    Attributes:
        core: The actor's state.
        rows: The rows of its envs.
        process: Its process.
        page: Its control page.
        indices: Those of its envs that step.
    """

    core: ActorCore
    rows: ActorRows
    process: ActorProcess
    page: ControlPage
    indices: Sequence[int]


class Step(NamedTuple):
    """A step that is posted at once.

    Attributes:
        envs: The envs that step.
        number: The call id of their rows.
        parts: The part of each of their actors.
        resets: The envs that are reset instead, by autoreset.
    """

    envs: Selection
    number: int
    parts: list[Part]
    resets: Sequence[int]

    def is_finished(self) -> bool:
        """Return whether all workers have finished the step, or an env needs more than waiting."""
        is_finished = True
        for part in self.parts:
            # What has been posted since, by a signal handler or to another process, may be streamed: its end does not
            # ring.
            if part.rows.last != self.number:
                return True
            if part.page.counters[FINISHED] < self.number:
                is_finished = False
        return is_finished


def replace_processes(parts: Sequence[Part]) -> None:
    """Replace the processes of some actors after an exception in the middle of a step."""
    for part in parts:
        part.core.is_inconsistent = True  # all first: with little stack, the next request has to replace the processes
    for part in parts:
        part.core.kill_inconsistent()
