"""`tune`: measures an env with different settings, in turns, and returns the settings that win."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from envactors.mailbox.factory import Factory, as_callable
from envactors.options import check_timeout
from envactors.system.cpus import usable_cores
from envactors.tuning.candidates import Candidate, placements, variants
from envactors.tuning.measuring import SEED, CandidateSide, Workload
from envactors.vector.inputs import check_counts

# Share of the time for comparing placements; the rest is for variants of the best.
_PLACING = 0.6
# Duration of a turn, in seconds; shorter if there is not enough time for this number of rounds.
_TURN, _ROUNDS = 0.3, 4
# Before a turn is measured, in seconds: caller and workers adapt their waiting to each other.
_WARM_UP = 0.05
# A candidate slower than this share of the best after two rounds is not measured any longer.
_HOPELESS = 0.75
# A candidate with this share of the best rate counts as equally fast.
_AS_FAST = 0.95


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a candidate.

    Attributes:
        candidate: The candidate.
        rate: Env-steps per second, the median of its turns; 0 if it failed.
        turns: How many turns it had.
        started_in: How long it took to start, in seconds.
        failure: The exception that it failed with; None if it did not fail.
    """

    candidate: Candidate
    rate: float
    turns: int = 0
    started_in: float = 0.0
    failure: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The outcome of `tune`; ``str`` of it is a table and the line to paste.

    Attributes:
        num_envs: How many envs were run.
        results: All candidates, the fastest first.
        factory_name: What the line calls the factory.
    """

    num_envs: int
    results: list[Measured]
    factory_name: str

    @property
    def best(self) -> Candidate:
        """The fastest candidate with the policy in the caller; among equals, the one with the fewest settings."""
        with_step = [result for result in self.results if not result.candidate.in_workers]
        as_fast = [result.candidate for result in with_step if result.rate >= _AS_FAST * with_step[0].rate]
        return min(as_fast, key=lambda candidate: len(candidate.extras))

    @property
    def best_rollout(self) -> Candidate | None:
        """The fastest candidate with the policy in the workers; None if `best` is as fast."""
        fastest = self.results[0].candidate
        return fastest if fastest.in_workers else None

    @property
    def settings(self) -> dict[str, Any]:
        """The fastest settings, for ``ea.VectorEnv([factory] * num_envs, **tuning.settings)``."""
        return self.best.settings

    @property
    def line(self) -> str:
        """The line to paste."""
        return self.best.line(self.factory_name, self.num_envs)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of the table: what, steps per second, share of the best, seconds to start."""
        fastest = self.results[0].rate
        rows = []
        for result in self.results:
            label = result.candidate.label(self.num_envs)
            failure = result.failure
            if failure is None:
                rows.append((label, f"{result.rate:,.0f}", f"{result.rate / fastest:.2f}", f"{result.started_in:.2f}"))
            else:
                rows.append((label, "failed", "", type(failure).__name__))
        return rows

    def record(self) -> dict[str, Any]:
        """Return what was measured, in terms of JSON."""
        results = [
            {
                "settings": result.candidate.label(self.num_envs),
                "env_steps_per_second": result.rate,
                "turns": result.turns,
                "start_seconds": result.started_in,
                "failure": None if result.failure is None else repr(result.failure),
            }
            for result in self.results
        ]
        rollout = self.best_rollout
        rollout_line = None if rollout is None else rollout.line(self.factory_name, self.num_envs)
        return {"num_envs": self.num_envs, "results": results, "line": self.line, "rollout_line": rollout_line}

    def __str__(self) -> str:
        rows = [("", "steps/s", "of best", "start (s)"), *self.rows()]
        width = max(len(row[0]) for row in rows)
        lines = [f"{row[0]:{width}}  {row[1]:>11}  {row[2]:>7}  {row[3]:>9}".rstrip() for row in rows]
        rollout = self.best_rollout
        if rollout is not None:
            lines += ["", rollout.line(self.factory_name, self.num_envs)]
        return "\n".join([*lines, "", self.line])


def tune(factory: Factory, num_envs: int, *, seconds: float = 20.0) -> Tuning:
    """Measure an env with different settings on this machine, and return the settings that make the most steps.

    Envs in-process, in threads, and in processes take turns, packed in every way that may pay off on these cores. Then
    ``copy=False``, other start methods, `VectorEnv.recv` of half the envs, and `VectorEnv.rollout` are tried for the
    fastest of these. Actions are sampled from the env's own action space; in a rollout, a policy in the workers plays
    them back.

    Args:
        factory: Makes an env; called in this process, too.
        num_envs: How many envs to run.
        seconds: About how long all of this may take, including the starts of envs; each setting has at least one turn.

    Raises:
        ValueError: ``seconds`` is not a number above 0, or the env has no action space to sample from.
        VectorInputError: ``num_envs`` is not an int above 0.
        EnvActorsError: The env fails with every setting.
    """
    return Tuner(factory, num_envs, seconds).run()


