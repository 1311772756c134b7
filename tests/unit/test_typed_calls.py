"""What a handle and a pool take as a method, and what `spawn` passes to a factory."""

from __future__ import annotations

import functools
import math
import threading

import pytest
from helpers import Counter

import envactors as ea


class Doubling(Counter):
    def add(self, n=1):
        return super().add(2 * n)

    @functools.cache  # noqa: B019 # what matters is that its function is called by its name
    def remember(self, n):
        return n

    @staticmethod
    def halve(n):
        return n / 2

    @classmethod
    def made(cls):
        return cls()

    @property
    def total(self):
        return self.count

    def _private(self):
        return self.count

    def unnamed(self):
        return self.count

    unnamed.__qualname__ = "decorator.<locals>.wrapper"

    anonymous = lambda self, n: n  # noqa: E731


def a_function(env):
    return env.count


@pytest.fixture
def actor():
    with ea.spawn(Doubling, backend="inline") as handle:
        yield handle


@pytest.fixture
def pool():
    with ea.ActorPool(Doubling, 2, backend="inline") as handle:
        yield handle


def test_a_method_of_the_class_calls_the_envs_method_of_that_name(actor, pool):
    assert actor.call(Doubling.add, 2).result() == 4
    assert actor.call(Counter.add, n=1).result() == 6  # the env's own add, not that of its base
    assert actor.options(retries=1).call(Doubling.remember, 3).result() == 3
    assert actor.call(Doubling.halve, 3).result() == 1.5
    assert pool.submit(Doubling.add, 2).result() == 4
    assert list(pool.map(Doubling.halve, [2, 4])) == [1, 2]
    assert sorted(pool.map_unordered(Doubling.halve, [2, 4])) == [1, 2]
    with ea.spawn(lambda: "text", backend="inline") as text:
        assert text.call(str.upper).result() == "TEXT"


def test_calling_a_function_that_is_not_a_method_raises(actor, pool):
    mistakes = [
        a_function,
        lambda env: env.count,
        Doubling().add,
        Doubling.made,
        Doubling.total,
        Doubling.unnamed,
        Doubling.anonymous,
        Doubling,
        functools.partial(Doubling.add, 1),
        math.sqrt,
        [].append,
        3,
        None,
    ]
    for mistake in mistakes:
        for call in (actor.call, actor.options(retries=1).call, pool.submit):
            with pytest.raises(
                TypeError, match=r"^cannot call .*expected a method of the env's class, as in actor\.call"
            ):
                call(mistake)
    for private in ("_private", Doubling._private):
        for call in (actor.call, pool.submit):
            with pytest.raises(AttributeError, match="expected the name of a public attribute"):
                call(private)


def test_arguments_after_the_factory_are_passed_to_it():
    with ea.spawn(Counter, 3, name="three", backend="inline") as actor:
        assert (actor.name, actor.add().result()) == ("three", 4)
    with ea.spawn("helpers:Counter", 5, backend="inline") as actor:
        assert actor.add().result() == 6
    with ea.spawn(lambda *args: Counter(sum(args)), 1, 2, 3, backend="inline") as actor:
        assert actor.add().result() == 7
    with ea.spawn(Counter, 1, 2, 3, backend="inline") as actor:
        with pytest.raises(ea.ActorStartError) as caught:
            actor.add().result()
        assert isinstance(caught.value.__cause__, TypeError)


def test_an_argument_of_a_factory_that_does_not_pickle_is_rejected():
    with pytest.raises(ea.SerializationError, match="cannot be pickled"):
        ea.spawn(Counter, threading.Lock())
