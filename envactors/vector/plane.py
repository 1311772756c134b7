"""The data plane: steps of many envs asked and answered through shared memory, one turn an actor.

    begin    actions, what to do and a new number ──▶ slab ──▶ a turn of each actor's envs, one ring each
    look     a turn is finished, or an env of it is done ──▶ `Landed` results, or the failure of one env
    gather   a whole batch at once, where nothing is out of the ordinary

An env goes by turns once it was reset through its actor's channel. Whatever is out of the ordinary (a lost process, an
actor that is busy) goes through the channel, env by env, with all that `envactors.vector.slot` knows of it.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.interrupts import SHIELD
from envactors.actor.reactor import Bells
from envactors.actor.requests import Request
from envactors.actor.supervisor import Supervisor
from envactors.actor.turn import Turn
from envactors.actor.waiting import SHORT_PAUSE, Waiting
from envactors.arrays.slab import FAILED, PLAIN, RECORDED, RESET, STEP, Layout, Slab
from envactors.arrays.specs import ArraySpec, flatten, reader, unflatten
from envactors.system import SharedFile, cores, give_way, look_out
from envactors.vector.batch import EnvStep
from envactors.vector.slot import Arrived, Autoreset, EnvFuture, Ledger, Slot
from envactors.wire.board import ASLEEP, BOTH_LOOKING, FINISHED, LOOKING, MAILED, ORDERED, Board, waiting_on
from envactors.wire.messages import Attach, Mail
from envactors.wire.record import Reader


class Landed:
    """One env's result in shared memory, complete and not handed out yet."""

    failed = False

    def __init__(self, plane: Plane, turn: Turn, env_id: int, mail: Mail) -> None:
        self.env_id = env_id
        self.when = float(plane.slab.when[env_id]) if turn.one_by_one else time.monotonic()
        self._plane = plane
        self._turn = turn
        self._mail = mail

    def exception(self) -> BaseException | None:
        """What stands in place of a result."""
        return None

    def result(self) -> EnvStep:
        """The result; once."""
        return self._plane.hand_out(self._turn, self.env_id, self._mail)


_NO_MAIL = Mail({}, [])


class _Group:
    """The envs of one actor.

    Attributes:
        supervisor: The actor.
        slots: Its envs.
        envs: Their indices.
        board: That of the process whose rings are heard.
        turn: What steps all of them, again and again; None where they have no episodes on one and the same process.
    """

    def __init__(self, supervisor: Supervisor, slots: list[Slot]) -> None:
        self.supervisor = supervisor
        self.slots = slots
        self.envs = [slot.env_id for slot in slots]
        self.board: Board | None = None
        self.turn: Turn | None = None
        self.latest: Turn | None = None

    @property
    def quiet(self) -> bool:
        """Whether no turn of it is under way, so that nobody looks at what is asked."""
        return self.latest is None or self.supervisor.end_turn(self.latest)


