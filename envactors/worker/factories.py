"""Unpickling the factories of envs, and which imports take the time of it."""

from __future__ import annotations

import functools
import io
import pickle
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from envactors.wire.factory import import_factory

# Slower than this, in seconds, and the caller tells what to preload.
SLOW = 1.0
# An import that takes less than this share of the whole is not worth telling of.
_SHARE = 0.1


class FactoryUnpickler(pickle.Unpickler):
    """Unpickles one factory.

    Attributes:
        seconds: How long the imports that it needs itself have taken, by module.
    """

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.seconds: dict[str, float] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._import(super().find_class, module, name)
        # The former is how cloudpickle imports the modules that a function by value refers to.
        by_name = found is cloudpickle.cloudpickle.subimport or found is import_factory
        return functools.partial(self._import, found) if by_name else found

    def _import(self, load: Callable[..., Any], module: str, *names: str) -> Any:
        begun = time.perf_counter()
        try:
            return load(module, *names)
        except (ImportError, AttributeError) as error:
            error.args = (f"{error} (in {sys.executable}, Python {platform.python_version()})",)
            raise
        finally:
            self.seconds[module] = self.seconds.get(module, 0.0) + time.perf_counter() - begun


def slow_imports(seconds: dict[str, float]) -> dict[str, float]:
    """Return the imports that are worth preloading, the longest first; none if all of them were quick."""
    total = sum(seconds.values())
    if total < SLOW:
        return {}
    longest = sorted(seconds, key=lambda module: -seconds[module])
    return {module: seconds[module] for module in longest if seconds[module] > _SHARE * total}
