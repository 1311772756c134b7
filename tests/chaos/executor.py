"""The executor workload: functions that return, raise, hang, crash, exit, and start processes, each in its own way."""

from __future__ import annotations

import collections
import dataclasses
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import envactors as ea
from chaos.deeds import DeedError, work
from chaos.leftovers import descendants, find_leftovers

_FAULTS = ("raise", "hang", "segfault", "exit", "allocate", "unpicklable", "print", "child", "abort")
# The exceptions of the calls that fail; the others return their number.
_ERRORS: dict[str, type[BaseException]] = {
    "raise": DeedError,
    "hang": ea.ActorTimeoutError,
    "segfault": ea.ActorDiedError,
    "exit": ea.ActorDiedError,
    "unpicklable": ea.SerializationError,
    "child": ea.ActorDiedError,
    "abort": ea.ActorDiedError,
}
_DEADLINE = 1.0  # seconds per call
_WORK = 0.002  # seconds of each call
_PATIENCE = 60.0  # seconds that anything may take


@dataclasses.dataclass
class ExecutorReport:
    """The result of a run.

    Attributes:
        calls: How many calls there were.
        outcomes: How many of them ended in each way.
        p99: The 99th percentile of how long it took from the beginning of a healthy call to its result, in seconds.
        wrong: What should not have happened, in words.
    """

    calls: int
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    p99: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)


class ExecutorStorm:
    """Runs many functions in one executor.

    Args:
        calls: How many.
        seed: Decides what each does.
        faults: The share of calls that are no healthy ones.
        workers: The number of workers.
        large: The size of large results, in bytes.
    """

    def __init__(
        self, calls: int, *, seed: int = 0, faults: float = 0.05, workers: int = 2, large: int = 1 << 26
    ) -> None:
        self._dice = random.Random(seed)
        self._share = faults
        self._workers = workers
        self._large = large
        self._latencies: list[float] = []
        self._lock = threading.Lock()
        self.report = ExecutorReport(calls)

    def run(self) -> ExecutorReport:
        """Run all functions; return the result."""
        before = descendants()
        fates = [
            self._dice.choice(_FAULTS) if self._dice.random() < self._share else "return"
            for _ in range(self.report.calls)
        ]
        calls = iter(enumerate(fates))
        with tempfile.TemporaryDirectory() as directory:
            ledger = Path(directory) / "ledger"
            ledger.touch()
            with ea.Executor(self._workers, deadline=_DEADLINE) as pool:
                users = [
                    threading.Thread(target=self._use, args=(pool, ledger, calls)) for _ in range(2 * self._workers)
                ]
                for user in users:
                    user.start()
                for user in users:
                    user.join()
                stats = pool.stats()
            self._check_ledger(ledger, fates)
        if stats.submitted != self.report.calls or stats.waiting or stats.running:
            self._complain(f"the statistics are {stats}")
        if self._latencies:
            self.report.p99 = statistics.quantiles(self._latencies, n=100)[-1]
        if left := find_leftovers(before, _PATIENCE):
            self._complain(f"processes are left: {left}")
        return self.report

    def _choose(self) -> str:
        return self._dice.choice(_FAULTS) if self._dice.random() < self._share else "return"

    def _use(self, pool: ea.Executor, ledger: Path, calls: Any) -> None:
        """Submit calls one after the other, each once the last one has ended."""
        while True:
            with self._lock:
                token, fate = next(calls, (-1, ""))
            if not fate:
                return
            limited: Any = pool.options(deadline=_PATIENCE) if fate == "allocate" else pool
            deed = "hang" if fate == "abort" else fate
            future = limited.submit(work, str(ledger), token, deed, _WORK, self._large)
            if fate == "abort":
                while not future.running() and not future.done():
                    time.sleep(0.001)
                future.abort()
            self._check(token, fate, future)

    def _check(self, token: int, fate: str, future: ea.ActorFuture[Any]) -> None:
        """Check how a call has ended."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = future.result(_PATIENCE)
        except (Exception, CancelledError) as raised:
            error = raised
        now = time.monotonic()
        with self._lock:
            self.report.outcomes[fate] += 1
            expected = _ERRORS.get(fate)
            if expected is None and (error is not None or value[0] != token):
                self._complain(f"call {token} ({fate}) ended with {error or value[0]!r}")
            elif expected is not None and type(error) is not expected:
                self._complain(f"call {token} ({fate}) ended with {error or value!r}")
            if fate == "return" and error is None:
                self._latencies.append(now - value[1])

    def _check_ledger(self, ledger: Path, fates: list[str]) -> None:
        """Check that each call has run exactly once."""
        runs = collections.Counter(map(int, ledger.read_text().split()))
        for token, fate in enumerate(fates):
            # A call may be aborted before the worker has begun it.
            if runs[token] != 1 and not (fate == "abort" and runs[token] == 0):
                self._complain(f"call {token} ({fate}) has run {runs[token]} times")

    def _complain(self, text: str) -> None:
        self.report.wrong.append(text)
