"""Environments as actors: processes whose methods return futures, and a vector facade over them.

This module defines nothing itself: ``__init__.pyi`` lists the public names, and each is imported from its module on
first use. ``import envactors`` therefore takes almost no time, and workers never import what only the parent needs.
"""

from __future__ import annotations

import importlib

# It registers what begins with the first actor.
from envactors import observe as observe

# The module that defines each public name: the stub has a line "from MODULE import NAME as NAME" for each.
_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi").decode()
_HOME_OF = {words[-1]: words[1] for words in map(str.split, _STUB.splitlines()) if words[:1] == ["from"]}

__version__ = "0.2.0"
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 # of the stub


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envactors' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
