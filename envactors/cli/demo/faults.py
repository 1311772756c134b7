"""Faults of the demo: their plan, and their injection while envs play."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import envactors as ea
from envactors.testing import FaultyEnv

STEP_DEADLINE = 1.0
_SLOW_RESET_SECONDS = 3.0
# Generous, since a busy machine must not cause faults that were not planned.
RESET_DEADLINE = CALL_DEADLINE = 10.0

# Faults are spread over the first generations, early in each: a generation ends with its slowest episode.
_GENERATIONS = 4
# A node is lost after this number of other faults.
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
# What `FaultyEnv` calls them.
_ARMED = {FaultKind.HANG: "hang_in_c", FaultKind.EXCEPTION: "raise"}


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
    """Env that fails on command, but not again when the command is replayed in a new process."""

    _reset_seconds = 0.0

    def arm_once(self, fault: str, token: str) -> None:
        """Arm a fault of `FaultyEnv`, unless the file ``token`` is gone, which then is removed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(token)  # noqa: PTH108 # the worker need not import pathlib
            self.arm(fault)

    def slow_reset(self, seconds: float) -> None:
        """Make the next reset take ``seconds`` longer."""
        self._reset_seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        """Reset the wrapped env after the delay, if any."""
        seconds = self._reset_seconds
        self._reset_seconds = 0.0
        time.sleep(seconds)
        return super().reset(**kwargs)


class Injector:
    """Injects faults into the envs of a vector env, in the thread that uses it.

    Args:
        envs: Vector env of `FragileEnv`.
        lose_node: Ends a node while envs play on it; None without nodes.

    Attributes:
        injected: Number of injected faults by name of the kind.
        nodes_lost: Number of nodes that were lost.
    """

    def __init__(self, envs: ea.VectorEnv, lose_node: Callable[[], None] | None = None) -> None:
        self.injected: dict[str, int] = {kind.value: 0 for kind in FaultKind}
        self.nodes_lost: int = 0
        self._envs = envs
        self._lose_node = lose_node

    def inject(self, fault: Fault, env_id: int) -> bool:
        """Inject a fault. Call it right before the affected reset or step is requested.

        Returns:
            False if that is not possible now.
        """
        env = self._envs[env_id]
        # The answers are not waited for: an env runs its calls in order.
        if fault.kind is FaultKind.SLOW_RESET:
            env.slow_reset(_SLOW_RESET_SECONDS)
        elif fault.kind is FaultKind.SIGKILL:
            pid = env.pid
            if pid is None:
                return False
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        else:
            descriptor, token = tempfile.mkstemp(prefix="envactors-demo-")
            os.close(descriptor)
            env.arm_once(_ARMED[fault.kind], token)
        self.injected[fault.kind.value] += 1
        if self._lose_node is not None and sum(self.injected.values()) == _FAULTS_BEFORE_NODE:
            self._lose_node()
            self.nodes_lost += 1
        return True
