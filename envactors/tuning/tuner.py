"""`tune`: measures an env with different settings, in turns, and returns the settings that win."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from envactors.mailbox.factory import Factory, as_callable
from envactors.options import as_seconds
from envactors.system.cpus import usable_cores
from envactors.tuning.candidates import Candidate, placements, variants
from envactors.tuning.measure import SEED, Actions, measure_loop
from envactors.vector.inputs import check_counts
from envactors.vector_env import VectorEnv

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
    """The outcome of `tune`; ``str`` of it is a table, the reason for the advice, and the lines to paste.

    Attributes:
        num_envs: How many envs were run.
        results: All candidates, the fastest first.
        factory_name: What the lines call the factory.
        loop_rate: Env-steps per second of a plain loop over the envs in this process; 0 if it failed.
        imports: The imports that the lines need, that of envactors last.
    """

    num_envs: int
    results: list[Measured]
    factory_name: str
    loop_rate: float = 0.0
    imports: tuple[str, ...] = ("import envactors as ea",)

    @property
    def best(self) -> Candidate:
        """The fastest candidate with the policy in the caller; among equals, the one with the fewest settings.

        If all of those failed, the fastest of the others.
        """
        ran = [result for result in self.results if result.failure is None]
        return _plainest([result for result in ran if not result.candidate.in_workers] or ran)

    @property
    def best_step(self) -> Candidate | None:
        """Like `best`, of the candidates that call ``step``, as drop-ins do; None if all of those failed."""
        ran = [result for result in self.results if result.failure is None]
        stepped = [one for one in ran if not one.candidate.in_workers and one.candidate.min_envs is None]
        return _plainest(stepped) if stepped else None

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

    @property
    def drop_in_line(self) -> str | None:
        """The line to paste for the drop-in for Gymnasium; None if every ``step`` failed."""
        best = self.best_step
        return None if best is None else best.drop_in_line(self.factory_name, self.num_envs)

    @property
    def reason(self) -> str:
        """Why `best` is the best, in a sentence or two."""
        if not self.loop_rate:
            return "The setting below is the fastest of those that ran; the plain loop failed."
        shares = {result.candidate: result.rate / self.loop_rate for result in self.results}
        sentences = [
            f"In a plain loop, a step takes {1e6 / self.loop_rate:,.1f} µs.",
            f"The setting below, {self.best.label(self.num_envs)}, makes {shares[self.best]:.2f} times as many steps.",
        ]
        processes = [share for one, share in shares.items() if one.backend == "process" and not one.in_workers]
        if self.best.backend != "process" and processes:
            sentences.append(f"The best setting with processes makes {max(processes):.2f} times as many.")
        if max(shares.values()) < 1:
            sentences.append("No setting is faster than the loop: use processes only to survive crashes and hangs.")
        return " ".join(sentences)

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
        return {
            "num_envs": self.num_envs,
            "loop_env_steps_per_second": self.loop_rate,
            "results": results,
            "reason": self.reason,
            "line": self.line,
            "rollout_line": self._rollout_line,
            "drop_in_line": self.drop_in_line,
        }

    def __str__(self) -> str:
        rows = [("", "steps/s", "of best", "start (s)")]
        best_rate = self.results[0].rate
        loop_cells = (
            (f"{self.loop_rate:,.0f}", f"{self.loop_rate / best_rate:.2f}") if self.loop_rate else ("failed", "")
        )
        rows.append(("plain loop, no envactors", *loop_cells, ""))
        for result in self.results:
            cells = f"{result.rate:,.0f}", f"{result.rate / best_rate:.2f}", f"{result.started_in:.2f}"
            if result.failure is not None:
                cells = "failed", "", type(result.failure).__name__
            rows.append((result.candidate.label(self.num_envs), *cells))
        width = max(len(row[0]) for row in rows)
        lines = [f"{row[0]:{width}}  {row[1]:>11}  {row[2]:>7}  {row[3]:>9}".rstrip() for row in rows]
        lines += ["", self.reason, "", *self.imports]
        # Both are the same if every `step` failed.
        lines += [line for line in dict.fromkeys([self._rollout_line, self.line]) if line]
        if self.drop_in_line is not None:
            # A comment, so that all lines can be pasted together; with its imports, so that these can be pasted alone.
            lines += ["", "# Or, as a drop-in for Gymnasium's vector envs:", *self.imports[:-1]]
            lines += ["from envactors.integrations.gymnasium import ActorVectorEnv", self.drop_in_line]
        return "\n".join(lines)

    @property
    def _rollout_line(self) -> str | None:
        rollout = self.best_rollout
        return None if rollout is None else rollout.line(self.factory_name, self.num_envs)


def _plainest(results: list[Measured]) -> Candidate:
    """Return the fastest candidate; among equals, the one with the fewest settings."""
    as_fast = [result.candidate for result in results if result.rate >= _AS_FAST * results[0].rate]
    return min(as_fast, key=lambda candidate: len(candidate.extras))


def tune(factory: Factory, num_envs: int, *, seconds: float = 20.0) -> Tuning:
    """Measure an env with different settings on this machine, and return the settings that make the most steps.

    A plain loop takes turns with envs in-process, in threads, and in processes, packed in every way that may pay off on
    these cores. Then ``copy=False``, `VectorEnv.recv` of half the envs, and `VectorEnv.rollout` are tried for the
    fastest of these. Actions are sampled from the env's own action space; in a rollout, a policy in the workers repeats
    them.

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
        limit = as_seconds(seconds, "tune(seconds=...)")
        if not 0 < limit < float("inf"):
            raise ValueError(f"tune(seconds={seconds}): expected seconds > 0")
        self._factory = as_callable(factory, "tune")
        self._name: str = factory if isinstance(factory, str) else getattr(factory, "__name__", "")
        self._num_envs = num_envs
        self._seconds = limit
        self._on_progress = on_progress
        self._begun = 0.0
        self._closing = contextlib.ExitStack()
        self._envs: dict[Candidate, VectorEnv] = {}
        self._rates: dict[Candidate, list[float]] = {}
        self._results: dict[Candidate, Measured] = {}
        self._loop_envs: list[Any] = []
        self._loop_rates: list[float] = []

    def run(self) -> Tuning:
        """Measure, and return the outcome."""
        self._begun = time.monotonic()
        actions = Actions.sample(self._factory, self._name or repr(self._factory), self._num_envs)
        with self._closing:
            self._start_loop()
            best = self._compare(placements(self._num_envs, usable_cores()), actions, _PLACING)
            if best:
                processes = next((candidate for candidate in best if candidate.backend == "process"), None)
                further = variants(best[0], processes, self._num_envs, usable_cores())
                self._compare([best[0], *further], actions, 1.0)
        results = sorted(self._results.values(), key=lambda result: -result.rate)
        if results[0].failure is not None:
            raise results[0].failure
        loop_rate = statistics.median(self._loop_rates) if self._loop_rates else 0.0
        name = self._name if self._name.isidentifier() else "make_env"
        return Tuning(self._num_envs, results, repr(self._name) if ":" in self._name else name, loop_rate)

    def _compare(self, candidates: list[Candidate], actions: Actions, until: float) -> list[Candidate]:
        """Let candidates take turns until this share of the time is over; return the fast ones, the fastest first."""
        for candidate in candidates:
            if candidate not in self._envs:
                with self._record_failure(candidate):
                    self._start(candidate, actions)
        end = self._begun + until * self._seconds
        rounds, fast = 0, self._fast(candidates, 0.0)
        while fast and (rounds == 0 or time.monotonic() < end):
            turn = min(_TURN, max(0.0, end - time.monotonic()) / (_ROUNDS * (len(fast) + 1)))
            self._time_loop(actions, turn)
            # Alternate the order, so that no candidate always follows the same one.
            for candidate in fast if rounds % 2 else fast[::-1]:
                with self._record_failure(candidate):
                    self._take_turn(candidate, actions, turn)
            rounds += 1
            fast = self._fast(fast, _HOPELESS if rounds > 1 else 0.0)
        return fast

    def _start_loop(self) -> None:
        self._tell("starting the plain loop")
        with self._record_loop_failure():
            for index in range(self._num_envs):
                env = self._factory()
                self._loop_envs.append(env)
                if hasattr(env, "close"):
                    self._closing.callback(env.close)
                env.reset(seed=SEED + index)

    def _time_loop(self, actions: Actions, seconds: float) -> None:
        if not self._loop_envs:
            return
        self._tell("plain loop")
        with self._record_loop_failure():
            measure_loop(self._loop_envs, actions, _WARM_UP)
            self._loop_rates.append(measure_loop(self._loop_envs, actions, seconds))

    @contextlib.contextmanager
    def _record_loop_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # raised by the env; the table says that the loop failed
            self._loop_envs = []
            self._loop_rates = []

    def _start(self, candidate: Candidate, actions: Actions) -> None:
        self._tell(f"starting {candidate.label(self._num_envs)}")
        begun = time.monotonic()
        envs = self._closing.enter_context(VectorEnv([self._factory] * self._num_envs, **candidate.settings))
        if candidate.in_workers:
            envs.set_policy(actions.make_policy)
        envs.reset(seed=SEED)
        self._envs[candidate], self._rates[candidate] = envs, []
        self._results[candidate] = Measured(candidate, 0.0, started_in=time.monotonic() - begun)

    def _take_turn(self, candidate: Candidate, actions: Actions, seconds: float) -> None:
        self._tell(candidate.label(self._num_envs))
        envs, rates = self._envs[candidate], self._rates[candidate]
        candidate.measure(envs, actions, _WARM_UP)
        rates.append(candidate.measure(envs, actions, seconds))
        result = self._results[candidate]
        self._results[candidate] = dataclasses.replace(result, rate=statistics.median(rates), turns=len(rates))

    def _fast(self, candidates: list[Candidate], share: float) -> list[Candidate]:
        """Return candidates with at least this share of the best rate for their kind of policy, the fastest first."""
        ran = [result for result in map(self._results.__getitem__, candidates) if result.failure is None]
        ran.sort(key=lambda result: result.rate)
        best = {result.candidate.in_workers: result.rate for result in ran}
        return [one.candidate for one in reversed(ran) if one.rate >= share * best[one.candidate.in_workers]]

    @contextlib.contextmanager
    def _record_failure(self, candidate: Candidate) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # raised by the env
            self._results[candidate] = Measured(candidate, 0.0, failure=error)

    def _tell(self, what: str) -> None:
        self._on_progress(what, min(1.0, (time.monotonic() - self._begun) / self._seconds))
