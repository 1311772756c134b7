"""The lock of changes, with objects in place of actors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from envactors.actor.change import ChangeLock


class Thing:
    def __init__(self, name):
        self.name = name
        self.resets = 0
        self.soon = []
        self.runtime = SimpleNamespace(loop=SimpleNamespace(call_soon=self.soon.append))

    def reset_after_interrupt(self):
        self.resets += 1


class Hit(Exception):
    pass


def test_a_change_that_ends_repairs_nothing():
    lock, thing = ChangeLock(), Thing("a")
    for _ in range(2):
        with lock, lock.change(thing):
            pass
    assert (thing.resets, thing.soon) == (0, [])


def test_the_next_change_repairs_the_actors_of_an_interrupted_one():
    lock, one, other = ChangeLock(), Thing("a"), Thing("b")
    with pytest.raises(Hit), lock, lock.change(one):
        raise Hit
    with lock, lock.change(other):
        assert (one.resets, other.resets) == (1, 0)
    with lock, lock.change(one):
        assert one.resets == 1


def test_the_loop_repairs_if_no_change_follows():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    (repair,) = thing.soon
    repair()
    repair()
    assert thing.resets == 1


def test_an_interrupted_repair_is_made_again():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    reset = thing.reset_after_interrupt

    def interrupted():
        reset()
        thing.reset_after_interrupt = reset
        raise Hit

    thing.reset_after_interrupt = interrupted
    with pytest.raises(Hit):
        lock.reset_if_interrupted()
    lock.reset_if_interrupted()
    assert thing.resets == 2


def test_a_nested_change_is_refused_and_the_outer_one_continues():
    lock, thing = ChangeLock(), Thing("a")
    with lock, lock.change(thing), pytest.raises(RuntimeError, match="'a'"), lock, lock.change(thing):
        pass
    with lock, lock.change(thing):
        pass
    assert thing.resets == 0


def test_an_interrupt_never_leaves_the_lock_held():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    free = []
    thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True]
