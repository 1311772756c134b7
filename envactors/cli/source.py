"""The env that a command is given: an id of Gymnasium, or ``MODULE:FACTORY``."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class EnvInputError(Exception):
    """An env that cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, repr=False)
class EnvSource:
    """Factory of envs that works in any process, since it is pickled by name.

    Attributes:
        name: An id of Gymnasium, or ``MODULE:FACTORY``.
    """

    name: str

    @property
    def is_factory(self) -> bool:
        """True if the name is ``MODULE:FACTORY``. An id of Gymnasium may have a colon too (``ale_py:ALE/Pong-v5``)."""
        _, colon, path = self.name.partition(":")
        return bool(colon) and all(part.isidentifier() for part in path.split("."))

    @property
    def expression(self) -> str:
        """The factory in Python code; an id needs ``import gymnasium``."""
        return repr(self.name) if self.is_factory else f"lambda: gymnasium.make({self.name!r})"

    def load(self) -> Callable[[], Any]:
        """Import and return the factory itself."""
        if not self.is_factory:
            import gymnasium

            return lambda: gymnasium.make(self.name)
        module, _, path = self.name.partition(":")
        factory: Callable[[], Any] = operator.attrgetter(path)(importlib.import_module(module))
        return factory

    def __repr__(self) -> str:
        return self.name

    def __call__(self) -> Any:
        """Return a new env."""
        return self.load()()


def find_source(name: str) -> EnvSource:
    """Return the factory of a name; as with ``python -m``, its module may be in the current directory.

    Raises:
        EnvInputError: It needs Gymnasium, which is not installed.
    """
    source = EnvSource(name)
    if not source.is_factory and importlib.util.find_spec("gymnasium") is None:
        raise EnvInputError(f"{name} is made by gymnasium: pip install 'envactors[gymnasium]', or give MODULE:FACTORY")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return source
