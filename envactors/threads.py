"""The threads of this library."""

from __future__ import annotations

import threading
from collections.abc import Callable


class LibraryThread(threading.Thread):
    """A daemon thread of this library.

    Args:
        target: Runs in the thread.
        name: Name of the thread.
        runs_user_code: Whether code of users runs in it, such as callbacks and log handlers.
    """

    def __init__(self, target: Callable[[], object], name: str, *, runs_user_code: bool) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.runs_user_code: bool = runs_user_code


def runs_library_code_only() -> bool:
    """Return whether the calling thread is one of this library in which no code of users runs.

    An exception there is a bug of this library.
    """
    thread = threading.current_thread()
    return isinstance(thread, LibraryThread) and not thread.runs_user_code
