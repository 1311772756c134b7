"""Asking envs for steps and resets: checks, actions into rows, and envs to their actors."""

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
from envactors.actor.slots import ASKED, IDLE, Op, Slots
from envactors.actor.supervisor import Supervisor
from envactors.errors import VectorInputError
from envactors.mailbox.control_page import encode_wait
from envactors.mailbox.pickling import make_payload
from envactors.mailbox.specs import ArraySpec, Spec, flatten, split_batch
from envactors.vector.pending import Pending
from envactors.vector.results import EnvStep

# The most sets of envs to keep: those that never come again would fill the memory.
_MOST_SELECTIONS = 1024


class EnvFuture(ActorFuture[EnvStep]):
    """The future of one env's step or reset; resolves to an `EnvStep`.

    Attributes:
        env_id: The env.
    """

    def __init__(self, supervisor: Supervisor, keep_alive: object, env_id: int, pending: Pending) -> None:
        super().__init__(supervisor, keep_alive)
        self.env_id = env_id
        self._pending: Pending | None = pending

    def _wait(self, deadline: float | None) -> None:
        pending = self._pending
        try:
            super()._wait(deadline)
        except BaseException as error:
            if pending is not None:
                pending.note_failure(error)
            raise

    def _forget_origin(self) -> None:
        super()._forget_origin()
        self._pending = None


def make_future(handle: Caller, env_id: int, pending: Pending) -> EnvFuture:
    """Return the future of an env that is called through a handle."""
    return EnvFuture(handle._supervisor, handle._lifeline, env_id, pending)


class Selection:
    """Some envs, divided among their actors.

    Attributes:
        env_ids: The envs, in the user's order.
        is_all: Whether they are all envs in order.
        index: What selects their rows: a slice for all envs.
        parts: The envs of each actor, ascending, and the actor's number.
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
    """Asks envs for steps and resets.

    Args:
        slots: All envs.
        supervisors: The actor of each env.
        pending: Where their results are.

    Attributes:
        all: All envs, in order.
        only_action: Where actions stand in rows, if they are one array.
        unenforced: The deadlines that the backend does not enforce, in seconds by method, until the user was warned.
        posting: How long the posting of streamed steps has taken since that was read last, in seconds.
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
        # In process the envs run in the thread that starts them, and Ctrl-C shall reach them.
        self._deferral: Any = contextlib.nullcontext() if config.backend.inline else defer_signals
        limits = {} if config.backend.kills else {method: config.deadlines.of(method) for method in ("step", "reset")}
        self.unenforced: dict[str, float] = {method: limit for method, limit in limits.items() if limit is not None}
        self.posting: float = 0.0

    def select(self, env_ids: Iterable[int]) -> Selection:
        """Return some envs, divided among their actors."""
        key = tuple(env_ids)
        found = self._selections.get(key)
        if found is None:
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()
            found = self._selections[key] = Selection(list(key), self._supervisors, self._numbers)
        return found

    def warn_of_deadline(self, method: str) -> None:
        """Warn, once, of a deadline that the backend does not enforce."""
        limit = self.unenforced.pop(method, None)
        self._supervisors[0].warn_of_deadline(limit)

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
        """Start a step of each of some envs; called with signals deferred.

        Args:
            selection: The envs.
            actions: As `VectorEnv.step` takes them.
            stream: Whether each result is of use before the others are there.
            wait: How workers wait for the request after this one.
            pinned: Whether each of them does so on a core of its own.
            futures: Get the results, if there are any; otherwise `Pending` does.
            checked: The spec that actions without place in rows are checked against; None for none.

        Raises:
            AlreadyPendingError: A result of one of them was not delivered.
            VectorInputError: One of them needs a reset.
            SpaceMismatchError: The actions do not conform.
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
        """Return the actions as payloads; nothing if they stand in rows."""
        if self._action_spec is not None and checked is not None:
            return []
        values = split_batch(checked, actions, len(selection.env_ids), "actions")
        return [make_payload(value, pickles=self._slots.pickles) for value in values]

    def check_steppable(self, env_ids: Iterable[int]) -> None:
        """Refuse to step an env that needs a reset.

        Raises:
            VectorInputError: There is one.
        """
        unusual = self._slots.unusual
        for env_id in env_ids if unusual else ():
            if env_id in unusual and self._slots.of[env_id].needs_reset:
                raise VectorInputError(f"env {env_id} was asked to step: it needs a reset first")

    def write_actions(self, selection: Selection, actions: Any) -> None:
        """Write actions into the rows of envs.

        Raises:
            SpaceMismatchError: They do not conform.
        """
        only, index, count = self.only_action, selection.index, len(selection.env_ids)
        assert self._action_spec is not None, "actions have a place in rows"
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
        """Start resets; their results go to futures, if there are any, and otherwise to `recv`."""
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
        """Replace the processes that are to leave their nodes, and all of whose envs are reset."""
        for supervisor, envs, _ in self.select(env_ids).parts:
            process = supervisor.core.process
            if process is not None and process.worker.is_leaving:
                self._slots.of[envs[0]].retiring |= len(envs) == len(supervisor.config.start.factories)

    # Both ------------------------------------------------------------------------------------------------

    def _send(self, selection: Selection, *, stream: bool, wait: int, pinned: bool = False) -> None:
        """Post envs, or queue them where their actor is not free; each actor's envs are asked as a whole or not."""
        now = time.monotonic()
        with self._corked():
            for supervisor, envs, number in selection.parts:
                if self._post(supervisor, envs, now, encode_wait(number, wait) if pinned else wait, stream):
                    continue
                self.queue_envs(supervisor, envs, stream=stream)
        if stream:
            self.posting += time.monotonic() - now

    def queue_envs(self, supervisor: Supervisor, envs: list[int], *, stream: bool) -> None:
        """Have envs of an actor posted once it is free for them."""
        core, slots = supervisor.core, self._slots
        with core.change, core.lock:
            if core.closing:
                for env_id in envs:
                    slots.make_idle(env_id)
                raise core.errors.closed(Request("step", envs[0]), core.incarnation)
            for env_id in envs:
                slots.states[env_id] = ASKED
            self._retire(supervisor, envs)
            supervisor.queue(Group(list(envs), stream=stream))

    def _post(self, supervisor: Supervisor, envs: list[int], now: float, wait: int, stream: bool) -> bool:
        """Post envs of an actor, if it is free for them."""
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
            core.is_inconsistent = True
            core.kill_inconsistent()
            raise
        return True

    def _retire(self, supervisor: Supervisor, envs: list[int]) -> None:
        """Replace the process before a reset, if that is due; under the lock."""
        slots = self._slots
        for env_id in envs:
            slot = slots.of[env_id]
            resets = slot.op.resets if slot.op is not None and slot.op.method == "reset" else slots.ended[env_id]
            if slot.retiring and resets and supervisor.core.lives:
                supervisor.queue_renewal(ActorFuture(supervisor, None))

    def settle_interrupted(self) -> None:
        """Queue the envs that an interrupted request has left asked; those that it has not asked are idle again."""
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
                    if slots.states[index] == IDLE and slots.of[index].op is not None:
                        slots.make_idle(index)
                forgotten = [i for i in range(rows.first, rows.stop) if rows.is_asked(i) and i not in waiting]
                if forgotten:
                    supervisor.queue(Group(forgotten, stream=True))
        pending.forget_taken()
        pending.is_disturbed = False
        pending.was_disturbed = pending.was_disturbed and any(slots.states)
