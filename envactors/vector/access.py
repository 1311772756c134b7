"""Access to a vector for drop-ins, beyond its public methods.

Drop-ins translate names and types. Whatever else they need of a `VectorEnv` is here, so that none of them uses its
private attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.handle import call_or_get
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import IDLE, Autoreset
from envactors.envs.core import EnvFuture
from envactors.envs.results import Batch, StepResults
from envactors.mailbox.control_page import ASLEEP
from envactors.options import deadline_after
from envactors.vector.asking import Asker
from envactors.vector.facade import VectorEnv


class VectorAccess:
    """Starts requests and collects their results separately, with fewer checks than the public methods.

    Args:
        envs: The vector.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self._envs = envs

    @property
    def autoreset(self) -> Autoreset:
        """What happens at the end of an episode."""
        return self._envs._core.slots.autoreset

    def resets_next(self) -> npt.NDArray[np.bool_]:
        """Return whether the next step of each env resets it, by autoreset; bool, shape (n,)."""
        ended: npt.NDArray[np.bool_] = self._envs._core.slots.ended.copy()
        return ended

    def busy(self) -> list[int]:
        """Return the envs whose results have not been delivered.

        Raises:
            ActorClosedError: The vector is closed, or belongs to another process.
        """
        self._envs._check_open()
        return [env_id for env_id, state in enumerate(self._envs._core.slots.states) if state != IDLE]

    def let_envs_judge(self) -> None:
        """Allow steps of envs that were never reset or whose episode is over, and leave it to the envs to refuse them.

        For drop-ins of vector envs that do not check this. An env that has crashed still needs a reset.
        """
        slots = self._envs._core.slots
        for slot in slots.of:
            slot.needs_reset = False
            slot.strict = False
            slots.note_usual(slot.index)

    def start_reset(
        self, env_ids: list[int], seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]
    ) -> None:
        """Start resets, whose results `gather` delivers."""
        self._asker().start_resets(env_ids, seeds, options)

    def submit_reset(self, env_id: int, seed: int | None, options: dict[str, Any] | None) -> EnvFuture:
        """Start a reset and return the future of its result."""
        future = self._envs._core.make_future(self._envs._handles[env_id], env_id)
        self._asker().start_resets([env_id], [seed], [options], [future])
        return future

    def start_steps(self, env_ids: list[int], actions: Any) -> None:
        """Start steps, whose results `gather` delivers."""
        self._envs._start(env_ids, actions, stream=False)

    def start_step(self, actions: Any) -> None:
        """Start a step of all envs, whose results `finish_step` delivers."""
        self._envs._start(self._envs._all_ids, actions, stream=False)

    def finish_step(self, timeout: float | None = None) -> StepResults:
        """Wait for a step of all envs and return its results as `VectorEnv.step` does.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Raises:
            NothingPendingError: No step was started, or another thread has taken its results.
            VectorTimeoutError: The timeout passed; nothing is lost.
            VectorStepError: Some envs failed.
        """
        return self._envs._finish_step(timeout)

    def start_unchecked_steps(self, env_ids: list[int], actions: Sequence[Any]) -> None:
        """Start steps with one unchecked and unconverted action per env. `gather` delivers their results."""
        asker = self._asker()
        with defer_signals:
            asker.start_steps(env_ids, actions, stream=True, wait=ASLEEP)

    def start_calls(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ActorFuture[Any]]:
        """Start to call a method of each env, or to read an attribute that is not a method.

        Returns:
            One future per env.
        """
        return [call_or_get(handle, name, args, kwargs) for handle in self._envs._handles]

    def _asker(self) -> Asker:
        asker = self._envs._asker
        self._envs._check_open()
        return asker

    def gather(self, env_ids: list[int], timeout: float | None, what: str) -> Batch:
        """Wait for results and deliver them.

        Args:
            env_ids: Ids of the envs.
            timeout: Longest time to wait, in seconds; None for no limit.
            what: Name of the user's call, for errors.

        Raises:
            VectorTimeoutError: The timeout passed; nothing is lost.
            VectorStepError: Some envs failed.
        """
        return self._envs._collector.gather(env_ids, timeout, deadline_after(timeout, what), what)
