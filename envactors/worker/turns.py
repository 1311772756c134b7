"""Steps that are asked through shared memory: an actor's envs take their turn, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.arrays.slab import FAILED, NOTE_ROOM, NOTED, PLAIN, RECORDED, WITH_MAIL, Slab
from envactors.arrays.specs import ArraySpec, flatten, reader
from envactors.wire import bundle
from envactors.wire.board import BEGUN, MAILED, ONE_BY_ONE, PLACE, RESETTING, SINCE, Board
from envactors.wire.messages import Fault, Kind
from envactors.wire.pickling import dumps, pack_failure
from envactors.wire.record import Writer
from envactors.worker.context import enter, is_forked_copy
from envactors.worker.host import Host, Seat


class Turns:
    """Runs the steps that stand in a slab.

    Args:
        host: The envs.
        slab: Where their actions come from and their results go.
        board: Where progress is told.
        autoreset: Whether an episode that ends is reset within the step.
        send: Sends a frame of the current turn.
    """

    def __init__(
        self, host: Host, slab: Slab, board: Board, autoreset: bool, send: Callable[[Kind, bytes | bytearray], None]
    ) -> None:
        self._host = host
        self._board = board
        self._autoreset = autoreset
        self._send = send
        self._places = [_Place(number, seat, slab) for number, seat in enumerate(host.seats)]
        self._mails: list[tuple[int, bytes | bytearray]] = []
        self._records = Writer()
        self._several = len(self._places) > 1
        # Single numbers are read and written through memoryviews in a third of the time that arrays take.
        self._asked, self._done = slab.asked.data, slab.done.data
        self._when: Any = slab.when.data
        self._what, self._extras, self._noted = slab.what.data, slab.extras.data, slab.noted.data
        self._checks = slab.checks.data
        self._terminated, self._truncated = slab.terminated.data, slab.truncated.data
        plain = slab.layout.reward == ArraySpec((), np.dtype(np.float64))
        self._rewards: Any = slab.rewards.data if plain else slab.rewards

    def take(self, order: int) -> None:
        """Runs what was asked, and tells that it has."""
        words, times, asked, done = self._board.words, self._board.times, self._asked, self._done
        one_by_one = words[ONE_BY_ONE]
        words[MAILED] = 0
        for place in self._places:
            index = place.index
            turn = asked[index]
            if turn == done[index]:
                continue
            times[SINCE] = time.monotonic()
            words[PLACE] = place.number
            if self._autoreset:
                words[RESETTING] = 0
            words[BEGUN] = order
            self._run(place, index, turn)
            if one_by_one:
                self._post()
                self._when[index] = time.monotonic()
            done[index] = turn
            if one_by_one:
                self._board.to_parent.ring_open()
        self._post()
        self._board.finish(order)

    def _resetting(self) -> None:
        self._board.times[SINCE] = time.monotonic()
        self._board.words[RESETTING] = 1

    def _run(self, place: _Place, index: int, turn: int) -> None:
        seat = place.seat
        if self._several:
            enter(seat.context)
        fault = Fault.RAISED
        try:
            if self._what[index]:
                obs, info = self._host.reset_seat(seat, None, None, None)
                reward, terminated, truncated = place.no_reward, False, False
            else:
                obs, reward, terminated, truncated, info = self._host.advance(
                    seat, place.action(), self._autoreset, None, self._resetting
                )
            if is_forked_copy():
                os._exit(1)  # env code forked, and its child came back here: it must not answer
            if place.only is not None:
                place.only[turn & 1][...] = obs
                loose: list[Any] | None = None
            else:
                loose = place.write(turn & 1, obs)
            if self._host.journals:
                self._checks[turn & 1, index] = seat.check
            self._rewards[index] = reward
            # An array of flags has no truth, and is the env's fault.
            self._terminated[index] = bool(terminated)
            self._truncated[index] = bool(truncated)
            if not loose and type(info) is dict:
                if not info:
                    self._extras[index] = PLAIN
                    return
                size = self._records.write(info, place.note)
                if size is not None:
                    self._noted[index] = size
                    self._extras[index] = RECORDED
                    return
            fault = Fault.RESULT
            mail = dumps((info, loose or []))
            if len(mail) <= NOTE_ROOM:
                place.note[: len(mail)] = mail
                self._noted[index] = len(mail)
                self._extras[index] = NOTED
            else:
                self._mails.append((index, mail))
                self._extras[index] = WITH_MAIL
        except BaseException as error:
            self._fail(index, error, fault)

    def _fail(self, index: int, error: BaseException, fault: Fault) -> None:
        if is_forked_copy():
            os._exit(1)
        payload = dumps(tuple(pack_failure(error, fault)))
        self._send(Kind.FAILED, bundle.pack([(index, payload)]))
        self._board.words[MAILED] += 1
        self._extras[index] = FAILED

    def _post(self) -> None:
        """Sends what has come besides results, before it is said that they are all there."""
        if self._mails:
            self._send(Kind.RESULT, bundle.pack(self._mails))
            self._board.words[MAILED] += len(self._mails)
            self._mails.clear()


class _Place:
    """One env's rows of the slab.

    Attributes:
        number: Which of the actor's envs it is.
        seat: The env.
        index: Its index.
        action: Reads its action.
        note: Where it notes what comes besides.
        no_reward: What a reset has for a reward.
        only: The two rows of its observation, where that is one array.
    """

    def __init__(self, number: int, seat: Seat, slab: Slab) -> None:
        self.number = number
        self.seat = seat
        self.index = seat.index
        layout = slab.layout
        self.action = reader(layout.action, slab.actions, seat.index)
        self.note = slab.note_rooms[seat.index]
        self.no_reward: Any = 0.0 if not layout.reward.shape else np.zeros(layout.reward.shape, layout.reward.dtype)
        self._spec = layout.observation
        self._rows = [
            [None if leaf is None else leaf[half, seat.index, ...] for leaf in slab.observations] for half in (0, 1)
        ]
        plain = isinstance(layout.observation, ArraySpec)
        self.only = [row for rows in self._rows for row in rows if row is not None] if plain else None

    def write(self, half: int, obs: Any) -> list[Any]:
        """Writes an observation of several parts; gives those that are not in the slab."""
        loose = []
        for row, leaf in zip(self._rows[half], flatten(self._spec, obs), strict=True):
            if row is None:
                loose.append(leaf)
            else:
                row[...] = leaf
        return loose
