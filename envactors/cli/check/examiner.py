"""The half of ``envactors check`` that runs in the worker: it makes the env, plays with it, and measures."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

from envactors.cli.source import EnvSource
from envactors.errors import SpaceMismatchError
from envactors.mailbox.pickling import dumps, safe_str
from envactors.mailbox.specs import ArraySpec, Spec, conform, flatten, leaves, spec_of_space
from envactors.system.descriptors import count_descriptors
from envactors.system.processes import count_threads, resident_memory
from envactors.tuning.measure import sample_actions
from envactors.worker.host import checksum, wrong_result

# The most steps of a trajectory, and of an episode in the search for leaks.
_MOST_STEPS, _MOST_STEPS_OF_EPISODE = 1000, 100
# The most durations of resets that are kept; the last of them is then the longest of all others.
_MOST_RESETS = 1000
# Number of times that resources are measured.
_LOOKS = 12
# Number of infos at the beginning of a trajectory that are pickled.
_INFOS_PICKLED = 20


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Results of an env from a seeded reset on.

    Attributes:
        events: Of the reset and each step: what it was (``"reset"`` or ``"step"``) and a checksum of its results.
        step_seconds: Durations of the steps.
        reset_seconds: Durations of the resets.
        outside: Why an observation is not in the env's space; None if all are.
        unpicklable: Why an info cannot be pickled; None if all can.
    """

    events: list[tuple[str, int]]
    step_seconds: list[float]
    reset_seconds: list[float]
    outside: str | None
    unpicklable: str | None


@dataclasses.dataclass(frozen=True)
class Looks:
    """Resources that the process held, measured after equal numbers of episodes.

    Attributes:
        episodes: Number of episodes between two looks.
        steps: Number of steps between two looks, on average.
        held: By name of the resource, the amount at each look.
        reset_seconds: Durations of resets, the longest one included.
    """

    episodes: int
    steps: float
    held: dict[str, list[int]]
    reset_seconds: list[float]


class Examiner:
    """Makes an env and plays with it.

    Args:
        source: The env.
    """

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        begun = time.perf_counter()
        self._env: Any = source()
        self._made_in = time.perf_counter() - begun
        space = getattr(self._env, "observation_space", None)
        self._space = space
        self._spec: Spec | None = None if space is None else spec_of_space(space)

    def made_in(self) -> float:
        """Return how long it took to make the env, in seconds."""
        return self._made_in

    def refused_actions(self) -> str | None:
        """Return why no actions can be sampled; None if they can."""
        try:
            sample_actions(self._env, self._source.name, 1, 0)
        except ValueError as error:
            return str(error)
        return None

    def refused_pickles(self) -> dict[str, str]:
        """Return why the factory and the env cannot be pickled; empty if both can."""
        values = {"factory": self._source.load(), "env": self._env}
        found = {what: _why_unpicklable(value) for what, value in values.items()}
        return {what: why for what, why in found.items() if why is not None}

    def play(self, seed: int, steps: int | None, seconds: float) -> Trajectory:
        """Reset with a seed and step with actions sampled with the same seed; reset without one after each episode.

        Args:
            seed: The seed.
            steps: The number of steps and resets after the first reset; None for as many as fit into ``seconds``.
            seconds: The time for them, if ``steps`` is None.
        """
        trajectory = Trajectory([], [], [], None, None)
        end = time.perf_counter() + seconds
        most = _MOST_STEPS if steps is None else steps
        for count, (kind, duration, result) in enumerate(self._events(seed)):
            obs = result[0]
            info = result[-1]
            seconds_of = trajectory.reset_seconds if kind == "reset" else trajectory.step_seconds
            seconds_of.append(duration)
            trajectory.events.append((kind, checksum(obs, checksum(tuple(result[1:-1]), 0))))
            unpicklable = trajectory.unpicklable
            if unpicklable is None and count < _INFOS_PICKLED:
                unpicklable = _why_unsendable(info)
            outside = trajectory.outside or self._why_outside(obs)
            trajectory = dataclasses.replace(trajectory, outside=outside, unpicklable=unpicklable)
            if count >= most or (steps is None and time.perf_counter() >= end):
                break
        return trajectory

    def look(self, seconds: float) -> Looks:
        """Play episodes, and measure at equal intervals what the process holds.

        Args:
            seconds: About how long it may take; there is at least one episode between two looks.
        """
        held: dict[str, list[int]] = {}
        reset_seconds: list[float] = []
        episodes = 0
        steps = 0
        end = time.perf_counter() + seconds / _LOOKS
        while episodes == 0 or time.perf_counter() < end:
            steps += self._play_episode(reset_seconds)
            episodes += 1
        _note_resources(held)
        for _ in range(_LOOKS - 1):
            steps += sum(self._play_episode(reset_seconds) for _ in range(episodes))
            _note_resources(held)
        return Looks(episodes, steps / _LOOKS, held, reset_seconds)

    def close(self) -> None:
        """Close and finalize the env."""
        env, self._env = self._env, None
        if callable(close := getattr(env, "close", None)):
            close()

    def _events(self, seed: int) -> Iterator[tuple[str, float, Any]]:
        """Yield (``"reset"`` or ``"step"``, its duration, its results) forever."""
        space = self._env.action_space
        if hasattr(space, "seed"):
            space.seed(seed)
        arguments = {"seed": seed}
        while True:
            begun = time.perf_counter()
            result = self._env.reset(**arguments)
            if not isinstance(result, tuple) or len(result) != 2:
                raise wrong_result("reset", result, "(obs, info)")
            yield "reset", time.perf_counter() - begun, result
            arguments = {}
            has_ended = False
            while not has_ended:
                action = space.sample()
                begun = time.perf_counter()
                result = self._env.step(action)
                if not isinstance(result, tuple) or len(result) != 5:
                    raise wrong_result("step", result, "(obs, reward, terminated, truncated, info)")
                yield "step", time.perf_counter() - begun, result
                has_ended = bool(result[2] or result[3])

    def _play_episode(self, reset_seconds: list[float]) -> int:
        begun = time.perf_counter()
        self._env.reset()
        seconds = time.perf_counter() - begun
        if len(reset_seconds) < _MOST_RESETS:
            reset_seconds.append(seconds)
        else:  # a list that grows would count as a leak of the env
            reset_seconds[-1] = max(reset_seconds[-1], seconds)
        steps = 0
        has_ended = False
        while not has_ended and steps < _MOST_STEPS_OF_EPISODE:
            _, _, terminated, truncated, _ = self._env.step(self._env.action_space.sample())
            steps = steps + 1
            has_ended = terminated or truncated
        return steps

    def _why_outside(self, obs: Any) -> str | None:
        if self._spec is None:
            return None
        try:
            conform(self._spec, obs, "it")
        except SpaceMismatchError as error:
            return str(error)
        for spec, value in zip(leaves(self._spec), flatten(self._spec, obs), strict=True):
            if (why := _why_outside(spec, value)) is not None:
                return why
        contains = getattr(self._space, "contains", None)
        return "its space does not contain it" if contains is not None and not contains(obs) else None


