"""Figures of a bench: rates and ratios per round, and a summary in words."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from envactors.cli.bench.registry import APART, LOOP
from envactors.cli.units import count, duration
from envactors.tuning.measuring import Round

# Relative difference below which two rates are called equal.
_TOLERANCE = 0.05
# Load average per core, before the measurement, above which a machine is called busy.
_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of some values."""

    lower_quartile: float
    median: float
    upper_quartile: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def rates(rounds: Sequence[Round]) -> Spread:
    """Return the spread of the env-steps per second."""
    return spread([one.rate for one in rounds])


def ratios(ones: Sequence[Round], others: Sequence[Round]) -> Spread:
    """Return the spread of the ratios of two sides' rates within each round.

    Load that slows both sides down in a round cancels out.
    """
    return spread([one.rate / other.rate for one, other in zip(ones, others, strict=True)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One side that ran, compared with the others.

    Attributes:
        name: Name in arguments and files.
        title: Title in the table.
        is_ours: True if the side uses envactors.
        rate: Env-steps per second.
        to_loop: Ratio of its rate to the loop's; None if the loop failed.
        envactors_to_side: Ratio of the rate of envactors' default to its own; None if that failed.
    """

    name: str
    title: str
    is_ours: bool
    rate: Spread
    to_loop: Spread | None
    envactors_to_side: Spread | None


def in_words(comparisons: Sequence[Comparison], cores: int, load: float) -> list[str]:
    """Return what the figures mean for this env, in a few sentences.

    Args:
        comparisons: The sides that ran.
        cores: Number of cores that this process may use.
        load: Load average over the minute before the measurement.
    """
    loop = next((one for one in comparisons if one.name == LOOP), None)
    ours = [(one.to_loop.median, one.title) for one in comparisons if one.is_ours and one.to_loop is not None]
    if loop is None or not ours:
        return []
    ways = "; ".join(f"{title}: {_times(ratio)}" for ratio, title in ours)
    ratio, title = max(ours)
    verdict = "Processes cost more than they give: use backend='inline', unless the env crashes, hangs, or leaks."
    if ratio > 1 + _TOLERANCE:
        verdict = f"The fastest is {title}."
    step = duration(1 / loop.rate.median)
    loops_steps = f"In multiples of the loop's steps, on {count(cores, 'core')}: {ways}."
    sentences = [f"A step of this env takes about {step} in the loop. {loops_steps} {verdict}"]
    others = [
        (one.envactors_to_side.median, one.title)
        for one in comparisons
        if one.envactors_to_side is not None and not one.is_ours and one.name not in (LOOP, APART)
    ]
    if others:
        ratio, title = min(others)
        sentences.append(f"The fastest of the others is {title}: the default makes {_times(ratio)} its steps.")
    if load > _BUSY * cores:
        sentences.append(
            f"The load average was {load:.1f} before anything was started: other processes were using the machine, and "
            "the ratios say more than the steps per second."
        )
    return sentences


def ratio_text(ratio: float) -> str:
    """Format a ratio with at least two significant digits."""
    return f"{ratio:.0f}" if ratio >= 9.995 else f"{ratio:.2f}" if ratio >= 0.0995 else f"{ratio:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if 0.995 <= ratio < 9.95 else f"{ratio_text(ratio)} times"
