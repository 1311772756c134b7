"""Which planted bugs a history comes to: any other one leaves the history as it is, and cannot be found there.

A history comes to a bug as soon as it runs what the bug changes; where `simulation.differences` can tell, only once
that has another value or effect with the bug.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simulation.differences import Change, Store, Wake, find_change, is_same, is_stored
from simulation.mutants import Mutant, Place

# What the probes call.
_REACHED, _COMPARED, _STORED, _WOKEN = "_note_reached", "_note_compared", "_note_stored", "_note_woken"


@contextlib.contextmanager
def watched(mutants: Sequence[Mutant]) -> Iterator[set[int]]:
    """Have the numbers of the bugs noted that a history comes to: those that may make a difference to it."""
    reached: set[int] = set()
    probes = _Probes(reached).by_name()
    numbers_of: dict[str, list[int]] = {}
    for number, mutant in enumerate(mutants):
        numbers_of.setdefault(mutant.where, []).append(number)
    with contextlib.ExitStack() as undo:
        for where, numbers in numbers_of.items():
            place = Place(where)
            tree = _make_probed(place.source, {number: mutants[number] for number in numbers})
            for name, probe in probes.items():
                place.globals[name] = probe
                undo.callback(place.globals.pop, name, None)
            undo.enter_context(place.replaced(tree))
        yield reached


def _make_probed(source: str, mutants: dict[int, Mutant]) -> ast.Module:
    """Return the tree of a function with a probe for each of some bugs."""
    tree = ast.parse(source)
    statements = _Probed(source)
    expressions = _Comparisons()
    changes = {
        number: find_change(tree, ast.parse(source.replace(mutant.old, mutant.new)))
        for number, mutant in mutants.items()
    }
    for number, mutant in mutants.items():
        change = changes[number]
        if isinstance(change, Change):
            expressions.add(number, change)
        else:
            statements.insert(tree.body, _changed_by(mutant, source), _make_probe(number, change))
    return ast.fix_missing_locations(expressions.visit(tree))


def _make_probe(number: int, change: Store | Wake | None) -> ast.stmt:
    """Return a statement that notes a bug, if what it leaves out has an effect."""
    if isinstance(change, Store):
        parts = f"({ast.unparse(change.holder)}, {ast.unparse(change.key)}, {ast.unparse(change.value)})"
        return ast.parse(f"{_STORED}({number}, lambda: {parts}, {change.is_attribute})").body[0]
    if isinstance(change, Wake):
        parts = f"({ast.unparse(change.reactor)}, {ast.unparse(change.key)})"
        return ast.parse(f"{_WOKEN}({number}, lambda: {parts})").body[0]
    return ast.parse(f"{_REACHED}({number})").body[0]


class _Probes:
    """What the probes call: each adds the number of a bug that makes a difference.

    Args:
        reached: What they add to.
    """

    def __init__(self, reached: set[int]) -> None:
        self._reached = reached

    def by_name(self) -> dict[str, Callable[..., object]]:
        """Return them by their names in probed functions."""
        return {_REACHED: self._reached.add, _COMPARED: self.compare, _STORED: self.store, _WOKEN: self.wake}

    def compare(self, number: int, value: Any, compute: Callable[[], Any], in_test: bool) -> Any:
        """Return the value of an expression, once it was compared with what it is with the bug."""
        self._note_unless(number, lambda: is_same(value, compute(), in_test))
        return value

    def store(self, number: int, compute: Callable[[], tuple[Any, Any, Any]], is_attribute: bool) -> None:
        self._note_unless(number, lambda: is_stored(*compute(), is_attribute))

    def wake(self, number: int, compute: Callable[[], tuple[Any, Any]]) -> None:
        reactor, key = compute()
        if reactor.sleeps_for(key):
            self._reached.add(number)

    def _note_unless(self, number: int, is_needless: Callable[[], bool]) -> None:
        if number in self._reached:
            return
        try:
            needless = is_needless()
        except Exception:  # with the bug it raises
            needless = False
        if not needless:
            self._reached.add(number)


class _Comparisons(ast.NodeTransformer):
    """Has expressions compared with what they are with bugs."""

    def __init__(self) -> None:
        self._changes: dict[int, list[tuple[int, Change]]] = collections.defaultdict(list)

    def add(self, number: int, change: Change) -> None:
        """Have an expression compared."""
        self._changes[id(change.old)].append((number, change))

    def visit(self, node: ast.AST) -> Any:
        found = self._changes.get(id(node), ())
        result: Any = self.generic_visit(node)
        for number, change in found:
            compute = ast.Lambda(ast.parse("lambda: None", mode="eval").body.args, change.new)
            arguments = [ast.Constant(number), result, compute, ast.Constant(change.in_test)]
            result = ast.copy_location(ast.Call(ast.Name(_COMPARED, ast.Load()), arguments, []), node)
        return result


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

    def insert(self, statements: list[ast.stmt], span: tuple[int, int], probe: ast.stmt) -> None:
        """Have a probe run before any statement of a list that has a part of the span.

        Raises:
            ValueError: The span is not within the function's body.
        """
        touched = [statement for statement in statements if self._overlaps(statement, span)]
        for statement in touched:
            inner = self._body_around(statement, span)
            if inner is not None:
                self.insert(inner, span, probe)
            elif isinstance(statement, ast.FunctionDef):
                raise ValueError(f"a bug changes the head of the function {statement.name}")
            else:
                one = copy.deepcopy(probe)
                for node in ast.walk(one):
                    ast.copy_location(node, statement)
                statements.insert(statements.index(statement), one)
        if not touched:
            raise ValueError("a bug changes no statement")

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
