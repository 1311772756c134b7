"""Objects that belong to the process that made them."""

from __future__ import annotations

from typing import Any


class BoundToProcess:
    """An object that refers to running actors, so it can be neither pickled nor copied."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to the process that made it; send its "
            "results instead"
        )
