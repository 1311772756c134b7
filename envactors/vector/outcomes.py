"""Read outcomes in a thread that waits for them, since unpickling infos and failures runs user code.

ARRIVED ──▶ READING: a result in its row, a result that reports a failure, or an error ──▶ READY, or a future
└─▶ ASKED again: the env raised and is replayed or renewed, or the next process resets it
"""

from __future__ import annotations

import math

import numpy as np

from envactors.actor import row_failures
from envactors.actor.decide import Cause, Fate
from envactors.actor.requests import Group, Request
from envactors.actor.slots import ARRIVED, ASKED, READING, Op, Outcome
from envactors.envs.core import VectorCore
from envactors.envs.pending import ReadyResult
from envactors.envs.results import EnvStep, as_dict
from envactors.errors import ActorError
from envactors.mailbox.messages import Fault
from envactors.mailbox.pickling import pack_failure, unpack_failure
from envactors.mailbox.slab import HALF, NO_AUTORESET, RESET


class Outcomes:
    """Reads outcomes.

    Args:
        vector: The vector.
    """

    def __init__(self, vector: VectorCore) -> None:
        self._vector = vector
        self._slots = vector.slots
        self._reader = vector.reader

    def read(self, arrived: list[int]) -> None:
        """Read outcomes that have arrived for `recv`, but for those that another thread is reading."""
        slots = self._slots
        left: set[int] = set()
        try:
            with self._vector.supervisors[0].core.lock:  # the lock of all actors
                for index in arrived:
                    if slots.states[index] == ARRIVED:
                        left.add(index)
                        slots.states[index] = READING
            # The others have no time in their rows.
            timed = {index for index in left if slots.streams[index] and index not in slots.outcomes}
            when = {index: float(slots.slab.when[index]) if index in timed else math.inf for index in sorted(left)}
            for index in sorted(when, key=when.__getitem__):
                result = self._read(index)
                if result is not None:
                    slots.of[index].op = None
                    slots.note_usual(index)
                    self._vector.pending.add(index, result)
                left.discard(index)
        finally:
            for index in left:
                if slots.states[index] == READING:
                    slots.states[index] = ARRIVED
            if arrived:
                self._vector.reactor.wake(self._vector.pending)  # another thread may wait for one of them

    def read_for_future(self, index: int, op: Op) -> None:
        """Read the outcome of an env whose request has a future, and settle the future.

        May run again after an interrupt, and then ends what was begun.
        """
        slots, slot = self._slots, self._slots.of[index]
        assert op.future is not None, "the request has a future"
        if op.outcome is None:
            if slot.op is not op or slots.states[index] != ARRIVED:
                return  # another thread has read it
            result = self._read(index)
            if result is None:
                return
            step = result.step
            if step is None and result.error is None:
                step = self._reader.step(index)
            op.outcome = step, result.error, slot.incarnation
        if slot.op is op:  # else it is idle already, and may have another request
            slots.make_idle(index)
        op.future.settle(*op.outcome)
        self._vector.reactor.wake(op.future)
        self._vector.reactor.wake(self._vector.pending)

    def _read(self, index: int) -> ReadyResult | None:
        """Read an outcome; return None if the request runs again."""
        slots, slot = self._slots, self._slots.of[index]
        outcome = slots.outcomes.get(index)
        if outcome is None:
            before = None
            if slot.op is not None and slot.op.failure is not None and not slots.infos.failed(index):
                before = self._reader.last(index, before=True)
            error, in_reset = self._read_content(index)
            if error is None:
                return self._as_result(index, before)
            if not slots.infos.failed(index):
                slots.halves[index] ^= HALF  # the previous observation is the last one with complete content
            if self._fail(index, error, in_reset=in_reset):
                return None
            outcome = slots.outcomes[index]
        last = self._reader.last(index) if outcome.truncates else None
        slots.outcomes.pop(index, None)
        if last is None:
            return ReadyResult(error=outcome.error)
        return ReadyResult(_truncated_result(last, outcome.error, slot.incarnation))

    def _read_content(self, index: int) -> tuple[BaseException | None, bool]:
        """Read the content of an env's result.

        Returns:
            Its exception if the env failed, and whether it raised in a reset, such as that of a step that ended its
            episode.
        """
        slots, infos, payload = self._slots, self._slots.infos, self._slots.overflow.get(index)
        core, incarnation = self._vector.supervisors[index].core, slots.of[index].incarnation
        method = "reset" if slots.ops[index] & RESET else "step"
        request = Request(method, index, call_id=int(slots.numbers[index]))
        try:
            if infos.failed(index):
                failure = infos.failure(index, payload)
                return core.errors.raised(request, incarnation, core.pid, failure), failure.fault == Fault.RESET
            content = infos.decode(index, payload)
        except BaseException as error:  # unpickling runs any code
            return core.errors.unreadable(request, incarnation, core.pid, error), False
        try:
            self._reader.accept(index, content)
        except BaseException as error:  # an object leaf cannot be copied
            # Without its frames, which refer to the vector: its memory would live as long as the error.
            return unpack_failure(pack_failure(error, Fault.RESULT)) or error.with_traceback(None), False
        return None, False

    def _fail(self, index: int, error: BaseException, *, in_reset: bool) -> bool:
        """Apply the failure policy to an env that raised; return whether its request runs again."""
        supervisor, slots = self._vector.supervisors[index], self._slots
        core = supervisor.core
        with core.change, core.lock:
            if supervisor.calls.rows is None:  # the actor has been closed
                slots.outcomes[index] = Outcome(error, truncates=False)
                return False
            fate = row_failures.fail(supervisor.calls.rows, index, Cause.RAISED, error, in_reset=in_reset)
            if fate not in (Fate.REDO, Fate.RESET):
                return False
            core.add_first([index])
            core.send_waiting()
        return True

    def _as_result(self, index: int, before: EnvStep | None) -> ReadyResult | None:
        """Return the result in a row, completed where needed; None if the next process resets the env."""
        slots, op = self._slots, self._slots.of[index].op
        slab, bits = slots.slab, slots.ops[index]
        over = bool(slab.terminated[index]) or bool(slab.truncated[index])
        if over and bits & NO_AUTORESET:
            return self._reset_in_next_process(index)
        slots.has_last[index] = True
        ending = None if op is None else op.ending
        is_reset = bool(bits & RESET) and ending is None
        self._vector.episodes.record(index, over=over or ending is not None, reset=is_reset)
        if op is None or (op.failure is None and ending is None):
            return ReadyResult()
        step = self._reader.step(index)
        if ending is not None:
            info = {**as_dict(step.info), "final_obs": ending.obs, "final_info": ending.info}
            step = ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
        if op.failure is not None:
            info = {**as_dict(step.info), "failure": op.failure}
            if op.method == "step":
                if before is not None:
                    info |= {"final_obs": before.obs, "final_info": before.info}
                step = step._replace(truncated=True)
            step = step._replace(info=info)
        return ReadyResult(step)

    def _reset_in_next_process(self, index: int) -> ReadyResult | None:
        """Replace the process of an env whose episode has ended, and reset the env in the next process.

        Returns:
            None, or an error if the actor is closed.
        """
        slots, slot = self._slots, self._slots.of[index]
        op = slot.op or Op("step")
        ending = self._reader.step(index)
        supervisor = self._vector.supervisors[index]
        core = supervisor.core
        with core.change, core.lock:
            if core.closing:
                return ReadyResult(error=core.errors.closed(Request("step", index), core.incarnation))
            slot.op = Op("step", resets=True, future=op.future, failure=op.failure, ending=ending)
            slot.retiring = False
            slots.states[index] = ASKED
            supervisor.calls.queue_renewal()
            supervisor.calls.queue(Group([index]))
        return None


def _truncated_result(last: EnvStep, error: BaseException, incarnation: int) -> EnvStep:
    """Return the result of an env that failed: its last observation, truncated, with the failure in its info."""
    where = error.incarnation if isinstance(error, ActorError) and error.incarnation is not None else incarnation
    reward = np.zeros_like(last.reward) if isinstance(last.reward, np.ndarray) else 0.0
    return EnvStep(last.env_id, last.obs, reward, False, True, {"failure": error}, where + 1)
