"""Conclusions of ``envactors check`` from its measurements: findings and settings. Nothing here touches an env."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from envactors.cli.check.examiner import Looks, Trajectory, median
from envactors.cli.units import count, duration, size

# A reset is slow if it takes longer than this, in seconds, and longer than this number of steps.
_SLOW_RESET, _SLOW_RESET_IN_STEPS = 0.2, 10
# The share of the looks that come before a leak is looked for, since caches fill first.
_WARM_UP = 1 / 3
# A leak: the process holds this much more at the end, and it grew in this share of the intervals.
_LEAST_LEAK, _LEAST_LEAK_OF_BYTES = 4, 1 << 20
_RISING = 0.7
# Below this time a step costs less than its way to another process, so that several envs should share one, in seconds.
_LIGHT_STEP = 1e-3
# Deadlines are this much longer than what was measured, and at least so long, in seconds.
_MARGIN = 20
_LEAST_DEADLINES = {"start": 60.0, "reset": 10.0, "step": 1.0}
# A process is replaced after leaking this many descriptors, threads, or processes, or this many bytes.
_MOST_LEAKED, _MOST_LEAKED_BYTES = 200, 500_000_000


@dataclasses.dataclass(frozen=True)
class Finding:
    """A defect of an env.

    Attributes:
        kind: Name of the defect, in a word or two.
        message: Description in a sentence.
        remedy: How to fix it, in a sentence.
    """

    kind: str
    message: str
    remedy: str


def judge_pickles(refused: dict[str, str]) -> list[Finding]:
    """Return what follows from the reasons why the factory or the env cannot be pickled."""
    remedies = {
        "factory": "Give the factory's object a __reduce__, or pass the name 'module:callable' to envactors.",
        "env": "Snapshots of this env need SnapshotPolicy(get, set), or a __getstate__ of the env's "
        "own that leaves this out. Everything else works.",
    }
    return [
        Finding("unpicklable state", f"The {what} cannot be pickled: {why}.", remedies[what])
        for what, why in refused.items()
    ]


def judge_results(played: Trajectory) -> list[Finding]:
    """Return what is wrong with observations and infos."""
    found = []
    if played.outside is not None:
        found.append(
            Finding(
                "observation outside its space",
                f"An observation is outside observation_space: {played.outside}.",
                "Correct the space or the observation: learners allocate memory and networks by the space.",
            )
        )
    if played.unpicklable is not None:
        found.append(
            Finding(
                "unpicklable info",
                f"An info cannot be pickled: {played.unpicklable}.",
                "Leave this value out of the info: it cannot leave the worker.",
            )
        )
    return found


def judge_repeat(first: Trajectory, again: Trajectory, *, is_fresh: bool) -> list[Finding]:
    """Return how two trajectories with one seed differ.

    Args:
        first: The first one.
        again: The second one.
        is_fresh: Whether the second one is that of a new process.
    """
    pairs = enumerate(zip(first.events, again.events, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), None)
    if at is None:
        return []
    where = "in a new process" if is_fresh else "in the same process"
    what = "The first reset" if at == 0 else f"Step {at}"
    return [
        Finding(
            "not replayable" if is_fresh else "nondeterministic",
            f"{what} after reset(seed=0) gives another result when it is repeated {where} with the same actions.",
            "Draw random numbers from self.np_random only, and let reset(seed=) set all state. Until then "
            "on_failure='replay' falls back to 'renew'.",
        )
    ]


def judge_resets(reset_seconds: list[float], step_seconds: list[float]) -> list[Finding]:
    """Return whether resets are slow."""
    reset = median(reset_seconds)
    step = median(step_seconds)
    if reset < max(_SLOW_RESET, _SLOW_RESET_IN_STEPS * step):
        return []
    return [
        Finding(
            "slow reset",
            f"A reset takes {duration(reset)} (median of {len(reset_seconds)}), and a step {duration(step)}.",
            "Use send and recv, so that other envs do not wait for a reset, or make the reset faster.",
        )
    ]


def judge_size(memory: int, limit: int) -> Finding:
    """Return the finding for an env that was killed because of its memory, given in bytes."""
    return Finding(
        "leak",
        f"The env was killed, since it held {size(memory)} of memory: more than {size(limit)}.",
        "Fix the leak; if the env needs this much memory, allow it with --max-rss.",
    )


def judge_looks(looks: Looks) -> tuple[list[Finding], dict[str, float]]:
    """Return the leaks, and how much of each resource is lost per step."""
    found = []
    leaks = {}
    for name, held in looks.held.items():
        settled = held[math.floor(len(held) * _WARM_UP) :]
        growth = settled[-1] - settled[0]
        intervals = len(settled) - 1
        rising = sum(after > before for before, after in itertools.pairwise(settled))
        if growth < (_LEAST_LEAK_OF_BYTES if "bytes" in name else _LEAST_LEAK) or rising < _RISING * intervals:
            continue
        episodes = intervals * looks.episodes
        leaks[name] = growth / (intervals * looks.steps)
        found.append(
            Finding(
                "leak",
                f"The process holds {growth:,} more {name} after {count(episodes, 'episode')}.",
                "Until the leak is fixed, let envactors replace the process in time: see recycle below.",
            )
        )
    return found, leaks


def suggest(
    times: dict[str, float], findings: list[Finding], leaks: dict[str, float], memory: int
) -> tuple[dict[str, Any], str]:
    """Return settings for this env, and the line to paste.

    Args:
        times: The longest durations of ``start``, ``reset``, and ``step``, and the median ``step_median``, in seconds.
        findings: What was found.
        leaks: How much of each resource is lost per step.
        memory: The memory of a process that has leaked nothing yet, in bytes.
    """
    settings: dict[str, Any] = {}
    recycle: dict[str, int] = {}
    for name, per_step in leaks.items():
        if name == "bytes of memory":
            recycle["max_memory"] = _round_up(memory + _MOST_LEAKED_BYTES)
        else:
            most = _MOST_LEAKED_BYTES if "bytes" in name else _MOST_LEAKED
            recycle["max_steps"] = min(recycle.get("max_steps", 1 << 60), max(1, int(most / per_step)))
    # A process is recycled between two episodes of its one env.
    if times["step_median"] < _LIGHT_STEP and not recycle:
        settings["envs_per_actor"] = "auto"
    settings["deadlines"] = {
        name: float(max(least, _round_up(_MARGIN * times[name]))) for name, least in _LEAST_DEADLINES.items()
    }
    is_replayable = not any(one.kind in ("nondeterministic", "not replayable") for one in findings)
    settings["on_failure"] = "replay" if is_replayable else "renew"
    if recycle:
        settings["recycle"] = recycle
    shown = {name: repr(value) for name, value in settings.items()}
    for name, of in (("deadlines", "Deadlines"), ("recycle", "RecyclePolicy")):
        if name in settings:
            shown[name] = f"ea.{of}({', '.join(f'{key}={value}' for key, value in settings[name].items())})"
    arguments = ", ".join(["[make_env] * num_envs", *(f"{name}={value}" for name, value in shown.items())])
    return settings, f"envs = ea.VectorEnv({arguments})"


def _round_up(value: float) -> int:
    """Return the smallest number with one digit and zeros that is not less."""
    unit = 10 ** max(0, math.floor(math.log10(value))) if value >= 1 else 1
    return math.ceil(value / unit) * unit
