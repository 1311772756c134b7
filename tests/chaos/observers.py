"""Observers of a chaos run: threads that look at its actors all the time, in every possible way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envactors as ea
from envactors.observe.programs import ProgramError, ask

# How long each waits between two looks, in seconds.
_PAUSE = 0.01
_STACKS_PATIENCE = 0.2
_MONITOR_PATIENCE = 5.0


class Observers:
    """Reads stats and stacks, asks the monitor, and records a trace while the context lasts.

    Args:
        envs: The vector env.
        report: Called with the description of a problem.
        seed: Decides which actor is looked at when.
    """

    def __init__(self, envs: ea.VectorEnv, report: Callable[[str], None], seed: int) -> None:
        self._envs = envs
        self._report = report
        self._dice = random.Random(seed)  # no secret
        self._ended = threading.Event()
        # (steps, batches) of the stats that were read last.
        self._last = ([0] * envs.num_envs, 0)
        self._looks = {"stats": self._read_stats, "stacks": self._read_stacks, "monitor": self._ask_monitor}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Observers:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="envactors-chaos-")))
        self._stack.callback(self._check_trace, directory / "run.json")
        self._stack.enter_context(ea.trace(directory / "run.json"))
        for name, look in self._looks.items():
            thread = threading.Thread(target=self._look_on, args=(name, look), name=f"chaos-{name}")
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _look_on(self, name: str, look: Callable[[], None]) -> None:
        while not self._ended.wait(_PAUSE):
            try:
                look()
            except Exception as error:
                self._report(f"the thread that looks at {name} has got {error!r}")
                return

    def _read_stats(self) -> None:
        stats = self._envs.stats()
        before, self._last = self._last, (stats.steps, stats.batches)
        if any(now < then for now, then in zip(stats.steps, before[0], strict=True)) or stats.batches < before[1]:
            self._report(f"counts have gone back, from {before} to {self._last}")

    def _read_stacks(self) -> None:
        if not self._dice.choice(self._envs.actors).stacks(_STACKS_PATIENCE):
            self._report("stacks were empty, without a line that says why")

    def _ask_monitor(self) -> None:
        what: dict[str, Any] = self._dice.choice(
            [{"get": "snapshot"}, {"get": "stacks", "name": None, "timeout": _STACKS_PATIENCE}]
        )
        try:
            answer = ask(os.getpid(), what, _MONITOR_PATIENCE)
        except ProgramError as error:
            self._report(f"the monitor was asked for {what} and has not answered: {error}")
            return
        if len(answer["actors"]) < len(self._envs.actors):
            self._report(f"the monitor knows only {answer['actors']}")

    def _check_trace(self, path: Path) -> None:
        events = json.loads(path.read_text())["traceEvents"]
        starts = sum(event["name"] == "renewal" for event in events)
        if starts == 0 and any(actor.incarnation for actor in self._envs.actors):
            self._report("no renewal is in the trace")
