"""When the world says that a thread of the caller waits forever."""

from __future__ import annotations

import pytest

from simulation.world import Violation


@pytest.mark.parametrize("has_missed", [False, True])
def test_a_thread_goes_on_if_a_signal_handler_that_wakes_it_leaves_nothing_else_to_happen(world, has_missed):
    woken = []

    def look() -> bool:
        """Stand for code of the library, in which the handler runs."""
        woken.append(True)
        return has_missed

    assert world.wait(lambda: bool(woken), None, look)


@pytest.mark.parametrize(("has_missed", "text"), [(False, "waits for what never comes"), (True, "are there")])
def test_a_thread_that_nothing_wakes_is_a_violation(world, has_missed, text):
    with pytest.raises(Violation, match=text):
        world.wait(lambda: False, None, lambda: has_missed)
