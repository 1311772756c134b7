"""Measures what calls of executors cost; see `measure.py`. Executors that are not installed are left out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import loky
from turns import Side, Turn, compare, per_second, rate, table, times

import envactors as ea

Submit = Callable[..., "concurrent.futures.Future[Any]"]
WORKERS = 2
TEN_MEGABYTES = bytes(10_000_000)


def nothing() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Return the value."""
    return value


# Executors -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def submitting(make: Callable[..., AbstractContextManager[Any]]) -> Iterator[Submit]:
    """Run an executor of `concurrent.futures`' kind."""
    with make(WORKERS) as executor:
        yield executor.submit


@contextlib.contextmanager
def submitting_to_pebble() -> Iterator[Submit]:
    """Run a pool of pebble."""
    import pebble

    with pebble.ProcessPool(WORKERS) as pool:
        yield lambda function, *args: pool.schedule(function, args=args)


EXECUTORS: dict[str, Callable[[], AbstractContextManager[Submit]]] = {
    "envactors": functools.partial(submitting, ea.Executor),
    "`ProcessPoolExecutor`": functools.partial(submitting, concurrent.futures.ProcessPoolExecutor),
    "loky": functools.partial(submitting, loky.ProcessPoolExecutor),
}
if importlib.util.find_spec("pebble"):
    EXECUTORS["pebble"] = submitting_to_pebble


# Questions -------------------------------------------------------------------------------------------------------


def call_many(submit: Submit, count: int) -> int:
    """Submit many calls at once, and wait for all of them."""
    futures = [submit(nothing) for _ in range(count)]
    for future in futures:
        future.result()
    return count


def call_once(submit: Submit, function: Callable[..., Any], *args: Any) -> int:
    """Submit a call, and wait for it."""
    submit(function, *args).result()
    return 1


CASES: dict[str, Callable[[Submit], int]] = {
    "20,000 calls at once (5,000 with pebble)": functools.partial(call_many, count=20_000),
    "one call after the other": functools.partial(call_once, function=nothing),
    "the same, with 10 MB as argument and result": lambda submit: call_once(submit, echo, TEN_MEGABYTES),
}


@contextlib.contextmanager
def calling(executor: str, case: str) -> Iterator[Turn]:
    """Make the calls of a case with an executor."""
    run = CASES[case]
    if executor == "pebble" and case.startswith("20,000"):
        run = functools.partial(call_many, count=5_000)
    with EXECUTORS[executor]() as submit:
        yield functools.partial(rate, functools.partial(run, submit))


def measure(rounds: int) -> Any:
    """Measure each case with each executor."""
    measured = {}
    for case in CASES:
        sides: dict[str, Side] = {name: functools.partial(calling, name, case) for name in EXECUTORS}
        measured[case] = compare(sides, rounds)
    return measured


def show(measured: Any) -> str:
    """Return the table of executors."""
    rows = []
    for case, rates in measured.items():
        ours, *others = rates.values()
        rows.append([case, per_second(ours), *(times(ours, each) for each in others)])
    names = list(next(iter(measured.values())))[1:]
    return table(["2 workers", "calls/s", *(f"envactors / {name}" for name in names)], rows)
