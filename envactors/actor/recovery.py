"""Bringing envs back to where they were lost: the journals of one actor, or nothing of the kind.

    record ... what has ended is recorded, in the order in which the worker ran it
    replays    a new process has started: one request per env, before all that waits
    can_retry  a step was lost, or has raised: once more, from where the journal ends

All of it happens under the actor's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from envactors.actor.batch_step import StepRequest
from envactors.actor.future import ActorFuture
from envactors.actor.journal import Journal
from envactors.actor.requests import Answer, CallRequest, Request
from envactors.arrays.slab import Slab
from envactors.options import Deadlines
from envactors.wire.info_codec import InfoReader
from envactors.wire.messages import Attach, Kind, PickledItem, Replay, Reset
from envactors.wire.pickling import dumps, loads
from envactors.wire.seeding import renewed_seed


class Recovery:
    """The null object: an env that was lost needs a reset. `Journals` overrides all of it.

    Attributes:
        replays: Whether envs are brought back.
        attach: How the actor's processes use the shared memory, if they do.
    """

    replays = False

    def __init__(self) -> None:
        self.attach: Attach | None = None

    def record(self, answer: Answer, incarnation: int) -> bool:
        """Record the end of a request; return False if it is a replay after which the env is not where it was."""
        return True

    def record_rows(self, rows: Slab, infos: InfoReader, envs: Sequence[int], call_id: int) -> None:
        """Record steps that have ended in shared memory, without those that have raised."""

    def replay_requests(self, deadlines: Deadlines, future: ActorFuture) -> list[CallRequest]:
        """Return what a new process is asked first."""
        return []

    def can_retry(self, index: int, *, seeded: bool, error: BaseException | None = None) -> bool:
        """Return whether what an env was asked is worth another try; see `Journal.can_retry`."""
        return False

    def count_failure(self, index: int) -> None:
        """Count a failure against what an env was asked last."""

    def forget(self, index: int) -> None:
        """Give up bringing an env back, until its next seeded reset."""

    def forget_all(self) -> None:
        """Give up bringing all envs back; attributes are set again all the same."""

    def inputs(self, request: StepRequest) -> list[tuple[object, ...]] | None:
        """Return everything that leads to a request; None if that is not known."""
        return None

    def holds(self, request: Request) -> bool:
        """Return whether a request for a lost process can run on one that was brought to the same point."""
        return False


class Journals(Recovery):
    """The journals of one actor's envs.

    Args:
        first_index: The index of the first env.
        count: How many envs there are.
        limit: How many steps each journal may hold; see `Journal`.
    """

    replays = True

    def __init__(self, first_index: int, count: int, limit: int) -> None:
        super().__init__()
        self._first_index = first_index
        self._journals = [Journal(limit) for _ in range(count)]
        # Whether each env was not reset yet in the present process: its first reset may have a seed of its own.
        self._fresh = [True] * count

    def _journal(self, index: int) -> Journal:
        return self._journals[index - self._first_index]

    def record(self, answer: Answer, incarnation: int) -> bool:
        request = answer.request
        if isinstance(request, StepRequest):
            if not answer.failed:
                self._record_transition(request, answer.check, incarnation)
        elif isinstance(request, CallRequest):
            if request.kind == Kind.REPLAY:
                return self._record_replay(request, answer)
            if request.kind == Kind.CALL or (request.kind == Kind.SET and not answer.failed):
                self._journal(request.index).record_message(request.kind, bytes(request.payload), request.call_id)
        return True

    def _record_transition(self, request: StepRequest, check: int, incarnation: int) -> None:
        journal, position = self._journal(request.index), request.index - self._first_index
        message = request.message
        item, seed = request.item, None
        assert isinstance(item, PickledItem), "only processes are replayed"
        payload = bytes(item.payload)
        if isinstance(message, Reset):
            seed = message.seed
            if seed is None and self._fresh[position] and incarnation > 0 and message.root_seed is not None:
                seed = renewed_seed(message.root_seed, incarnation)
                payload = bytes(dumps(tuple(message._replace(seed=seed))))
            self._fresh[position] = False
        if seed is None:
            journal.record_message(request.kind, payload, request.call_id, check)
        else:
            journal.begin(payload, incarnation, request.call_id, check)

    def _record_replay(self, request: CallRequest, answer: Answer) -> bool:
        same = not answer.failed and bool(loads(answer.content))
        if same and self._journal(request.index).whole:
            self._fresh[request.index - self._first_index] = False
        else:
            self._journal(request.index).forget()
        return same

    def record_rows(self, rows: Slab, infos: InfoReader, envs: Sequence[int], call_id: int) -> None:
        for env in envs:
            if not infos.failed(env):
                self._journal(env).record_row(rows, env, call_id)

    def replay_requests(self, deadlines: Deadlines, future: ActorFuture) -> list[CallRequest]:
        self._fresh = [True] * len(self._journals)
        return [
            self._replay_request(position, message, deadlines, future)
            for position, journal in enumerate(self._journals)
            if (message := journal.replay(position, self.attach)) is not None
        ]

    def _replay_request(self, position: int, message: Replay, deadlines: Deadlines, future: ActorFuture) -> CallRequest:
        # The worker says on its page what it is at; each part has its own deadline, this is that of the first.
        timeout = deadlines.of("call" if message.attributes else "reset")
        index = self._first_index + position
        return CallRequest(Kind.REPLAY, dumps(tuple(message)), "replay", index, timeout, future)

    def can_retry(self, index: int, *, seeded: bool, error: BaseException | None = None) -> bool:
        return self._journal(index).can_retry(seeded=seeded, error=error)

    def count_failure(self, index: int) -> None:
        self._journal(index).count_failure()

    def forget(self, index: int) -> None:
        self._journal(index).forget()

    def forget_all(self) -> None:
        for journal in self._journals:
            journal.forget()

    def inputs(self, request: StepRequest) -> list[tuple[object, ...]] | None:
        journal = self._journal(request.index)
        return journal.inputs(self.attach, request) if journal.whole or request.is_seeded_reset else None

    def holds(self, request: Request) -> bool:
        journal = self._journal(request.index)
        return journal.whole and request.bound is not None and request.bound >= journal.since
