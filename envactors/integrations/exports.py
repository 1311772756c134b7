"""Lazy imports for the packages of drop-ins.

A worker imports an adapter from the same package, and must not load the drop-in or its framework along with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, homes: Mapping[str, str], *, needs: str = "") -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports its public names on first use.

    Args:
        package: Name of the package.
        homes: The public names that each module of the package defines, separated by spaces, by module.
        needs: The library that the drop-in needs, for the error if it is not installed. The extra of envactors that
            installs this library has the name of the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def read(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{home_of[name]}")
        except ImportError as error:
            if not needs:
                raise
            extra = package.rpartition(".")[2]
            raise ImportError(f"{package} needs {needs} ({error}): pip install 'envactors[{extra}]'") from error
        return getattr(module, name)

    return read
