"""Faults that are injected while envs play: which, when, and by whom."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

import envactors as ea
from envactors.testing import FaultyEnv

STEP_DEADLINE = 1.0
SLOW_RESET_SECONDS = 3.0
# A call that runs into one of these is a fault that nobody planned: a loaded machine must not cause it.
RESET_DEADLINE = CALL_DEADLINE = 10.0

# A generation is not over before the last of its episodes is: what takes time is begun early, others play meanwhile.
_GENERATIONS = 4
# An episode of the worst policy lasts longer than this.
_LAST_STEP = 6


class FaultKind(enum.Enum):
    """What can be done to an env."""

    SIGKILL = "SIGKILL"
    HANG = "hang in C"
    EXCEPTION = "exception"
    SLOW_RESET = "slow reset"


_DEALT = [*FaultKind, FaultKind.SIGKILL, FaultKind.EXCEPTION]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault in one episode.

    Attributes:
        kind: What happens.
        step: The step of the episode in which it does, counted from 1; 0 is the reset.
    """

    kind: FaultKind
    step: int


Plan = Mapping[int, Mapping[int, Fault]]
"""For a generation's number, and in it for an episode's position: the fault."""


def plan_faults(rng: np.random.Generator, generations: int, episodes: int) -> Plan:
    """Spreads some faults, at least one of each kind, over the first generations.

    Args:
        rng: Decides where.
        generations: How many generations there may be.
        episodes: How many episodes each of them has at least.
    """
    plan: dict[int, dict[int, Fault]] = collections.defaultdict(dict)
    episodes_hit = rng.permutation(max(episodes // 2, len(_DEALT)))
    for turn, chosen in enumerate(rng.permutation(len(_DEALT)).tolist()):
        kind = _DEALT[chosen]
        step = 0 if kind is FaultKind.SLOW_RESET else int(rng.integers(1, _LAST_STEP + 1))
        plan[1 + turn % min(_GENERATIONS, generations)][int(episodes_hit[turn])] = Fault(kind, step)
    return plan


class FragileEnv(FaultyEnv):
    """An env that fails on command, and that can be told to take its time."""

    _reset_seconds = 0.0

    def slow_reset(self, seconds: float) -> None:
        """Makes the next reset last some seconds longer."""
        self._reset_seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        """Resets the wrapped env, sooner or later."""
        seconds, self._reset_seconds = self._reset_seconds, 0.0
        time.sleep(seconds)
        return super().reset(**kwargs)


class Injector:
    """Injects faults into the envs of a vector env, from the thread that uses it.

    Args:
        envs: The envs, made of `FragileEnv`.
    """

    def __init__(self, envs: ea.VectorEnv) -> None:
        self._envs = envs
        self._orders: list[tuple[FaultKind, Future[Any]]] = []

    def inject(self, fault: Fault, env_id: int) -> bool:
        """Injects a fault, just before the reset or step that is to suffer from it is asked for.

        Returns:
            False where that is impossible now.
        """
        env = self._envs[env_id]
        # Nobody waits for the answers: the env might be about to get a new process, and runs its calls in order.
        if fault.kind is FaultKind.SLOW_RESET:
            order: Future[Any] = env.slow_reset(SLOW_RESET_SECONDS)
        elif fault.kind is FaultKind.HANG:
            order = env.arm("hang_in_c")
        elif fault.kind is FaultKind.EXCEPTION:
            order = env.arm("raise")
        else:
            pid = env.pid
            if pid is None:
                return False
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
            order = ea.Future()
            order.set_result(None)
        self._orders.append((fault.kind, order))
        return True

    def injected(self) -> dict[str, int]:
        """How many faults of each kind have been injected, the kinds by their names."""
        kinds = [kind for kind, order in self._orders if order.done() and order.exception() is None]
        return {kind.value: kinds.count(kind) for kind in FaultKind}


def short(failure: BaseException) -> str:
    """A failure in a few words."""
    if isinstance(failure, ea.ActorTimeoutError):
        return f"{failure.method} over {failure.timeout:g} s"
    if isinstance(failure, ea.ActorDiedError) and failure.__cause__ is not None:
        return type(failure.__cause__).__name__
    if isinstance(failure, ea.ActorDiedError) and failure.signal is not None:
        with contextlib.suppress(ValueError):
            return signal.Signals(failure.signal).name
    return type(failure).__name__
