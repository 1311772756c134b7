"""The inventory that the tests take of what they hold."""

from __future__ import annotations

import threading

from leaks import inventory, settled_inventory


def test_threads_for_callbacks_that_end_during_a_test_are_no_difference():
    """They end with the last actor, such as one that a module before kept for all of its tests."""
    ends = threading.Event()
    callbacks = threading.Thread(target=ends.wait, name="envactors-callbacks")
    callbacks.start()
    before = inventory()
    ends.set()
    callbacks.join()
    assert settled_inventory(before, patience=0.0) == before