def measure_children(pid: int) -> tuple[int, int]:
    """Return how many descendants a process has, and how much memory only they use, in bytes.

    Without psutil, which comes with the extra ``cli``, both are 0.
    """
    children, memory = [], 0
    with contextlib.suppress(ImportError):
        import psutil

        with contextlib.suppress(psutil.Error):
            children = psutil.Process(pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                memory += child.memory_full_info().uss
    return len(children), memory


def median(values: list[float]) -> float:
    """Return the median of some durations; 0 if there are none."""
    return statistics.median(values) if values else 0.0


def _why_outside(spec: ArraySpec, value: Any) -> str | None:
    if not spec.batchable:
        return None
    array = np.asarray(value)
    if isinstance(value, np.ndarray) and array.dtype != spec.dtype:
        return f"its dtype is {array.dtype}, and that of its space {spec.dtype}"
    if spec.low is None or spec.high is None:
        return None
    inside = (array >= spec.low) & (array <= spec.high)
    if np.all(inside):
        return None
    place = np.unravel_index(int(np.argmin(inside)), inside.shape)
    low, high = (np.broadcast_to(bound, inside.shape)[place] for bound in (spec.low, spec.high))
    at = f" at {[int(index) for index in place]}" if place else ""
    return f"{array[place]}{at} is not between {low} and {high}"


def _why_unpicklable(value: Any) -> str | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # raised by code of the value
        for name, part in getattr(value, "__dict__", {}).items():
            try:
                cloudpickle.dumps(part)
            except Exception as reason:
                return f"its attribute {name!r} cannot be pickled: {safe_str(reason)}"
        return safe_str(error)
    return None


def _why_unsendable(info: Any) -> str | None:
    try:
        dumps(info)
    except Exception as error:  # raised by code of the value
        return safe_str(error)
    return None


def _note_resources(held: dict[str, list[int]]) -> None:
    gc.collect()
    children, memory_of_children = measure_children(os.getpid())
    now = {
        "bytes of memory": resident_memory(os.getpid()),
        "bytes of memory in child processes": memory_of_children,
        "file descriptors": count_descriptors(),
        "threads": count_threads(),
        "child processes": children,
    }
    for name, amount in now.items():
        held.setdefault(name, []).append(amount)
