"""Steps of a trajectory that travel between machines."""

from __future__ import annotations

import numpy as np
import pytest

import envactors as ea
from envactors.backends.thread import ThreadMemory
from envactors.mailbox.info_codec import INLINE_INFO
from envactors.mailbox.specs import ArraySpec
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout

NUMBER = ArraySpec((), np.float64)
EXTRAS = (("value", NUMBER),)
PLAIN = TrajectoryLayout(ArraySpec((2,), np.float64), NUMBER, None, (), 3, 4)


def make(layout):
    return Trajectory(layout, [bytearray(size) if size else None for size in Trajectory(layout).sizes])


def filled(layout):
    trajectory = make(layout)
    trajectory.observations[0][...] = np.arange(30).reshape(5, 3, 2)
    for array in (trajectory.actions[0], trajectory.rewards, *trajectory.extras):
        array[...] = np.arange(12).reshape(4, 3)
    trajectory.steps_complete[:] = 4
    cell = trajectory.cell(2, 1)
    trajectory.info_encoding[cell] = INLINE_INFO
    trajectory.inline_info_sizes[cell] = 5
    trajectory.inline_infos[cell, :5] = 7
    return trajectory


@pytest.mark.parametrize("sent", [PLAIN, PLAIN._replace(extras=EXTRAS)])
def test_steps_arrive_where_extras_have_room_meanwhile(sent):
    source, target = filled(sent), make(PLAIN._replace(extras=EXTRAS))
    target.unpack(range(1, 3), source.pack(range(1, 3), 1))
    assert target.observations[0][1:, 1:].tolist() == source.observations[0][1:, 1:].tolist()
    assert not target.observations[0][:, 0].any()
    assert target.actions[0][1:, 1:].tolist() == source.actions[0][1:, 1:].tolist()
    assert bytes(target.inline_info(target.cell(2, 1))) == b"\x07" * 5
    expected = source.extras[0][1:, 1:].tolist() if sent.extras else np.zeros((3, 2)).tolist()
    assert target.extras[0][1:, 1:].tolist() == expected


def test_room_for_actions_that_extras_did_not_get_is_not_taken_for_larger_actions(monkeypatch):
    buffer = TrajectoryBuffer(PLAIN._replace(action=None), ThreadMemory())
    extend, places = ThreadMemory.extend, []

    def extend_once(memory, size):
        if places:
            raise MemoryError
        places.append(extend(memory, size))
        return places[0]

    with monkeypatch.context() as patch:
        patch.setattr(ThreadMemory, "extend", extend_once)
        with pytest.raises(ea.VectorEnvError, match="too little memory"):
            buffer.add_room(PLAIN._replace(extras=EXTRAS))
    buffer.add_room(PLAIN._replace(action=ArraySpec((1000,), np.float64)))
    assert buffer.trajectory.actions[0].shape == (4, 3, 1000)
