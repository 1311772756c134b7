"""Requests for the stacks of workers on other machines."""

from __future__ import annotations

import threading


class RemoteStacks:
    """A request for the stacks of a worker; see `envactors.backends.base.Stacks`.

    Args:
        node: The name of the worker's node; None if it has none yet.
    """

    def __init__(self, node: str | None) -> None:
        self._node = node
        self._has_come = threading.Event()
        self._text = ""

    def set(self, text: str) -> None:
        """Deliver the answer."""
        self._text = text
        self._has_come.set()

    def read(self) -> str:
        return self._text

    def wait(self, seconds: float) -> str:
        self._has_come.wait(min(seconds, threading.TIMEOUT_MAX))
        why = "no node runs it yet" if self._node is None else f"node {self._node!r} does not answer"
        return self._text or f"no stacks came within {seconds:g} s: {why}\n"
