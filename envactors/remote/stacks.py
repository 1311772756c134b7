"""The stacks of a worker on another machine, as they are asked for and come."""

from __future__ import annotations

import threading

from envactors.backends.base import Stacks


class RemoteStacks(Stacks):
    """The stacks of a worker of another machine.

    Args:
        node: The name of its node.
    """

    def __init__(self, node: str | None) -> None:
        self._node = node
        self._has_come = threading.Event()
        self._text = ""

    def set(self, text: str) -> None:
        """Say what has come."""
        self._text = text
        self._has_come.set()

    def read(self) -> str:
        return self._text

    def wait(self, seconds: float) -> str:
        self._has_come.wait(seconds)
        return self._text or f"no stacks came within {seconds:g} s: node {self._node!r} does not answer\n"
