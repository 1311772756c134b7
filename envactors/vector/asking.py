"""Start steps and resets: check them, write actions into rows, and post or queue the envs at their actors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.handle import Caller
from envactors.actor.requests import Group, Request
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import ARRIVED, ASKED, IDLE, Op, Slots
from envactors.actor.supervisor import Supervisor
from envactors.errors import VectorInputError
from envactors.mailbox.control_page import encode_wait
from envactors.mailbox.pickling import make_payload
from envactors.mailbox.specs import ArraySpec, Spec, flatten, split_batch
from envactors.vector.pending import Pending
from envactors.vector.results import EnvStep

# Most selections to remember, as programs may step a different set of envs each time.
_MOST_SELECTIONS = 1024


class EnvFuture(ActorFuture[EnvStep]):
    """Future of one env's step or reset, which resolves to an `EnvStep`.

    Attributes:
        env_id: Id of the env.
    """

    def __init__(self, supervisor: Supervisor, keep_alive: object, env_id: int, pending: Pending) -> None:
        # Like the lifeline, `Pending` is held until the future is settled, and no longer.
        self._keep_alive: tuple[object, Pending] | None
        super().__init__(supervisor, (keep_alive, pending))
        self.env_id = env_id

    def _wait(self, deadline: float | None) -> None:
        held = self._keep_alive
        try:
            super()._wait(deadline)
        except BaseException as error:
            if held is not None:
                held[1].note_failure(error)
            raise


def make_future(handle: Caller, env_id: int, pending: Pending) -> EnvFuture:
    """Return a future for the next request of an env."""
    return EnvFuture(handle._supervisor, handle._lifeline, env_id, pending)


class Selection:
    """Some envs, grouped by actor.

    Attributes:
        env_ids: Ids of the envs in the user's order.
        is_all: Whether these are all envs in order.
        index: Index of their rows; a slice for all envs.
        parts: For each actor, the actor, its envs in ascending order, and its position among the actors.
    """

    def __init__(self, env_ids: list[int], supervisors: Sequence[Supervisor], numbers: dict[Supervisor, int]) -> None:
        self.env_ids = env_ids
        self.is_all: bool = env_ids == list(range(len(supervisors)))
        self.index: slice | npt.NDArray[np.int64] = slice(None) if self.is_all else np.array(env_ids, np.int64)
        by_actor: dict[Supervisor, list[int]] = {}
        for env_id in env_ids:
            by_actor.setdefault(supervisors[env_id], []).append(env_id)
        self.parts: list[tuple[Supervisor, list[int], int]] = [
            (supervisor, sorted(envs), numbers[supervisor]) for supervisor, envs in by_actor.items()
        ]


class Asker:
    """Starts steps and resets.

    Args:
        slots: All envs.
        supervisors: The actor of each env.
        pending: Results that were not delivered yet.

    Attributes:
        all: All envs in order.
        only_action: Rows for actions, if an action is one array; else None.
        unenforced: Deadlines that the backend does not enforce, in seconds by method, until the user was warned.
        posting: Time that posting streamed steps has taken since the collector last reset it, in seconds.
    """

    def __init__(self, slots: Slots, supervisors: Sequence[Supervisor], pending: Pending) -> None:
        self._slots = slots
        self._supervisors = supervisors
        self._pending = pending
        self._numbers = {one: number for number, one in enumerate(dict.fromkeys(supervisors))}
        self._selections: dict[tuple[int, ...], Selection] = {}
        self.all: Selection = Selection(list(range(len(supervisors))), supervisors, self._numbers)
        layout = slots.slab.layout
        self._action_spec = layout.action
        self.only_action: npt.NDArray[Any] | None = (
            slots.slab.actions[0] if isinstance(layout.action, ArraySpec) else None
        )
        config = supervisors[0].config
        self._corked = config.backend.corked if config.backend.is_far else contextlib.nullcontext
        # With an in-process backend, envs run in the thread that starts them, where Ctrl-C has to reach them.
        self._deferral: Any = contextlib.nullcontext() if config.backend.inline else defer_signals
        limits = {} if config.backend.kills else {method: config.deadlines.of(method) for method in ("step", "reset")}
        self.unenforced: dict[str, float] = {method: limit for method, limit in limits.items() if limit is not None}
        self.posting: float = 0.0

    def select(self, env_ids: Iterable[int]) -> Selection:
        """Return some envs, grouped by actor."""
        key = tuple(env_ids)
        found = self._selections.get(key)
        if found is None:
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()
            found = self._selections[key] = Selection(list(key), self._supervisors, self._numbers)
        return found

    def warn_of_deadline(self, method: str) -> None:
        """Warn once that the backend does not enforce a deadline."""
        limit = self.unenforced.pop(method, None)
        self._supervisors[0].core.warn_of_deadline(limit)

    # Steps -----------------------------------------------------------------------------------------------

    def start_steps(
        self,
        selection: Selection,
        actions: Any,
        *,
        stream: bool,
        wait: int,
        pinned: bool = False,
        futures: Sequence[EnvFuture] = (),
        checked: Spec | None = None,
    ) -> None:
        """Start a step of some envs. Called with signals deferred.

        Args:
            selection: The envs.
            actions: Actions as `VectorEnv.step` takes them.
            stream: Whether results are delivered one by one rather than all at once.
            wait: How workers wait for the next request: `ASLEEP` or `SPINNING`.
            pinned: Whether each worker waits on a separate core.
            futures: Futures that get the results; empty if `Pending` gets them.
            checked: Spec that actions are checked against; None to send them unchecked.

        Raises:
            AlreadyPendingError: An env has a result pending.
            VectorInputError: An env needs a reset first.
            SpaceMismatchError: The actions do not conform to the action spec.
        """
        slots, env_ids = self._slots, selection.env_ids
        if self.unenforced:
            self.warn_of_deadline("step")
        self._pending.check_idle(env_ids)
        self.check_steppable(env_ids)
        if self._action_spec is not None and checked is not None:
            self.write_actions(selection, actions)
        payloads = self._pack_actions(selection, actions, checked)
        for position, env_id in enumerate(env_ids):
            future = futures[position] if futures else None
            if future is not None or payloads:
                slots.of[env_id].op = Op("step", future=future, payload=payloads[position] if payloads else None)
        self._send(selection, stream=stream, wait=wait, pinned=pinned)

    def _pack_actions(self, selection: Selection, actions: Any, checked: Spec | None) -> list[Any]:
        """Return the actions as payloads; an empty list if they are in the rows."""
        if self._action_spec is not None and checked is not None:
            return []
        values = split_batch(checked, actions, len(selection.env_ids), "actions")
        return [make_payload(value, pickles=self._slots.pickles) for value in values]

    def check_steppable(self, env_ids: Iterable[int]) -> None:
        """Check that envs can step.

        Raises:
            VectorInputError: An env needs a reset first.
        """
        unusual = self._slots.unusual
        for env_id in env_ids if unusual else ():
            if env_id in unusual and self._slots.of[env_id].needs_reset:
                raise VectorInputError(f"env {env_id} needs a reset first: call reset(env_ids=[{env_id}])")

    def write_actions(self, selection: Selection, actions: Any) -> None:
        """Write actions into the rows of envs.

        Raises:
            SpaceMismatchError: The actions do not conform to the action spec.
        """
        only, index, count = self.only_action, selection.index, len(selection.env_ids)
        assert self._action_spec is not None, "actions are in the rows"
        values: Any = None
        if only is not None and type(actions) is np.ndarray and actions.dtype == only.dtype:
            values = actions if actions.shape == (count, *only.shape[1:]) else None
        if values is None:
            values = split_batch(self._action_spec, actions, count, "actions")
        if only is not None:
            only[index] = values
            return
        for env_id, value in zip(selection.env_ids, values, strict=True):
            for array, leaf in zip(self._slots.slab.actions, flatten(self._action_spec, value), strict=True):
                array[env_id] = leaf

    # Resets ----------------------------------------------------------------------------------------------

    def start_resets(
        self,
        env_ids: list[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        futures: Sequence[EnvFuture] = (),
    ) -> None:
        """Start resets, whose results go to the futures, or to `recv` if there are none."""
        if self.unenforced:
            self.warn_of_deadline("reset")
        self._pending.check_idle(env_ids)
        self._leave_drained_nodes(env_ids)
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
            self._send(self.select(env_ids), stream=True, wait=0)

    def _leave_drained_nodes(self, env_ids: list[int]) -> None:
        """Replace each process on a node that is being drained, if all of its envs are reset."""
        for supervisor, envs, _ in self.select(env_ids).parts:
            process = supervisor.core.process
            if process is not None and process.worker.is_leaving:
                self._slots.of[envs[0]].retiring |= len(envs) == len(supervisor.config.start.factories)

    # Both ------------------------------------------------------------------------------------------------

    def _send(self, selection: Selection, *, stream: bool, wait: int, pinned: bool = False) -> None:
        """Post envs, or queue them if their actor is not free. The envs of one actor are posted or queued together."""
        now = time.monotonic()
        with self._corked():
            for supervisor, envs, number in selection.parts:
                if self._post(supervisor, envs, now, encode_wait(number, wait) if pinned else wait, stream):
                    continue
                self.queue_envs(supervisor, envs, stream=stream)
        if stream:
            self.posting += time.monotonic() - now

    def queue_envs(self, supervisor: Supervisor, envs: list[int], *, stream: bool) -> None:
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
            supervisor.calls.queue(Group(list(envs), stream=stream))

    def _post(self, supervisor: Supervisor, envs: list[int], now: float, wait: int, stream: bool) -> bool:
        """Post envs of an actor if it is free, and return whether it was."""
        core = supervisor.core
        try:
            with core.lock:
                rows = supervisor.calls.rows
                if rows is None or not core.is_free():
                    return False
                if self._slots.unusual and not self._slots.unusual.isdisjoint(envs):
                    return False
                rows.post(envs, now, wait, stream=stream)
        except BaseException:
            core.kill_inconsistent()
            raise
        return True

    def _retire(self, supervisor: Supervisor, envs: list[int]) -> None:
        """Replace the process before a reset if it is due. Called under the lock."""
        slots = self._slots
        for env_id in envs:
            slot = slots.of[env_id]
            resets = slot.op.resets if slot.op is not None and slot.op.method == "reset" else slots.ended[env_id]
            if slot.retiring and resets and supervisor.core.lives:
                supervisor.calls.queue_renewal(ActorFuture(supervisor, None))

    def settle_interrupted(self) -> None:
        """Queue the envs that an interrupted request has marked as asked; make the others idle again."""
        slots, pending = self._slots, self._pending
        for supervisor in self._numbers:
            core = supervisor.core
            if core.is_inconsistent:
                core.kill_inconsistent()
            core.deferred.run()
            with core.change, core.lock:
                rows = supervisor.calls.rows
                if rows is None:
                    continue
                waiting = {index for group in core.table.groups() for index in group.indices}
                for index in range(rows.first, rows.stop):
                    op = slots.of[index].op
                    if op is None:
                        continue
                    if slots.states[index] == IDLE:
                        slots.make_idle(index)
                    elif slots.states[index] == ARRIVED and op.future is not None and not op.future.is_being_read:
                        rows.settle(index)
                forgotten = [i for i in range(rows.first, rows.stop) if rows.is_asked(i) and i not in waiting]
                if forgotten:
                    supervisor.calls.queue(Group(forgotten, stream=True))
        pending.forget_taken()
        pending.is_disturbed = False
        pending.was_disturbed = pending.was_disturbed and any(slots.states)
