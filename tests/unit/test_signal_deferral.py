"""Signal handlers that use the context which defers signals."""

from __future__ import annotations

import signal
import sys

from envactors.actor import signal_deferral
from envactors.actor.signal_deferral import defer_signals


def at_line(function, number):
    """Calls a function; before the line with this number that runs in the context, a signal comes."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != signal_deferral.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGALRM)
                return None
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return left <= 0


def enter():
    with defer_signals:
        pass


def test_a_handler_that_enters_the_context_may_run_at_any_line_of_it():
    """As one that calls an actor does: no handler is lost, none runs twice, and none is left deferred."""
    came = []

    def handle(signum, _frame):
        came.append(signum)
        enter()

    before = signal.signal(signal.SIGALRM, handle)
    others = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        number = 1
        while at_line(enter, number):
            assert came == [signal.SIGALRM], f"line {number}"
            assert signal.getsignal(signal.SIGALRM) is handle, f"line {number}"
            assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == others
            assert not defer_signals.interrupted
            came.clear()
            number += 1
        assert number > 20
    finally:
        signal.signal(signal.SIGALRM, before)
