"""Where a bug makes a difference: which expression or store of a function it changes, and whether that matters.

Many bugs change a value now and then only: a condition that is dropped may be the same as the rest most of the time. As
long as the value is the same, the history is. That can be told for expressions that only look at things, and for stores
that a bug leaves out; of anything else the bug counts as soon as the history comes to it.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any, NamedTuple

import numpy as np

_PURE = (
    ast.Attribute,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.Constant,
    ast.IfExp,
    ast.Name,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
)
# What is called without any effect, as functions and as methods.
_PURE_FUNCTIONS = frozenset(("bool", "isinstance", "len", "max", "min"))
_PURE_METHODS = frozenset(("has_posted", "is_in_flight", "isdisjoint", "posted"))
# Of these, a simulated worker may pause as one is read.
_PAUSING = "counters"
_PLAIN = (bool, int, float, str, bytes, type(None), np.bool_, np.int64, np.float64)
# Containers that keep what is stored, and those that convert numbers.
_CONTAINERS = (list, dict)
_BUFFERS = (bytearray, memoryview, np.ndarray)


class Change(NamedTuple):
    """An expression that a bug replaces.

    Attributes:
        old: The expression, in the tree of the function.
        new: The one that takes its place.
        in_test: Whether only its truth counts.
    """

    old: ast.expr
    new: ast.expr
    in_test: bool


class Store(NamedTuple):
    """An assignment that a bug leaves out.

    Attributes:
        holder: What is assigned to.
        key: The name of the attribute, or the index.
        value: What is assigned.
        is_attribute: Whether it is assigned to an attribute.
    """

    holder: ast.expr
    key: ast.expr
    value: ast.expr
    is_attribute: bool


class Wake(NamedTuple):
    """A call that a bug leaves out, which wakes a thread.

    Attributes:
        reactor: What wakes it.
        key: What it waits for.
    """

    reactor: ast.expr
    key: ast.expr


def find_change(old: ast.AST, new: ast.AST) -> Change | Store | Wake | None:
    """Return the one difference between two trees, if it can be told when it matters."""
    in_test = False
    while True:
        if isinstance(new, ast.Pass):
            return _find_effect(old)
        if isinstance(old, ast.Assign) and isinstance(new, ast.Expr):
            return _find_result(old, new.value)
        pairs = _differing(old, new)
        if pairs is None or len(pairs) != 1:
            if not isinstance(old, ast.expr) or not isinstance(new, ast.expr):
                return None
            if _is_pure(old) and _is_pure(new):
                return Change(old, new, in_test)
            return _find_branch(old, new)
        name, inner, other = pairs[0]
        is_test = name == "test" and isinstance(old, (ast.If, ast.IfExp, ast.While))
        is_part = in_test and isinstance(old, ast.BoolOp)
        in_test = is_test or is_part or (isinstance(old, ast.UnaryOp) and isinstance(old.op, ast.Not))
        old, new = inner, other


def is_same(value: Any, other: Any, in_test: bool) -> bool:
    """Return whether nothing depends on which of two values an expression has."""
    if in_test:
        return bool(value) == bool(other)
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and bool(value == other))


def is_stored(holder: Any, key: Any, value: Any, is_attribute: bool) -> bool:
    """Return whether an attribute or item has a value already, and to assign it again has no effect."""
    if is_attribute:
        kind = type(holder)
        descriptor = inspect.getattr_static(kind, key, None)
        is_plain = isinstance(descriptor, types.MemberDescriptorType) or not hasattr(descriptor, "__set__")
        return is_plain and kind.__setattr__ is object.__setattr__ and is_same(getattr(holder, key), value, False)
    if type(holder) in _CONTAINERS:
        return is_same(holder[key], value, False)
    is_number = isinstance(key, int) and isinstance(value, (int, float, np.generic))
    return is_number and type(holder) in _BUFFERS and bool(np.ndim(holder[key]) == 0 and holder[key] == value)


def _differing(old: ast.AST, new: ast.AST) -> list[tuple[str, ast.AST, ast.AST]] | None:
    """Return the parts of two nodes that differ; None if the nodes do themselves."""
    if type(old) is not type(new):
        return None
    pairs: list[tuple[str, ast.AST, ast.AST]] = []
    for name in old._fields:
        one, other = getattr(old, name), getattr(new, name)
        ones, others = (one, other) if isinstance(one, list) and isinstance(other, list) else ([one], [other])
        if len(ones) != len(others):
            return None
        for inner, mutated in zip(ones, others, strict=True):
            if isinstance(inner, ast.AST) and isinstance(mutated, ast.AST):
                if ast.dump(inner) != ast.dump(mutated):
                    pairs.append((name, inner, mutated))
            elif inner != mutated:
                return None
    return pairs


def _find_effect(statement: ast.AST) -> Store | Wake | None:
    """Return what a statement does that a bug leaves out."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function, arguments = statement.value.func, statement.value.args
        if isinstance(function, ast.Attribute) and function.attr == "wake" and all(map(_is_pure, arguments)):
            return Wake(function.value, arguments[0])
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return None
    (target,), value = statement.targets, statement.value
    if not _is_pure(value) or not _is_pure(target):
        return None
    if isinstance(target, ast.Attribute):
        return Store(target.value, ast.Constant(target.attr), value, True)
    if isinstance(target, ast.Subscript):
        return Store(target.value, target.slice, value, False)
    return None


def _find_result(statement: ast.Assign, value: ast.expr) -> Change | None:
    """Return the value that a bug does not assign to a variable, and that of the variable before."""
    (target, *others) = statement.targets
    if others or not isinstance(target, ast.Name) or ast.dump(statement.value) != ast.dump(value):
        return None
    return Change(statement.value, ast.Name(target.id, ast.Load()), False)


def _find_branch(old: ast.expr, new: ast.expr) -> Change | None:
    """Return the condition of which a bug takes one branch always."""
    if not isinstance(old, ast.IfExp) or not _is_pure(old.test):
        return None
    for branch, chosen in ((old.body, True), (old.orelse, False)):
        if ast.dump(branch) == ast.dump(new):
            return Change(old.test, ast.Constant(chosen), True)
    return None


def _is_pure(expression: ast.AST) -> bool:
    """Return whether an expression only looks at things."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            function = node.func
            is_known = isinstance(function, ast.Name) and function.id in _PURE_FUNCTIONS
            is_known |= isinstance(function, ast.Attribute) and function.attr in _PURE_METHODS
            if not is_known or node.keywords:
                return False
        elif not isinstance(node, _PURE) or _PAUSING in (getattr(node, "attr", ""), getattr(node, "id", "")):
            return False
    return True
