"""Bugs that are planted one by one: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple


class Place:
    """A function of the package.

    Args:
        where: Its name, as ``module:Class.name`` below the package.

    Attributes:
        source: Its source, which begins in the first column.
        globals: The names of its module.
    """

    def __init__(self, where: str) -> None:
        module_name, _, path = where.partition(":")
        module = importlib.import_module(f"envactors.{module_name}")
        self._holder: Any = functools.reduce(getattr, path.split(".")[:-1], module)
        self._function: Any = vars(self._holder)[path.rpartition(".")[2]]
        self.source: str = textwrap.dedent(inspect.getsource(self._function))
        self.globals: dict[str, Any] = vars(module)

    @contextlib.contextmanager
    def replaced(self, tree: ast.Module) -> Iterator[None]:
        """Have another definition take its place for the time being."""
        function, real = self._function, self._function.__code__
        namespace: dict[str, Any] = {}
        exec(compile(tree, real.co_filename, "exec", annotations.compiler_flag), self.globals, namespace)
        other = namespace[function.__name__]
        if real.co_freevars:
            setattr(self._holder, function.__name__, other)
        else:
            function.__code__ = other.__code__  # other modules may have imported the function
        try:
            yield
        finally:
            setattr(self._holder, function.__name__, function)
            function.__code__ = real


class Mutant(NamedTuple):
    """A bug: a piece of a function that is replaced by another.

    Attributes:
        where: The function, as ``module:Class.name`` below the package.
        old: The piece.
        new: What takes its place.
        promise: What it breaks.
    """

    where: str
    old: str
    new: str
    promise: str

    def __str__(self) -> str:
        return f"{self.where}: {self.old!r} becomes {self.new!r} ({self.promise})"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Plant it for the time being."""
        place = Place(self.where)
        count = place.source.count(self.old)
        assert count == 1, f"{self.old!r} stands {count} times in {self.where}"
        with place.replaced(ast.parse(place.source.replace(self.old, self.new))):
            yield


HANGS = "nothing hangs"

MUTANTS: list[Mutant] = []
