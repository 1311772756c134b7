"""The figures of a bench: rates and ratios of its rounds, and what they mean in words."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

# What differs by less is called equal: no machine is so quiet.
_TOLERANCE = 0.05
# Of the load average to the cores, before anything was measured.
_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Round:
    """What one side did in one round.

    Attributes:
        steps: How many env-steps.
        seconds: In what time.
    """

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Env-steps a second."""
        return self.steps / self.seconds


@dataclasses.dataclass(frozen=True)
class Spread:
    """The middle of some values, and the quartiles about it."""

    lower_quartile: float
    median: float
    upper_quartile: float


def spread(values: Sequence[float]) -> Spread:
    """Tells the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def rates(rounds: Sequence[Round]) -> Spread:
    """The spread of the env-steps a second."""
    return spread([one.rate for one in rounds])


def ratios(ones: Sequence[Round], others: Sequence[Round]) -> Spread:
    """The spread of the ratios of two sides' rates, each of one round.

    What a round's time did to both sides does nothing to their ratio.
    """
    return spread([one.rate / other.rate for one, other in zip(ones, others, strict=True)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One side that ran, next to the others.

    Attributes:
        name: What it is called by in arguments and files.
        title: What it is called in a table.
        ours: Whether it is ours.
        rate: Its env-steps a second.
        to_loop: Ratio of its rate to the loop's, None where the loop failed.
        ours_to_it: Ratio of our default's rate to its own, None where our default failed.
    """

    name: str
    title: str
    ours: bool
    rate: Spread
    to_loop: Spread | None
    ours_to_it: Spread | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """The medians that words are made of.

    Attributes:
        step_seconds: What a step costs in the loop.
        default: Ratio of our default to the loop.
        packed: The same of several envs a process, None where that was not measured.
        envs_per_actor: How many those are.
        asynchronous: Ratio of taking the first half that is done to our default.
        others: Ratio of our default to each other side, by its name, the loop left out.
        cores: How many this process may use.
        load: The load average of the last minute before.
    """

    step_seconds: float
    default: float
    packed: float | None
    envs_per_actor: int
    asynchronous: float | None
    others: Mapping[str, float]
    cores: int
    load: float


def in_words(finding: Finding) -> list[str]:
    """Says what the figures mean for this env, in a few sentences."""
    duration = _duration(finding.step_seconds)
    sentences = [f"A step of this env takes about {duration} in the loop; {_whether_processes_pay(finding)}"]
    if finding.others:
        name, ratio = min(finding.others.items(), key=lambda item: item[1])
        sentences.append(f"The fastest of the others is {name}: the default makes {_times(ratio)} its steps.")
    if _is_busy(finding):
        sentences.append(
            f"The load average was {finding.load:.1f} before anything was started: other processes were using the "
            "machine, and the ratios say more than the steps per second."
        )
    return sentences


def _is_busy(finding: Finding) -> bool:
    return finding.load > _BUSY * finding.cores


def _whether_processes_pay(finding: Finding) -> str:
    cores = f"on {finding.cores} {'core' if finding.cores == 1 else 'cores'}"
    default, packed = finding.default, finding.packed
    together = f"{finding.envs_per_actor} envs a process"
    if default > 1 + _TOLERANCE:
        why = ""
        if default > (1 + _TOLERANCE) * finding.cores:
            waits = "its steps wait more than they compute"
            if _is_busy(finding):
                waits = f"many processes get more of a busy machine, or {waits}"
            why = f" (more than there are: {waits})"
        text = f"processes pay: the default is {_times(default)} the loop {cores}{why}"
        if packed is not None:
            text += f", {together} {_times(packed)}"
    elif packed is not None and packed > 1 + _TOLERANCE:
        text = (
            f"a process costs more than it gives unless several envs share one: {together} are {_times(packed)} the "
            f"loop {cores}, the default is {_times(default)}"
        )
    else:
        cost = "about what it gives" if default >= 1 - _TOLERANCE else "more than it gives"
        text = f"a process costs {cost}: the default is {_times(default)} the loop {cores}"
        if packed is not None:
            text += f", {together} {_times(packed)}"
    if finding.asynchronous is not None and finding.asynchronous > 1 + _TOLERANCE:
        text += f"; taking what is done (recv) is {_times(finding.asynchronous)} the default"
    return f"{text}."


def ratio_text(ratio: float) -> str:
    """A ratio for a column of them, with two digits at least that count."""
    return f"{ratio:.0f}" if ratio >= 9.995 else f"{ratio:.2f}" if ratio >= 0.0995 else f"{ratio:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if 0.995 <= ratio < 9.95 else f"{ratio_text(ratio)} times"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds < 10e-6 else f"{seconds * 1e6:.0f} us"
