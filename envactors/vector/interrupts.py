"""Record that a request was interrupted: by a signal handler, an asynchronous exception, or a `RecursionError`.

The next request then finds out in `Asker.settle_interrupted` which envs have requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Class = TypeVar("_Class", bound=type)


def notes_interrupts(*names: str) -> Callable[[_Class], _Class]:
    """Make methods of a class record in what is pending that they were interrupted."""

    def change(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, _noting(getattr(cls, name)))
        return cls

    return change


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        core = self._core
        before = None if core is None else bytes(core.slots.states)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if core is not None:  # else the vector is closed
                core.pending.note_failure(error, before)
            raise

    return cast("Callable[..., Any]", noting)
