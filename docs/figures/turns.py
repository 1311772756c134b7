"""Lets sides take turns: every figure of speed in the docs is measured with this module.

A side is a context manager. It starts something, and yields a turn: a function that runs for some seconds and returns a
rate. All sides of a comparison run in one program run, each in a fresh process, and take turns in alternating order, so
that load that slows down the machine slows down all of them. The docs show medians, and medians of the ratios of each
round.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

Turn = Callable[[float], float]
Side = Callable[[], AbstractContextManager[Turn]]

SECONDS, WARM_UP = 0.5, 0.1
_PROBE_ROUNDS, _PROBE_SECONDS = 5, 0.2


def rate(run: Callable[[], int], seconds: float) -> float:
    """Call a function that returns its number of steps for some seconds, and return the steps per second."""
    steps, begun = 0, time.perf_counter()
    while not steps or time.perf_counter() - begun < seconds:
        steps += run()
    return steps / (time.perf_counter() - begun)


def compare(sides: Mapping[str, Side], rounds: int, seconds: float = SECONDS) -> dict[str, list[float]]:
    """Start each side in a fresh process, let them take turns, and return the rates of each round by side.

    Args:
        sides: The sides by name; they are pickled by reference.
        rounds: Number of turns of each side.
        seconds: Duration of a turn.
    """
    with contextlib.ExitStack() as stack:
        return alternate({name: stack.enter_context(in_process(side)) for name, side in sides.items()}, rounds, seconds)


def alternate(turns: Mapping[str, Turn], rounds: int, seconds: float = SECONDS) -> dict[str, list[float]]:
    """Let turns alternate, after an unmeasured one each, and return the rates of each round by name."""
    for turn in turns.values():
        turn(WARM_UP)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        # In alternating order, so that no side always follows the same one.
        for name, turn in list(turns.items())[:: 1 - number % 2 * 2]:
            rates[name].append(turn(seconds))
    return rates


@contextlib.contextmanager
def in_process(side: Side) -> Iterator[Turn]:
    """Run a side in a fresh process, which prints the traceback of an error and ends.

    The process runs this file, since processes that a side starts may import its main module.
    """
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, __file__, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]):  # noqa: S603 # this file
        theirs.close()

        def turn(seconds: float) -> Any:
            ours.send(seconds)
            return ours.recv()

        with ours:
            ours.send(side)
            ours.recv()  # it has started
            yield turn


def _serve(pipe: Any) -> None:
    side: Side = pipe.recv()
    with side() as turn:
        pipe.send(None)
        while True:
            try:
                seconds = pipe.recv()
            except EOFError:  # closed, or the parent has ended
                return
            pipe.send(turn(seconds))


@contextlib.contextmanager
def side_by_side(*sides: Side) -> Iterator[Turn]:
    """Run sides at the same time, in processes that share nothing; the rate is the sum of theirs."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(sides)) as threads:
        turns = [stack.enter_context(in_process(side)) for side in sides]
        yield lambda seconds: sum(threads.map(lambda turn: turn(seconds), turns))


def probe_machine() -> float:
    """Return how many times as much two processes that share nothing compute as one: at most 2, less on a busy host."""
    sides: dict[str, Side] = {"one": _computing, "two": _two_computing}
    rates = compare(sides, _PROBE_ROUNDS, _PROBE_SECONDS)
    return ratio(rates["two"], rates["one"])


@contextlib.contextmanager
def _computing() -> Iterator[Turn]:
    yield functools.partial(rate, _compute)


def _two_computing() -> AbstractContextManager[Turn]:
    return side_by_side(_computing, _computing)


def _compute() -> int:
    sum(range(1000))
    return 1


def ratio(rates: list[float], others: list[float]) -> float:
    """Return the median over the rounds of the ratio of two sides' rates."""
    return statistics.median(one / other for one, other in zip(rates, others, strict=True))


def times(rates: list[float], others: list[float]) -> str:
    """Return a ratio as tables show it."""
    return f"{ratio(rates, others):.2f}"


def per_second(rates: list[float]) -> str:
    """Return a median rate as tables show it."""
    return f"{statistics.median(rates):,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = ("| " + " | ".join(row) + " |\n" for row in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
