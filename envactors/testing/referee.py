"""Who says whether a storm's results are those that were asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from envactors.arrays.specs import Spec, conform, spec_of_value
from envactors.testing.rehearsal import Request, Result, Script, same
from envactors.testing.sabotage import LargeEcho, head_of
from envactors.testing.tally import Tally
from envactors.testing.track import Delivered, Track
from envactors.worker.host import renewed_seed


class Limits(NamedTuple):
    """How long things may take, in seconds.

    Attributes:
        deadline: A step or reset.
        stall: A result.
        start: On top of that where a process has to start.
    """

    deadline: float
    stall: float
    start: float


class Referee:
    """Compares results with what is expected, and counts what is wrong.

    Args:
        envs: Whose results they are.
        script: What is expected.
        tally: Where everything is counted.
        limits: How long results may take.
    """

    def __init__(self, envs: ea.VectorEnv, script: Script, tally: Tally, limits: Limits) -> None:
        self._envs = envs
        self._script = script
        self._tally = tally
        self._limits = limits

    def admit(self, results: Iterable[Delivered]) -> list[Delivered]:
        """Looks who has asked for results and how long they took; gives those that were asked for."""
        admitted = []
        for result in results:
            track = result.track
            self._tally.delivered += 1
            if track.asked is None:
                self._tally.duplicated += 1
                self._tally.note("a result that nobody asked for", track.env_id)
                continue
            self._tally.progress = time.monotonic()
            self._time(track, self._tally.progress - track.asked)
            track.asked = None
            admitted.append(result)
        return admitted

    def judge(self, results: Iterable[Delivered]) -> None:
        """Compares results that were asked for with what is expected."""
        requests, whole = [], []
        for result in results:
            track = result.track
            if "failure" in result.info:
                self._tally.failures += 1
                if self._tally.replays:
                    self._tally.not_replayed += 1
                    self._tally.note(f"not replayed after {result.info['failure']!r}", track.env_id)
                if result.seed is None:
                    self._take_failure(result)
                    continue
            request = self._request(result)
            if self._script.play is not None and track.is_known:
                requests.append(request)
                whole.append(result)
            track.steps += 1
            track.resets = result.terminated or result.truncated
            track.renewed = False
            track.last = result.obs
        if requests:
            assert self._script.play is not None, "nothing was to be compared"
            for result, request, expected in zip(whole, requests, self._script.play(requests), strict=True):
                self._compare(result, request, expected)

    def _time(self, track: Track, stall: float) -> None:
        self._tally.longest_stall = max(self._tally.longest_stall, stall)
        if stall <= self._limits.stall:
            return
        started = self._tally.replays or track.renewed or track.handle.incarnation != track.asked_of
        if not started or stall > self._limits.stall + self._limits.start:
            self._tally.stalls += 1
            self._tally.note(f"its result took {stall:.2f} s", track.env_id)

    def _request(self, result: Delivered) -> Request:
        """What an env was asked, if this result is its answer."""
        track, incarnation, seed = result.track, result.incarnation, result.seed
        if track.resets and track.renewed and incarnation is not None:
            seed = renewed_seed(track.root_seed, incarnation)
        announced = track.resets or self._tally.replays or None in (incarnation, track.incarnation)
        if not announced and incarnation != track.incarnation:
            self._count_mixed_up(track, f"incarnation {incarnation} came unannounced after {track.incarnation}")
        if incarnation is not None or track.resets:
            track.incarnation = incarnation
        return Request(track.env_id, track.resets, seed if track.resets else track.action)

    def _take_failure(self, result: Delivered) -> None:
        """Takes in that an episode was broken off: the last observation once more, and a reset comes next."""
        track = result.track
        if track.is_known and not (
            same(result.obs, track.last) and result.reward == 0.0 and not result.terminated and result.truncated
        ):
            self._count_mixed_up(track, "a failure came without the last observation, reward 0 and truncated")
        track.incarnation = result.incarnation
        track.resets = track.renewed = True

    def _is_as(self, result: Delivered, expected: Result) -> bool:
        reward = conform(self._envs.reward_spec, expected.reward, "the rehearsed reward")
        return (
            same(result.obs, self._observation(result, expected))
            and same(np.asarray(result.reward), np.asarray(reward))
            and (result.terminated, result.truncated) == (expected.terminated, expected.truncated)
        )

    def _observation(self, result: Delivered, expected: Result) -> Any:
        spec: Spec = self._envs.observation_spec or spec_of_value(result.obs)
        return conform(spec, expected.obs, "the rehearsed observation")

    def _has_another_seed(self, result: Delivered) -> bool:
        """Whether a reset by hand, which was lost more than once, came with the seed of a process, not its own."""
        track, play = result.track, self._script.play
        if result.seed is None or "failure" not in result.info or play is None:
            return False
        for incarnation in range(track.asked_of + 2, track.handle.incarnation + 1):
            (expected,) = play([Request(track.env_id, True, renewed_seed(result.seed, incarnation))])
            if self._is_as(result, expected):
                return True
        return False

    def _compare(self, result: Delivered, request: Request, expected: Result) -> None:
        track = result.track
        if self._is_as(result, expected) or self._has_another_seed(result):
            return
        obs = self._observation(result, expected)
        track.is_known = False  # nor are those after it, until the next reset by hand
        if isinstance(obs, np.ndarray) and obs.shape == (LargeEcho.SIZE,):
            self._classify(result, head_of(result.obs), obs[:4].tolist())
        else:
            self._count_mixed_up(
                track, f"asked {request}, got {result[1:5]} of incarnation {result.incarnation}, expected {expected}"
            )

    def _classify(self, result: Delivered, head: list[int] | None, expected: list[int]) -> None:
        """Says what is wrong with a result of an echo env."""
        tally, env_id = self._tally, result.track.env_id
        if head is None:
            tally.torn += 1
        elif head[0] != env_id:
            tally.mixed_up += 1
        elif head[1] > expected[1]:
            tally.duplicated += 1
        elif head[1] < expected[1]:
            tally.lost += 1
        else:
            tally.mixed_up += 1
        shown = result.obs[:4].tolist() if head is None else head
        tally.note(
            f"[env, steps, action, checksum] is {shown}{' and torn' if head is None else ''}, expected {expected}; "
            f"reward {result.reward}, terminated {result.terminated}, truncated {result.truncated}, incarnation "
            f"{result.incarnation}",
            env_id,
        )

    def _count_mixed_up(self, track: Track, what: str) -> None:
        self._tally.mixed_up += 1
        self._tally.note(what, track.env_id)