class Run:
    """A candidate that takes turns with others.

    Args:
        candidate: The candidate.
        workload: Envs and actions.

    Attributes:
        candidate: The candidate.
        started_in: How long it took from the call to the first observations, in seconds.
        rates: The env-steps per second of each turn.
    """

    def __init__(self, candidate: Candidate, workload: Workload) -> None:
        self.candidate = candidate
        self.rates: list[float] = []
        begun = time.monotonic()
        self._side = CandidateSide(candidate, workload)
        try:
            self._side.start()
            self._side.reset(SEED)
        except BaseException:
            self._side.close()
            raise
        self.started_in: float = time.monotonic() - begun

    @property
    def rate(self) -> float:
        """The median of the turns; 0 before the first."""
        return statistics.median(self.rates) if self.rates else 0.0

    def take_turn(self, seconds: float) -> None:
        """Step for a while, and note how fast that was."""
        self.rates.append(self._side.play(seconds, _WARM_UP).rate)

    def close(self) -> None:
        """End the envs."""
        self._side.close()


class Tuner:
    """Measures candidates.

    Args:
        factory: Makes an env.
        num_envs: How many envs to run.
        seconds: About how long it may take.
        on_progress: Called with what is measured next, and the share of the time that is over.
    """

    def __init__(
        self,
        factory: Factory,
        num_envs: int,
        seconds: float,
        on_progress: Callable[[str, float], None] = lambda _what, _share: None,
    ) -> None:
        check_counts(1, num_envs=num_envs)
        check_timeout(seconds, "tune(seconds=...)")
        if not seconds:
            raise ValueError("tune(seconds=0): expected seconds > 0")
        self._factory = as_callable(factory, "tune")
        self._num_envs = num_envs
        self._seconds = seconds
        self._on_progress = on_progress
        self._begun = 0.0
        self._measured: dict[Candidate, Measured] = {}

    def run(self) -> Tuning:
        """Measure, and return the outcome."""
        self._begun = time.monotonic()
        name = getattr(self._factory, "__name__", "")
        workload = Workload.sample(self._factory, name or repr(self._factory), self._num_envs)
        with contextlib.ExitStack() as running:
            runs = self._compare(placements(self._num_envs, usable_cores()), workload, _PLACING, running)
            best = sorted(runs, key=lambda run: -run.rate)
            processes = [run.candidate for run in best if run.candidate.backend == "process"]
            if best:
                further = variants(best[0].candidate, next(iter(processes), None), self._num_envs, usable_cores())
                self._compare(further, workload, 1.0, running, including=best[:1])
        results = sorted(self._measured.values(), key=lambda measured: -measured.rate)
        if not results[0].rate:
            raise results[0].failure or RuntimeError("no setting had a turn")
        return Tuning(self._num_envs, results, name if name.isidentifier() else "make_env")

    def _compare(
        self,
        candidates: Iterable[Candidate],
        workload: Workload,
        until: float,
        running: contextlib.ExitStack,
        including: list[Run] | None = None,
    ) -> list[Run]:
        """Let candidates take turns until this share of the time is over; return those that are fast enough."""
        runs = list(including or [])
        for candidate in candidates:
            self._tell(f"starting {candidate.label(self._num_envs)}")
            try:
                run = Run(candidate, workload)
            except Exception as error:
                self._measured[candidate] = Measured(candidate, 0.0, failure=error)
                continue
            running.callback(run.close)
            runs.append(run)
        end = self._begun + until * self._seconds
        rounds = 0
        while runs and (rounds == 0 or time.monotonic() < end):
            turn = min(_TURN, max(0.0, end - time.monotonic()) / (_ROUNDS * len(runs)))
            for run in runs if rounds % 2 else runs[::-1]:
                self._take_turn(run, turn)
            rounds += 1
            runs = [run for run in runs if self._measured[run.candidate].failure is None]
            if rounds > 1:
                runs = [run for run in runs if run.rate >= _HOPELESS * _most(run, runs)]
        return runs

    def _take_turn(self, run: Run, turn: float) -> None:
        self._tell(run.candidate.label(self._num_envs))
        try:
            run.take_turn(turn)
        except Exception as error:
            self._measured[run.candidate] = Measured(run.candidate, 0.0, failure=error)
        else:
            self._measured[run.candidate] = Measured(run.candidate, run.rate, len(run.rates), run.started_in)

    def _tell(self, what: str) -> None:
        self._on_progress(what, min(1.0, (time.monotonic() - self._begun) / self._seconds))


def _most(run: Run, runs: list[Run]) -> float:
    """Return the most steps per second of those whose policy is in the same place."""
    return max(other.rate for other in runs if other.candidate.in_workers == run.candidate.in_workers)
