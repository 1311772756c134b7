"""Figures of a bench: rates and ratios per round, and a summary in words."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

# Relative difference below which two rates are called equal.
_TOLERANCE = 0.05
# Load average per core, before the measurement, above which a machine is called busy.
_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Round:
    """Result of one subject in one round.

    Attributes:
        steps: Number of env-steps.
        seconds: Duration.
    """

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Env-steps per second."""
        return self.steps / self.seconds


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
    """Return the spread of the ratios of two subjects' rates within each round.

    Load that slows both subjects down in a round cancels out.
    """
    return spread([one.rate / other.rate for one, other in zip(ones, others, strict=True)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One subject that ran, compared with the others.

    Attributes:
        name: Name in arguments and files.
        title: Title in the table.
        is_envactors: True if the subject uses envactors.
        rate: Env-steps per second.
        to_loop: Ratio of its rate to the loop's; None if the loop failed.
        envactors_to_subject: Ratio of our default's rate to its own, None where our default failed.
    """

    name: str
    title: str
    is_envactors: bool
    rate: Spread
    to_loop: Spread | None
    envactors_to_subject: Spread | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """Medians for the summary in words.

    Attributes:
        step_seconds: Duration of a step in the loop.
        default: Ratio of the envactors default to the loop.
        packed: The same ratio with several envs per process; None if it was not measured.
        envs_per_actor: Envs per process of ``packed``.
        rollout: Ratio of rollouts to the loop; None if it was not measured.
        asynchronous: Ratio of `recv` with half of the envs to the default; None if it was not measured.
        others: Ratio of the default to each other subject but the loop, by title.
        cores: Number of cores that this process may use.
        load: Load average over the minute before the measurement.
    """

    step_seconds: float
    default: float
    packed: float | None
    envs_per_actor: int
    rollout: float | None
    asynchronous: float | None
    others: Mapping[str, float]
    cores: int
    load: float


def in_words(finding: Finding) -> list[str]:
    """Return the meaning of the figures for this env in a few sentences."""
    duration = _duration(finding.step_seconds)
    sentences = [f"A step of this env takes about {duration} in the loop; {_whether_processes_pay(finding)}"]
    if finding.rollout is not None and finding.rollout > 1 + _TOLERANCE:
        sentences.append(f"With the policy in the workers (rollout) it is {_times(finding.rollout)} the loop.")
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
    together = f"{finding.envs_per_actor} envs per process"
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
    """Format a ratio with at least two significant digits."""
    return f"{ratio:.0f}" if ratio >= 9.995 else f"{ratio:.2f}" if ratio >= 0.0995 else f"{ratio:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if 0.995 <= ratio < 9.95 else f"{ratio_text(ratio)} times"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds < 10e-6 else f"{seconds * 1e6:.0f} us"
