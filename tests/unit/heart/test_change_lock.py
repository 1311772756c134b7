"""The lock of changes, with objects in place of actors."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

from envactors.actor.change import ChangeLock
from envactors.threads import LibraryThread


class Thing:
    def __init__(self, name):
        self.name = name
        self.resets = 0
        self.bug = None
        self.soon = []
        self.runtime = SimpleNamespace(loop=SimpleNamespace(call_soon=self.soon.append))

    def repair(self, bug):
        self.resets += 1
        self.bug = bug


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


def test_an_actor_that_a_change_includes_later_is_repaired_with_the_others():
    lock, one, other = ChangeLock(), Thing("a"), Thing("b")
    with pytest.raises(Hit), lock, lock.change(one):
        lock.include(other)
        raise Hit
    lock.repair_if_interrupted()
    assert (one.resets, other.resets) == (1, 1)


def test_the_loop_repairs_if_no_change_follows():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    (repair,) = thing.soon
    repair()
    repair()
    assert (thing.resets, thing.bug) == (1, None)


def test_an_exception_in_a_thread_of_the_library_is_a_bug_and_not_an_interrupt():
    lock, thing, bug = ChangeLock(), Thing("a"), Hit()

    def change():
        with contextlib.suppress(Hit), lock, lock.change(thing):
            raise bug

    for runs_user_code, expected in ((False, bug), (True, None)):
        thread = LibraryThread(change, "test", runs_user_code=runs_user_code)
        thread.start()
        thread.join()
        lock.repair_if_interrupted()
        assert thing.bug is expected


def test_an_interrupted_repair_is_made_again():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    reset = thing.repair

    def interrupted(bug):
        reset(bug)
        thing.repair = reset
        raise Hit

    thing.repair = interrupted
    with pytest.raises(Hit):
        lock.repair_if_interrupted()
    lock.repair_if_interrupted()
    assert thing.resets == 2


def test_a_bug_in_a_repair_ends_no_change_of_another_actor():
    lock, one, other, changed = ChangeLock(), Thing("a"), Thing("b"), []
    with pytest.raises(Hit), lock, lock.change(one):
        raise Hit
    repair, bug = one.repair, Hit()

    def broken(found):
        one.repair = repair
        raise bug

    def change():
        with lock, lock.change(other):
            changed.append(other)

    one.repair = broken
    thread = LibraryThread(change, "test", runs_user_code=False)
    thread.start()
    thread.join()
    assert (changed, one.resets, one.bug) == ([other], 1, bug)


def test_a_nested_change_is_refused_and_the_outer_one_continues():
    lock, thing = ChangeLock(), Thing("a")
    with lock, lock.change(thing), pytest.raises(RuntimeError, match="'a'"), lock, lock.change(thing):
        pass
    with lock, lock.change(thing):
        pass
    assert thing.resets == 0


def test_a_handler_that_has_interrupted_its_thread_under_the_lock_does_not_wait():
    lock, thing = ChangeLock(), Thing("a")
    with lock, pytest.raises(RuntimeError, match="cannot wait"):
        lock.repair_if_interrupted()
    with lock, lock.change(thing), pytest.raises(RuntimeError, match="cannot wait"):
        lock.repair_if_interrupted()
    lock.repair_if_interrupted()
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


def test_a_refusal_repairs_nothing_and_keeps_no_frame_of_the_caller():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise lock.end_with(Hit())
    lock.repair_if_interrupted()
    assert (thing.resets, thing.soon, lock._changing_frame) == (0, [], None)


def test_a_handler_that_interrupts_a_repair_cannot_change_the_actor():
    lock, thing = ChangeLock(), Thing("a")
    with pytest.raises(Hit), lock, lock.change(thing):
        raise Hit
    repair, refused = thing.repair, []

    def interrupted(bug):
        repair(bug)
        with pytest.raises(RuntimeError, match="'a'") as error, lock, lock.change(thing):
            pass
        refused.append(error)

    thing.repair = interrupted
    with lock, lock.change(thing):
        pass
    assert (thing.resets, len(refused), lock._changing_frame) == (1, 1, None)