class Plane:
    """Steps envs through shared memory.

    Args:
        layout: What the memory holds.
        file: Where it is.
        slots: All envs.
        ledger: What is counted of them.
        autoreset: What happens at the end of an episode.
        keeps_last: Whether the last result of each env may be asked for.
        recycles: Whether processes may be replaced between two episodes.
        copy: Whether batches are copied out of the memory.
        arrived: Takes the failures, and whatever else comes env by env.
        waiter: Whom actors wake.

    Attributes:
        clear: Whether nothing has happened since the last step of all envs that its successor had to look at: no env
            owes a result, needs a reset, or has gone through its channel.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(
        self,
        layout: Layout,
        file: SharedFile,
        slots: list[Slot],
        ledger: Ledger,
        autoreset: Autoreset,
        keeps_last: bool,
        recycles: bool,
        copy: bool,
        arrived: Arrived,
        waiter: object,
    ) -> None:
        self.slab = slab = Slab(layout, file.allocate(layout.size))
        self._slots = slots
        self._ledger = ledger
        self._autoreset = autoreset
        self._copy = copy
        self._arrived = arrived
        self._waiter = waiter
        by_actor: dict[Supervisor, list[Slot]] = {}
        for slot in slots:
            by_actor.setdefault(slot.handle._supervisor, []).append(slot)
        self._groups = [_Group(supervisor, members) for supervisor, members in by_actor.items()]
        attach = Attach(layout, autoreset == "same_step")
        self.attached = [group.supervisor.attach(attach) for group in self._groups]
        # All actors' bells; and the last one's alone: whoever was asked last is often the last to answer, and each ring
        # that is heard while sleeping costs a wake.
        reactor = self._groups[0].supervisor.reactor
        self.bells, self.last_bell = Bells(reactor), Bells(reactor)
        self.turns: list[Turn] = []
        self.clear = False
        self._finished: Callable[[], bool] = bool
        self._supervisors: dict[int, Supervisor] = {slot.env_id: slot.handle._supervisor for slot in slots}
        plan = self._groups[0].supervisor.plan
        self._journaled = plan.max_journal is not None
        self._waiting = Waiting(plan.spin, may_part=1 < len(self._groups) <= cores())
        self._begun = self._gathered = 0.0
        self._only_action = slab.actions[0] if isinstance(layout.action, ArraySpec) else None
        plain = isinstance(layout.observation, ArraySpec)
        self._only_observation = slab.observations[0] if plain else None
        # The number of the last result of each env that was handed out.
        self.given = np.zeros(len(slots), np.int64)
        self._keeps_last = keeps_last
        self._recycles = recycles
        self._mails = [_NO_MAIL] * len(slots)
        self._records = Reader()
        self._none = bytes(len(slots))
        self._extras, self._ended = slab.extras.data, ledger.ended.data
        self._terminated, self._truncated = slab.terminated.data, slab.truncated.data
        self._asked = slab.asked.data
        # Whether all envs' rows are the same one of the two; what `Slab.what` says. None where that is not known.
        self._in_step: bool | None = None
        self._told: bytes | None = None
        self._ids = np.arange(len(slots))
        # The turns of a vector that nobody holds any more must not keep it, or its actors would never end.
        self._lose_weakly = weakref.WeakMethod(self._lose)
        for slot in slots:
            slot.attach(self)

    def finish(self) -> tuple[Any, ...] | None:
        """Finishes a step of all envs if that takes but a moment, as `gather` does; called under `SHIELD`."""
        if not self._waiting.way.all_look:
            return None
        give_way()
        if not self._finished():
            self.ring()
            if not look_out(self._finished):
                return None
        # After an interrupt nobody would get what is gathered; as it is, the envs owe it.
        return self.gather() if not SHIELD.interrupted and self.settled() else None

    def ring(self) -> None:
        """Wakes the workers that were asked for a step of all and have not begun: perhaps they look for it no more."""
        for turn in self.turns:
            turn.ring()

    def owe(self) -> None:
        """Has the envs owe the results of a step of all that was not gathered; called under `SHIELD`."""
        self.clear = False
        self.ring()
        for turn in self.turns:
            self._supervisors[turn.first].owe(turn, self._mark)

    def _mark(self, turn: Turn, env_id: int) -> None:
        self._slots[env_id].owed = turn

    # Asking ----------------------------------------------------------------------------------------------

    def begin(self, slots: list[Slot], actions: Sequence[Any] | npt.NDArray[Any], one_by_one: bool) -> list[int]:
        """Starts turns; gives the positions of the envs that must be asked alone. Called under `SHIELD`."""
        left = []
        self.clear = False
        self._in_step = self._told = None
        positions = {slot.env_id: position for position, slot in enumerate(slots)}
        for group in self._groups:
            envs = [env for env in group.envs if env in positions]
            if not envs:
                continue
            turn = self._turn(group, envs, one_by_one) if group.quiet else None
            if turn is not None:
                for env in envs:
                    self._write_action(env, actions[positions[env]])
                    self.slab.what[env] = RESET if self._ended[env] else STEP
                    self._slots[env].owed = turn  # before it starts: if it is lost at once, that changes
                if group.supervisor.take_turn(turn, time.monotonic(), ASLEEP):
                    self.turns.append(turn)
                    group.latest = turn
                    continue
                for env in envs:
                    self._slots[env].owed = None
            left += [positions[env] for env in envs]
        return left

    def _turn(self, group: _Group, envs: list[int], one_by_one: bool) -> Turn | None:
        """Makes a turn; None where the envs do not all have episodes that the actor's process holds."""
        supervisor = group.supervisor
        # In this order: a process that takes the other's place in between has another number.
        board, incarnation = supervisor.board, supervisor.incarnation
        slots = [self._slots[env] for env in envs]
        if board is None or any(slot.leaving or slot.incarnation != incarnation for slot in slots):
            return None
        if board is not group.board:
            group.board = board
            self.bells.listen(board.to_parent)
            if group is self._groups[-1]:
                self.last_bell.listen(board.to_parent)
        return Turn(self.slab, board, envs, group.envs[0], incarnation, one_by_one, self._waiter, self._lose_weakly)

    def _prepare(self) -> None:
        """Makes turns for all envs, to be taken until something happens to one of them."""
        self.clear = True
        self.turns = []
        self._in_step = self._told = None
        boards = []
        for group in self._groups:
            group.turn = self._turn(group, group.envs, one_by_one=False)
            if group.turn is not None:
                boards.append(group.turn.board.words)

        def finished() -> bool:
            for words in boards:  # noqa: SIM110 # a generator takes three times as long
                if words[FINISHED] != words[ORDERED]:
                    return False
            return True

        self._finished = finished

    def begin_all(self, actions: Sequence[Any] | npt.NDArray[Any]) -> list[int]:
        """Starts a step of all envs; gives what `begin` gives. Called under `SHIELD`.

        The envs do not owe their results yet, and workers that may be expected to look for it were not woken: `finish`
        or `owe` is to follow, and `ring` at once where it is not `finish`.
        """
        if not self.clear:
            if not all(group.quiet for group in self._groups):
                self.turns = []
                return list(range(len(self._slots)))  # through the channel, behind what runs
            self._prepare()
        slab, left = self.slab, []
        ended = self._ended.tobytes()
        if ended != self._told:
            slab.what[...] = self._ledger.ended
            self._told = ended
        if self._only_action is not None:
            self._only_action[...] = actions
        else:
            for env, action in enumerate(actions):
                self._write_action(env, action)
        turns, now = self.turns, time.monotonic()
        self._begun = now
        way = self._waiting.way
        wait = ASLEEP
        if way.workers_look and now - self._gathered < SHORT_PAUSE:
            wait = BOTH_LOOKING if way.all_look else LOOKING
        for number, group in enumerate(self._groups):
            turn = group.turn
            own = waiting_on(number, wait) if way.apart else wait
            if turn is not None and group.supervisor.take_turn(turn, now, own):
                turns.append(turn)
                group.latest = turn
            else:
                left += group.envs
                self._in_step = None
        return left

    def _write_action(self, env: int, action: Any) -> None:
        for array, leaf in zip(self.slab.actions, flatten(self.slab.layout.action, action), strict=True):
            array[env] = leaf

    def _lose(self, env_id: int) -> Request:
        return self._slots[env_id].lose(bool(self.slab.what[env_id]), self._action(env_id), self._arrived)

    def _action(self, env_id: int) -> Any:
        return reader(self.slab.layout.action, self.slab.actions, env_id)()

    # Waiting ---------------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether no turn is under way any more.

        Those that are finished are taken off where something is to be taken in before the next one; a turn whose
        results all stand in the slab is taken off by the next, which spares each actor's lock once a step.
        """
        supervisors, plain = self._supervisors, not self._journaled
        for turn in self.turns:  # a generator takes three times as long
            words = turn.board.words
            if words[FINISHED] != turn.call_id:
                if not turn.over:
                    return False
            elif words[MAILED]:
                plain = False
        if plain:
            return True
        with SHIELD:  # once for all of them
            for turn in self.turns:
                if not supervisors[turn.first].end_turn(turn):
                    return False
        return True

    def last_rung(self) -> bool:
        """Whether the last of the turns is not under way any more, or need not be: `settled` will tell."""
        if not self.turns:  # a signal handler has taken their results
            return True
        turn = self.turns[-1]
        return turn.over or turn.finished

    def look(self, arrived: dict[int, Any]) -> None:
        """Gives out the results that are there and were not given out yet; failures arrive by themselves."""
        going = []
        for turn in self.turns:
            supervisor = self._supervisors[turn.first]
            if not turn.over and turn.finished:
                with SHIELD:
                    supervisor.end_turn(turn)
            elif not turn.over and turn.one_by_one:
                supervisor.take_mail(turn)
            over = turn.over
            for env_id in turn.envs:
                if self._slots[env_id].owed is turn and env_id not in arrived and turn.complete(env_id):
                    mail, error = self._read_mail(turn, env_id)
                    if error is None:
                        landed = Landed(self, turn, env_id, mail)
                        supervisor.keep(turn, env_id, functools.partial(arrived.__setitem__, env_id, landed))
                    else:
                        self._fail(supervisor, turn, env_id, error)
            if not over:
                going.append(turn)
        self.turns = going

    def _read_mail(self, turn: Turn, env_id: int) -> tuple[Mail, BaseException | None]:
        extra = self._extras[env_id]
        if extra == PLAIN:
            return Mail({}, []), None
        if extra == RECORDED:
            return Mail(self._records.read(self.slab.note(env_id)), []), None
        content, error = self._supervisors[turn.first].read_mail(turn, env_id)
        return (_NO_MAIL, error) if error is not None else (Mail(*content), None)

    def _fail(self, supervisor: Supervisor, turn: Turn, env_id: int, error: BaseException) -> None:
        """Has an env fail with what it raised."""
        slot = self._slots[env_id]
        futures: list[EnvFuture] = []

        def take() -> None:
            futures.append(slot.take_over(bool(self.slab.what[env_id]), self._action(env_id), self._arrived))

        supervisor.keep(turn, env_id, take)
        for future in futures:
            self._extras[env_id] = FAILED  # also what could not be unpickled is no result
            future.settle(None, error, turn.bound)

    # Handing out -----------------------------------------------------------------------------------------

    def gather(self) -> tuple[Any, ...] | None:
        """The results of a step of all envs, batched as `VectorEnv.step` gives them; called under `SHIELD`.

        Returns:
            None where something is out of the ordinary, and each env is to be looked at; nothing is handed out then.
        """
        slab, turns = self.slab, self.turns
        if len(turns) != len(self._groups):
            return None
        for turn in turns:
            if turn.lost or turn.overdue is not None:
                return None
        extras = self._extras.tobytes()
        if extras == self._none:
            infos: list[dict[str, Any]] = [{} for _ in self._slots]
            mails = None
        else:
            read = [self._read_mail(turn, env_id) for turn in turns for env_id in turn.envs]
            if any(error is not None for _, error in read):
                return None
            mails = [mail for mail, _ in read]
            infos = [mail.info for mail in mails]
        obs = self._observations(mails)
        result = obs, slab.rewards.copy(), slab.terminated.copy(), slab.truncated.copy(), infos
        turns.clear()
        self._gathered = now = time.monotonic()
        self._waiting.note(now - self._begun, now)
        if self._keeps_last:
            self._mails = mails or [_NO_MAIL] * len(self._slots)
            self.given[...] = slab.asked
        self._count()
        return result

    def _observations(self, mails: list[Mail] | None) -> Any:
        if self._in_step is None:
            halves = self.slab.asked & 1
            self._in_step = bool((halves == halves[0]).all())
        half = self._asked[0] & 1
        spec, copy = self.slab.layout.observation, self._copy
        if self._only_observation is not None and self._in_step:
            batch = self._only_observation[half]
            return batch.copy() if copy else batch

        def batches() -> Iterator[Any]:
            loose = 0
            for array in self.slab.observations:
                if array is None:
                    yield [mail.loose[loose] for mail in mails or ()]
                    loose += 1
                elif not self._in_step:
                    yield array[self.slab.asked & 1, self._ids]
                else:
                    yield array[half].copy() if copy else array[half]

        return unflatten(spec, batches())

    def _count(self) -> None:
        slab, ledger = self.slab, self._ledger
        resets = self._told != self._none
        ledger.rounds += 1
        if resets:
            ledger.steps -= slab.what  # a reset is no step
        if self._terminated.tobytes() != self._none or self._truncated.tobytes() != self._none:
            over = slab.terminated | slab.truncated
            ledger.episodes += over
            if self._recycles:
                for env_id in np.flatnonzero(over):
                    self._slots[env_id].grow_old()
            if self._autoreset == "next_step":
                ledger.ended[...] = over
            elif self._autoreset == "disabled":
                for env_id in np.flatnonzero(over):
                    self._slots[env_id].end(True)
        elif resets:
            ledger.ended[...] = False

    def hand_out(self, turn: Turn, env_id: int, mail: Mail) -> EnvStep:
        """Makes the result of an env, and takes it into account."""
        slab, ledger, slot = self.slab, self._ledger, self._slots[env_id]
        terminated, truncated = bool(slab.terminated[env_id]), bool(slab.truncated[env_id])
        reward = slab.rewards[env_id]
        ledger.steps[env_id] += slab.what[env_id] == STEP
        if terminated or truncated:
            ledger.episodes[env_id] += 1
        slot.end(terminated or truncated)
        self._mails[env_id] = mail
        self.given[env_id] = slab.asked[env_id]
        obs = self._observation(env_id, int(slab.asked[env_id]) & 1)
        reward = reward.copy() if reward.shape else float(reward)
        return EnvStep(env_id, obs, reward, terminated, truncated, mail.info, turn.bound)

    def _observation(self, env_id: int, half: int) -> Any:
        others = iter(self._mails[env_id].loose)
        return unflatten(
            self.slab.layout.observation,
            (
                next(others) if array is None else array[half, env_id, ...].copy()[()]
                for array in self.slab.observations
            ),
        )

    def last(self, env_id: int) -> EnvStep:
        """The last result of an env that was handed out here, as far as a renewal tells of it."""
        slab, slot = self.slab, self._slots[env_id]
        obs = self._observation(env_id, int(self.given[env_id]) & 1)
        reward = slab.rewards[env_id]
        info = dict(self._mails[env_id].info)
        return EnvStep(env_id, obs, reward.copy() if reward.shape else 0.0, False, False, info, slot.incarnation or 0)
