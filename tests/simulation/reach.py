"""Which planted bugs a history comes to: any other one leaves the history as it is, and cannot be found there."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterator, Sequence

from simulation.mutants import Mutant, Place

# What the probes call.
_CALLED = "_note_reached"


@contextlib.contextmanager
def watched(mutants: Sequence[Mutant]) -> Iterator[set[int]]:
    """Have the numbers of the bugs noted that a history comes to: those whose changed statements it runs."""
    reached: set[int] = set()
    numbers_of: dict[str, list[int]] = {}
    for number, mutant in enumerate(mutants):
        numbers_of.setdefault(mutant.where, []).append(number)
    with contextlib.ExitStack() as undo:
        for where, numbers in numbers_of.items():
            place = Place(where)
            tree = ast.parse(place.source)
            probed = _Probed(place.source)
            for number in numbers:
                probed.insert(tree.body, _changed_by(mutants[number], place.source), number)
            place.globals[_CALLED] = reached.add
            undo.callback(place.globals.pop, _CALLED, None)
            undo.enter_context(place.replaced(tree))
        yield reached


def _changed_by(mutant: Mutant, source: str) -> tuple[int, int]:
    """Return where a bug changes a source, in bytes: the first one, and the one after the last."""
    old, new = mutant.old, mutant.new
    same = _count_common(old, new)
    same_at_end = _count_common(old[same:][::-1], new[same:][::-1])
    begin = source.index(old) + same
    end = begin + len(old) - same - same_at_end
    first = len(source[:begin].encode())
    return first, max(first + 1, len(source[:end].encode()))


def _count_common(one: str, other: str) -> int:
    """Return how many characters are the same at the beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class _Probed:
    """Inserts statements into the tree of a source, which stay unseen by those that are inserted later.

    Args:
        source: The source.
    """

    def __init__(self, source: str) -> None:
        lengths = [len(line.encode()) for line in source.splitlines(keepends=True)]
        self._line_starts = [0, *itertools.accumulate(lengths)]

    def insert(self, statements: list[ast.stmt], span: tuple[int, int], number: int) -> None:
        """Have the number noted before any statement of a list runs that has a part of the span.

        Raises:
            ValueError: The span is not within the function's body.
        """
        touched = [statement for statement in statements if self._overlaps(statement, span)]
        for statement in touched:
            inner = self._body_around(statement, span)
            if inner is not None:
                self.insert(inner, span, number)
            elif isinstance(statement, ast.FunctionDef):
                raise ValueError(f"bug {number} changes the head of the function {statement.name}")
            else:
                probe = ast.parse(f"{_CALLED}({number})").body[0]
                for node in ast.walk(probe):
                    ast.copy_location(node, statement)
                statements.insert(statements.index(statement), probe)
        if not touched:
            raise ValueError(f"bug {number} changes no statement")

    def _body_around(self, statement: ast.stmt, span: tuple[int, int]) -> list[ast.stmt] | None:
        """Return the list of statements within a statement that has the whole span; None if none does."""
        for node in (statement, *ast.iter_child_nodes(statement)):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list) and inner and self._has_all(inner, span):
                    return inner
        return None

    def _has_all(self, statements: list[ast.stmt], span: tuple[int, int]) -> bool:
        return self._begin(statements[0]) <= span[0] and span[1] <= self._end(statements[-1])

    def _overlaps(self, statement: ast.stmt, span: tuple[int, int]) -> bool:
        return self._begin(statement) < span[1] and span[0] < self._end(statement)

    def _begin(self, statement: ast.stmt) -> int:
        return self._line_starts[statement.lineno - 1] + statement.col_offset

    def _end(self, statement: ast.stmt) -> int:
        assert statement.end_lineno is not None, "it was parsed"
        assert statement.end_col_offset is not None, "it was parsed"
        return self._line_starts[statement.end_lineno - 1] + statement.end_col_offset
