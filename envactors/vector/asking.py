"""Start steps and resets: check them, write actions into rows, and post or queue the envs at their actors."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.requests import Group, Request
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ASKED, IDLE, Op
from envactors.actor.supervisor import Supervisor
from envactors.envs.core import EnvFuture, VectorCore
from envactors.mailbox.control_page import ASLEEP
from envactors.mailbox.pickling import make_payload
from envactors.mailbox.specs import ArraySpec, Spec, flatten, split_batch


class Asker:
    """Starts steps and resets.

    Args:
        vector: The vector.

    Attributes:
        all_ids: Ids of all envs.
        only_action: Rows for actions, if an action is one array; else None.
        corked: Returns a context in which what is posted to other machines is held back, to be sent as one.
        posting: Time that posting streamed steps has taken since the collector last reset it, in seconds.
    """

    def __init__(self, vector: VectorCore) -> None:
        self._vector = vector
        self._slots = slots = vector.slots
        self.all_ids: list[int] = list(range(len(vector.supervisors)))
        self._all_by_actor: dict[Supervisor, list[int]] = {}
        self._all_by_actor = self.by_actor(self.all_ids)
        self._action_spec = action = slots.slab.layout.action
        self.only_action: npt.NDArray[Any] | None = slots.slab.actions[0] if isinstance(action, ArraySpec) else None
        config = vector.supervisors[0].config
        is_far = config.backend.is_far
        # C code where there is nothing to do, since every step calls it.
        self.corked: Callable[[], AbstractContextManager[object]] = (
            config.backend.corked if is_far else itertools.repeat(contextlib.nullcontext()).__next__
        )
        # With an in-process backend, envs run in the thread that starts them, where Ctrl-C has to reach them.
        nothing, is_inline = contextlib.nullcontext(), config.backend.inline
        self._deferral: Any = nothing if is_inline else defer_signals
        # What is posted runs later, and no handler may run while the lock is held.
        self._posting: Any = defer_signals if is_inline else nothing
        self.posting: float = 0.0

    def by_actor(self, env_ids: list[int]) -> dict[Supervisor, list[int]]:
        """Return the envs of each actor, in ascending order."""
        if env_ids is self.all_ids and self._all_by_actor:
            return self._all_by_actor
        groups: dict[Supervisor, list[int]] = {}
        for env_id in sorted(env_ids):
            groups.setdefault(self._vector.supervisors[env_id], []).append(env_id)
        return groups

    # Steps -----------------------------------------------------------------------------------------------

    def start_steps(
        self,
        env_ids: list[int],
        actions: Any,
        *,
        stream: bool,
        wait: int,
        futures: Sequence[EnvFuture] = (),
        checked: Spec | None = None,
    ) -> None:
        """Start a step of some envs. Called with signals deferred.

        Args:
            env_ids: Ids of the envs.
            actions: Actions as `VectorEnv.step` takes them.
            stream: Whether results are delivered one by one rather than all at once.
            wait: How workers wait for the next request, as `envactors.mailbox.control_page` says.
            futures: Futures that get the results; empty if `Pending` gets them.
            checked: Spec that actions are checked against; None to send them unchecked.

        Raises:
            AlreadyPendingError: An env has a result pending.
            VectorInputError: An env needs a reset first.
            SpaceMismatchError: The actions do not conform to the action spec.
        """
        slots = self._slots
        self._vector.pending.check_idle(env_ids)
        self._vector.check_steppable(env_ids)
        payloads = self.write_actions(env_ids, actions, checked)
        for position, env_id in enumerate(env_ids):
            future = futures[position] if futures else None
            if future is not None or payloads:
                slots.of[env_id].op = Op("step", future=future, payload=payloads[position] if payloads else None)
        self.post(env_ids, wait, stream=stream)

    def write_actions(self, env_ids: list[int], actions: Any, checked: Spec | None) -> list[Any]:
        """Write actions into the rows of envs.

        Returns:
            Actions that have no place in rows, as payloads; empty if they are in the rows.

        Raises:
            SpaceMismatchError: The actions do not conform to the spec that they are checked against.
        """
        only, spec, count = self.only_action, self._action_spec, len(env_ids)
        if spec is None or checked is None:
            values = split_batch(checked, actions, count, "actions")
            return [make_payload(value, pickles=self._slots.pickles) for value in values]
        if only is not None:
            fits = type(actions) is np.ndarray and actions.dtype == only.dtype
            fits = fits and actions.shape == (count, *only.shape[1:])
            only[env_ids] = actions if fits else split_batch(spec, actions, count, "actions")
            return []
        for env_id, value in zip(env_ids, split_batch(spec, actions, count, "actions"), strict=True):
            for array, leaf in zip(self._slots.slab.actions, flatten(spec, value), strict=True):
                array[env_id] = leaf
        return []

    # Resets ----------------------------------------------------------------------------------------------

    def start_resets(
        self,
        env_ids: list[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        futures: Sequence[EnvFuture] = (),
    ) -> None:
        """Start resets, whose results go to the futures, or to `recv` if there are none."""
        self._vector.pending.check_idle(env_ids)
        slots, pickles = self._slots, self._slots.pickles
        ops = []
        for position, (seed, each) in enumerate(zip(seeds, options, strict=True)):
            payload = None if each is None else make_payload(each, pickles=pickles)
            ops.append(Op("reset", True, futures[position] if futures else None, seed, payload))
        with self._deferral:
            for env_id, op in zip(env_ids, ops, strict=True):
                slot = slots.of[env_id]
                if op.seed is not None:
                    slot.seed_with(op.seed)
                slot.op = op
                slots.unusual.add(env_id)
            self.post(env_ids, ASLEEP, stream=True)

    # Both ------------------------------------------------------------------------------------------------

    def post(self, env_ids: list[int], wait: int, *, stream: bool) -> None:
        """Post envs, or queue them if their actor is not free; those of one actor are posted or queued together.

        Args:
            env_ids: Ids of the envs, with their actions in their rows.
            wait: How workers wait for the next request, as `envactors.mailbox.control_page` says.
            stream: Whether results are delivered one by one rather than all at once.
        """
        now = time.monotonic()
        with self.corked():
            for supervisor, envs in self.by_actor(env_ids).items():
                rows = supervisor.calls.rows
                with self._posting:
                    is_posted = rows is not None and rows.post_at_once(envs, now, wait, stream=stream)
                if not is_posted:
                    self.queue_envs(supervisor, envs)
        if stream:
            self.posting += time.monotonic() - now

    def queue_envs(self, supervisor: Supervisor, envs: list[int]) -> None:
        """Queue envs of an actor, to be posted once it is free."""
        core, slots = supervisor.core, self._slots
        with core.change, core.lock:
            if core.closing:
                for env_id in envs:
                    slots.make_idle(env_id)
                raise core.errors.closed(Request("step", envs[0]), core.incarnation)
            for env_id in envs:
                slots.states[env_id] = ASKED
            self._retire(supervisor, envs)
            supervisor.calls.queue(Group(list(envs)))

    def _retire(self, supervisor: Supervisor, envs: list[int]) -> None:
        """Replace the process if it is due before a reset, or its node is being drained. Called under the lock."""
        core, of, resetting = supervisor.core, self._slots.of, []
        for env_id in envs:
            op = of[env_id].op
            if self._slots.ended[env_id] or (op is not None and op.method == "reset"):
                resetting.append(env_id)
        is_leaving = core.process is not None and core.process.worker.is_leaving
        leaves = is_leaving and len(resetting) == len(supervisor.config.start.factories)
        if core.lives and (leaves or any(of[env_id].retiring for env_id in resetting)):
            supervisor.calls.queue_renewal()

    def settle_interrupted(self) -> None:
        """Queue the envs that an interrupted request has marked as asked; make the others idle again."""
        slots, pending = self._slots, self._vector.pending
        for supervisor in self._vector.actors:
            core = supervisor.core
            if core.is_inconsistent:
                core.kill_inconsistent()
            with core.change, core.lock:
                rows = supervisor.calls.rows
                waiting = {index for group in core.table.groups() for index in group.indices}
                for index in () if rows is None else rows.indices:
                    if slots.states[index] == IDLE and slots.of[index].op is not None:
                        slots.make_idle(index)
                    elif slots.states[index] == ASKED and index not in waiting:
                        supervisor.calls.queue(Group([index]))
        pending.is_disturbed = False
        pending.was_disturbed = pending.was_disturbed and any(slots.states)
