"""Faults of the demo: their plan, and their injection while envs play."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

import envactors as ea
from envactors.testing import FaultyEnv

STEP_DEADLINE = 1.0
SLOW_RESET_SECONDS = 3.0
# Generous, since a call that exceeds one of these is an unplanned fault; a loaded machine must not cause it.
RESET_DEADLINE = CALL_DEADLINE = 10.0

# Faults are spread over the first generations, early in each: a generation ends with its slowest episode.
_GENERATIONS = 4
# A node is lost after so many other faults.
_FAULTS_BEFORE_NODE = 3
# Latest step of a fault; an episode of the worst policy lasts longer.
_LAST_STEP = 6


class FaultKind(enum.Enum):
    """Kinds of fault."""

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
        step: Step of the episode in which it happens, from 1; 0 is the reset.
    """

    kind: FaultKind
    step: int


FaultPlan = Mapping[int, Mapping[int, Fault]]
"""Faults by generation, and in it by position of the episode."""


def plan_faults(rng: np.random.Generator, generations: int, episodes: int) -> FaultPlan:
    """Return a plan of faults, at least one of each kind, over the first generations.

    Args:
        rng: Draws the positions.
        generations: Largest number of generations.
        episodes: Smallest number of episodes per generation.
    """
    plan: dict[int, dict[int, Fault]] = collections.defaultdict(dict)
    episodes_hit = rng.permutation(max(episodes // 2, len(_DEALT)))
    for turn, chosen in enumerate(rng.permutation(len(_DEALT)).tolist()):
        kind = _DEALT[chosen]
        step = 0 if kind is FaultKind.SLOW_RESET else int(rng.integers(1, _LAST_STEP + 1))
        plan[1 + turn % min(_GENERATIONS, generations)][int(episodes_hit[turn])] = Fault(kind, step)
    return plan


class FragileEnv(FaultyEnv):
    """Env that fails on command and whose next reset can be slowed down."""

    _reset_seconds = 0.0

    def slow_reset(self, seconds: float) -> None:
        """Make the next reset take ``seconds`` longer."""
        self._reset_seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        """Reset the wrapped env after the delay, if any."""
        seconds, self._reset_seconds = self._reset_seconds, 0.0
        time.sleep(seconds)
        return super().reset(**kwargs)


class Injector:
    """Injects faults into the envs of a vector env, in the thread that uses it.

    Args:
        envs: Vector env of `FragileEnv`.
        lose_node: Ends a node while envs play on it; None without nodes.

    Attributes:
        nodes_lost: Number of nodes that were lost.
    """

    def __init__(self, envs: ea.VectorEnv, lose_node: Callable[[], None] | None = None) -> None:
        self.nodes_lost = 0
        self._envs = envs
        self._lose_node = lose_node
        self._injections: list[tuple[FaultKind, Future[Any]]] = []

    def inject(self, fault: Fault, env_id: int) -> bool:
        """Inject a fault. Call it right before the affected reset or step is requested.

        Returns:
            False if that is not possible now.
        """
        env = self._envs[env_id]
        # Do not wait for the answers: the env may be about to be renewed, and it runs its calls in order.
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
        self._injections.append((fault.kind, order))
        if self._lose_node is not None and len(self._injections) == _FAULTS_BEFORE_NODE:
            self._lose_node()
            self.nodes_lost += 1
        return True

    def injected(self) -> dict[str, int]:
        """Return the number of injected faults by name of the kind."""
        kinds = [kind for kind, order in self._injections if order.done() and order.exception() is None]
        return {kind.value: kinds.count(kind) for kind in FaultKind}


def short(failure: BaseException) -> str:
    """Return a short description of a failure."""
    if isinstance(failure, ea.ActorTimeoutError):
        return f"{failure.method} over {failure.timeout:g} s"
    if isinstance(failure, ea.NodeLostError):
        return f"{failure.node} lost"
    if isinstance(failure, ea.ActorDiedError) and failure.__cause__ is not None:
        return type(failure.__cause__).__name__
    if isinstance(failure, ea.ActorDiedError) and failure.signal is not None:
        with contextlib.suppress(ValueError):
            return signal.Signals(failure.signal).name
    return type(failure).__name__
