"""Reading outcomes, in a thread that waits for them: unpickling infos and failures runs code of users.

ARRIVED ──▶ a result in its row, one that tells of a failure, or an error ──▶ READY, or a future
└─▶ ASKED again: the env has raised and is replayed or renewed; or the next process does its reset
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.actor import row_failures
from envactors.actor.decide import Cause, Fate
from envactors.actor.future import ActorFuture
from envactors.actor.requests import Answer, CallRequest, Group, Request
from envactors.actor.slots import ARRIVED, ASKED, Op, Outcome, Slots
from envactors.actor.supervisor import Supervisor
from envactors.errors import ActorError
from envactors.mailbox.messages import Fault
from envactors.mailbox.pickling import pack_failure, unpack_failure
from envactors.mailbox.slab import HALF, NO_AUTORESET, RESET
from envactors.vector.episodes import Episodes
from envactors.vector.pending import Pending, ReadyResult
from envactors.vector.results import EnvStep, RowReader


class Outcomes:
    """Reads outcomes.

    Args:
        slots: All envs.
        supervisors: The actor of each env.
        reader: Reads results out of rows.
        pending: Gets what is read.
        episodes: The bookkeeper.
    """

    def __init__(
        self,
        slots: Slots,
        supervisors: Sequence[Supervisor],
        reader: RowReader,
        pending: Pending,
        episodes: Episodes,
    ) -> None:
        self._slots = slots
        self._supervisors = supervisors
        self._reader = reader
        self._pending = pending
        self._episodes = episodes

    def read_arrived(self) -> int:
        """Read all outcomes that have arrived and are no future's; return how many there were."""
        slots = self._slots
        if ARRIVED not in slots.states:
            return 0
        found = slots.unread()
        for index in found:
            result = self._read(index)
            if result is not None:
                slots.of[index].op = None
                slots.note_usual(index)
                self._pending.add(result)
        return len(found)

    def read_for_future(self, index: int) -> None:
        """Read the outcome of an env that has a future, and settle that."""
        slots, slot = self._slots, self._slots.of[index]
        op = slot.op
        if op is None or op.future is None or slots.states[index] != ARRIVED:
            return  # it was read
        result = self._read(index)
        if result is None:
            return
        step = self._reader.step(index, slot.incarnation) if result.is_in_rows else result.step
        slots.make_idle(index)
        op.future.settle(step, result.error, slot.incarnation)
        self._supervisors[index].reactor.wake(op.future)
        self._supervisors[index].reactor.wake(self._pending)

    def _read(self, index: int) -> ReadyResult | None:
        """Read an outcome; return None if the env was asked once more."""
        slots, slot = self._slots, self._slots.of[index]
        outcome = slots.outcomes.get(index)
        if outcome is None:
            before = None
            if slot.op is not None and slot.op.failure is not None and not slots.infos.failed(index):
                before = self._reader.last(index, before=True)
            error = self._read_content(index)
            if error is None:
                return self._as_result(index, before)
            if not slots.infos.failed(index):
                slots.halves[index] ^= HALF  # the observation before is the last one that came with all it has
            if self._fail(index, error):
                return None
            outcome = slots.outcomes[index]
        last = self._reader.last(index) if outcome.stands_in else None
        slots.outcomes.pop(index, None)
        now = time.monotonic()
        if last is None:
            return ReadyResult(index, now, error=outcome.error)
        return ReadyResult(index, now, _stand_in(last, outcome.error, slot.incarnation))

    def _read_content(self, index: int) -> BaseException | None:
        """Read what came beside an env's row; return the failure, if it has failed."""
        slots, infos = self._slots, self._slots.infos
        payload = slots.overflow.get(index)
        failed = infos.failed(index)
        if not failed:
            found = None
            with contextlib.suppress(BaseException):  # the error factory says what was wrong
                found = infos.decode(index, payload)
            if found is not None:
                try:
                    self._reader.accept(index, found)
                except BaseException as error:  # it has objects that cannot be copied
                    # Without frames: they lead to the vector, whose memory would stay as long as the error.
                    return unpack_failure(pack_failure(error, Fault.RESULT)) or error.with_traceback(None)
                return None
        content: Any = payload
        if failed:
            with contextlib.suppress(Exception):  # no failure has come, although the row says so
                content = tuple(infos.failure(index, payload))
        if content is None:
            content = slots.slab.inline_info(index)
        supervisor = self._supervisors[index]
        method = "reset" if slots.ops[index] & RESET else "step"
        answer = Answer(CallRequest(method, index, call_id=int(slots.numbers[index])), True, content)
        return supervisor.core.errors.outcome(answer, slots.of[index].incarnation, supervisor.core.process)[1]

    def _fail(self, index: int, error: BaseException) -> bool:
        """Decide what becomes of an env that has raised; return whether it was asked once more."""
        supervisor, slots = self._supervisors[index], self._slots
        core = supervisor.core
        with core.change, core.lock:
            if supervisor.calls.rows is None:  # the actor was closed meanwhile
                slots.outcomes[index] = Outcome(error, stands_in=False)
                return False
            fate = row_failures.fail(supervisor.calls.rows, index, Cause.RAISED, error)
            if fate not in (Fate.REDO, Fate.RESET):
                return False
            core.add_first([index])
            core.send_waiting()
        return True

    def _as_result(self, index: int, before: EnvStep | None) -> ReadyResult | None:
        """Return the result that stands in a row, or is made of it; None if the next process does its reset."""
        slots, slot, op = self._slots, self._slots.of[index], self._slots.of[index].op
        slab, bits = slots.slab, slots.ops[index]
        over = bool(slab.terminated[index]) or bool(slab.truncated[index])
        if over and bits & NO_AUTORESET:
            return self._reset_in_next_process(index)
        slots.has_last[index] = True
        when = float(slab.when[index]) if slots.streams[index] else time.monotonic()
        ending = None if op is None else op.ending
        self._episodes.record(index, over=over or ending is not None, reset=bool(bits & RESET) and ending is None)
        if op is None or (op.failure is None and ending is None):
            return ReadyResult(index, when)
        step = self._reader.step(index, slot.incarnation)
        if ending is not None:
            info = {**step.info, "final_obs": ending.obs, "final_info": ending.info}
            step = ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
        if op.failure is not None:
            info = {**step.info, "failure": op.failure}
            if op.method == "step":
                if before is not None:
                    info |= {"final_obs": before.obs, "final_info": before.info}
                step = step._replace(truncated=True)
            step = step._replace(info=info)
        return ReadyResult(index, when, step)

    def _reset_in_next_process(self, index: int) -> ReadyResult | None:
        """Have the process of an env replaced whose episode has ended, and the env be reset by the next one.

        Returns:
            None; an error if the actor is closed, and there is no next one.
        """
        slots, slot = self._slots, self._slots.of[index]
        op = slot.op or Op("step")
        ending = self._reader.step(index, slot.incarnation)
        supervisor = self._supervisors[index]
        core = supervisor.core
        with core.change, core.lock:
            if core.closing:
                closed = core.errors.closed(Request("step", index), core.incarnation)
                return ReadyResult(index, time.monotonic(), error=closed)
            slot.op = Op("step", resets=True, future=op.future, failure=op.failure, ending=ending)
            slot.retiring = False
            slots.states[index] = ASKED
            supervisor.queue_renewal(ActorFuture(supervisor, None))
            supervisor.queue(Group([index], stream=True))
        return None


def _stand_in(last: EnvStep, error: BaseException, incarnation: int) -> EnvStep:
    """Return what stands in for the result of an env that was lost: its last observation, truncated."""
    where = error.incarnation if isinstance(error, ActorError) and error.incarnation is not None else incarnation
    reward = np.zeros_like(last.reward) if isinstance(last.reward, np.ndarray) else 0.0
    return EnvStep(last.env_id, last.obs, reward, False, True, {"failure": error}, where + 1)
