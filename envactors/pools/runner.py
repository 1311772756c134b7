"""What runs the functions of an executor in a worker: the env of its actors."""

from __future__ import annotations

import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from envactors.mailbox.pickling import loads
from envactors.pools.namespaces import Key, call_initializer, load_function, write_again
from envactors.system import processes

# How many functions a worker keeps.
_MOST_FUNCTIONS = 64


class FunctionRunner:
    """Runs functions. It is made in each worker process, and calls the initializer.

    Args:
        initializer: The pickle of a function and its arguments; None for no initializer.
        has_process: Whether it has a process for itself, with which the processes that functions start are to end.
    """

    def __init__(self, initializer: bytes | None, *, has_process: bool) -> None:
        if has_process:
            processes.claim_descendants()
        # The functions that came as pickles, with the globals that came with them; the one that was used last is last.
        self._loaded: OrderedDict[bytes, tuple[types.FunctionType, dict[Key, dict[str, Any]]]] = OrderedDict()
        if initializer is not None:
            call_initializer(*loads(initializer))

    def run(self, function: Callable[..., Any] | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function.

        Args:
            function: The function, or its pickle, compressed.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        return self._find(function)(*args, **kwargs)

    def run_chunk(self, function: Callable[..., Any] | bytes, items: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function once for each tuple of arguments; return the results."""
        found = self._find(function)
        return [found(*args) for args in items]

    def _find(self, function: Callable[..., Any] | bytes) -> Callable[..., Any]:
        """Return a function that a message names; load its pickle if this worker does not have it."""
        if not isinstance(function, bytes):
            return function
        if function not in self._loaded:
            self._loaded[function] = load_function(zlib.decompress(function))
            if len(self._loaded) > _MOST_FUNCTIONS:
                self._loaded.popitem(last=False)
        else:
            self._loaded.move_to_end(function)
            write_again(self._loaded[function][1])
        return self._loaded[function][0]
