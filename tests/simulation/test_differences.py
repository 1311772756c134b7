"""Where a bug makes no difference, which lets the search for bugs pass over most histories."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from simulation.differences import Change, Store, find_change, is_same, is_stored


def change_of(old: str, new: str) -> Any:
    return find_change(ast.parse(old), ast.parse(new))


@pytest.mark.parametrize(
    ("old", "new", "before", "after", "in_test"),
    [
        ("x = a + b", "x = a", "a + b", "a", False),
        ("if a and b: f()", "if a: f()", "a and b", "a", True),
        ("f(a if b else g())", "f(g())", "b", "False", True),
        ("f(g() if b else a)", "f(g())", "b", "True", True),
        ("x = f()", "f()", "f()", "x", False),
        ("while not a.b: f()", "while not True: f()", "a.b", "True", True),
    ],
)
def test_a_changed_expression_is_found(old, new, before, after, in_test):
    change = change_of(old, new)
    assert isinstance(change, Change)
    assert (ast.unparse(change.old), ast.unparse(change.new), change.in_test) == (before, after, in_test)


def test_a_store_that_is_left_out_is_found():
    store = change_of("a.b = c", "pass")
    assert isinstance(store, Store)
    assert (ast.unparse(store.holder), ast.unparse(store.key), store.is_attribute) == ("a", "'b'", True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = f() + a", "x = f()"),
        ("x = page.counters[0]", "x = 0"),
        ("x = f()", "pass"),
        ("x[0] += 1", "pass"),
        ("a = b = c", "pass"),
        ("f(a)", "g(b)"),
    ],
)
def test_what_may_have_effects_cannot_be_told(old, new):
    assert change_of(old, new) is None


def test_values_are_the_same_only_if_nothing_can_tell_them_apart():
    assert is_same(1, 1, False)
    assert not is_same(1, True, False)
    assert is_same(1, True, True)
    assert not is_same([], [], False)


class Guarded:
    value = 1

    @property
    def watched(self) -> int:
        return 1

    @watched.setter
    def watched(self, value: int) -> None:
        raise AssertionError("it has an effect")


class Noting:
    value = 1

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("it has an effect")


def test_a_store_of_the_present_value_counts_unless_storing_has_an_effect():
    assert is_stored(Guarded(), "value", 1, True)
    assert not is_stored(Guarded(), "value", 2, True)
    assert not is_stored(Guarded(), "watched", 1, True)
    assert not is_stored(Noting(), "value", 1, True)
    assert is_stored([3], 0, 3, False)
    assert is_stored(np.zeros(2, np.int64), 1, 0, False)
    assert not is_stored(np.zeros(2, np.int64), slice(None), 0, False)
