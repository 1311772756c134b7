"""Starting steps and resets: through shared memory if there is some, otherwise in frames."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from envactors.actor.signal_deferral import defer_signals
from envactors.arrays.specs import Spec, split_batch
from envactors.errors import SpaceMismatchError
from envactors.vector.env_state import EnvState, check_steppable
from envactors.vector.pending import IDLE, IN_FLIGHT, SUBMITTED, Pending
from envactors.vector.prepared import PreparedStep
from envactors.vector.shm_step import SharedMemoryStepper
from envactors.vector.transitions import EnvFuture, EnvRequest, Transitions


class Starter:
    """Starts steps and resets of envs that are idle.

    Args:
        envs: All envs.
        pending: Where their results are.
        transitions: Asks envs in frames.
        stepper: Steps through shared memory; None without any.
        action_spec: One env's action; None if actions are not checked.
        inline: Whether the envs run in the thread that starts them.
    """

    def __init__(
        self,
        envs: Sequence[EnvState],
        pending: Pending,
        transitions: Transitions,
        stepper: SharedMemoryStepper | None,
        action_spec: Spec | None,
        *,
        inline: bool,
    ) -> None:
        self._envs = envs
        self._pending = pending
        self._transitions = transitions
        self._stepper = stepper
        self._action_spec = action_spec
        self._inline = inline
        # In line the envs run in here, and Ctrl-C shall reach them.
        self._deferral = contextlib.nullcontext() if inline else defer_signals

    def start(self, env_ids: list[int], actions: Any, *, stream: bool) -> PreparedStep | None:
        """Start steps; return what was started through shared memory, None if nothing was."""
        if self._stepper is None:
            self.start_in_frames(env_ids, actions, stream=stream)
            return None
        with defer_signals:
            started = self._stepper.start(env_ids, actions, stream=stream)
        if self._inline:
            self._stepper.run_inline()
        return started

    def start_in_frames(
        self,
        env_ids: list[int],
        actions: Any,
        *,
        stream: bool,
        futures: Sequence[EnvFuture] | None = None,
        check_actions: bool = True,
    ) -> None:
        """Start steps in frames; their results go to futures, if there are any, and otherwise to `recv`."""
        self._pending.check_idle(env_ids)
        check_steppable(self._envs[env_id] for env_id in env_ids)
        if check_actions:
            actions = split_batch(self._action_spec, actions, len(env_ids), "actions")
        elif len(actions) != len(env_ids):
            raise SpaceMismatchError(f"{len(actions)} actions for {len(env_ids)} envs: expected one per env")
        owners: Sequence[EnvFuture | None] = futures or [None] * len(env_ids)
        arguments = zip(env_ids, actions, owners, strict=True)
        with self._deferral:
            self._submit([self._transitions.request_step(*each) for each in arguments], stream=stream)

    def start_reset(
        self,
        env_ids: list[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        futures: Sequence[EnvFuture] | None = None,
    ) -> None:
        """Start resets; their results go to futures, if there are any, and otherwise to `recv`."""
        self._pending.check_idle(env_ids)
        owners: Sequence[EnvFuture | None] = futures or [None] * len(env_ids)
        arguments = zip(env_ids, seeds, options, owners, strict=True)
        with self._deferral:
            self._submit([self._transitions.request_reset(*each) for each in arguments], stream=True)

    def _submit(self, requests: Sequence[EnvRequest], *, stream: bool) -> None:
        """Send requests, and note that their envs are in flight."""
        for request in requests:
            self._pending.states[request.index] = IN_FLIGHT if request.future is None else SUBMITTED
        try:
            self._transitions.submit(requests, stream=stream)
        except BaseException:
            # What was queued comes all the same: taken for the result of the next request, it would be the wrong one.
            self._pending.mark([request.index for request in requests if request.call_id == 0], IDLE)
            raise
