"""One actor's part of a rollout whose process ends at a certain moment. The test plays the worker."""

from __future__ import annotations

import pytest
from plainrows import SCALAR, PlayedActor

import envactors as ea
from envactors.actor.slots import ROLLING
from envactors.backends.local import LocalMemory
from envactors.mailbox.control_page import BEGUN, METHOD, METHOD_POLICY
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.rollout.buffers import TrajectoryBuffers
from envactors.rollout.part import ActorPart
from envactors.rollout.requests import Policy
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.vector.asking import EnvFuture

STEPS = 4


class Books:
    """The state of a vector, as far as a part of a rollout asks for it."""

    observation_spec = SCALAR

    def __init__(self, actor):
        self.actor = actor

    def make_future(self, index):
        return EnvFuture(self.actor.supervisor, None, index, self.actor.pending)

    def last_obs(self, index):
        return 0.0

    def starts(self, index):
        return False

    def record(self, index, over, resets):
        """Counts nothing."""

    def keep(self, index, obs, reward, *, terminated, truncated):
        """Keeps nothing."""


class PlayedPart:
    """A part of a rollout that has begun."""

    def __init__(self, actor):
        self.actor, self.ended = actor, []
        actor.slots.states[:] = bytes([ROLLING]) * len(actor.slots.states)
        layout = TrajectoryLayout(
            SCALAR, SCALAR, PLAIN_REWARD, (), envs=len(actor.slots.of), steps=STEPS, is_learnt=False
        )
        buffer = TrajectoryBuffers(LocalMemory()).take(layout, [])
        books, policy = Books(actor), Policy(1, b"", 0)
        self.part = ActorPart(
            actor.supervisor, actor.slots, books, policy, 0, STEPS, None, {}, self.on_learnt, self.ended.append
        )
        self.part.trajectory, self.part.place = buffer.trajectory, buffer.place
        self.part.begin()

    def on_learnt(self, part, stop):
        raise AssertionError("the policy returns actions alone")

    def choose(self):
        """Does what the worker does up to where the policy has chosen its first actions."""
        counters = self.actor.page.counters
        counters[METHOD] = METHOD_POLICY
        counters[BEGUN] = self.actor.core.table.running.call_id
        self.part.trajectory.chosen[PlayedActor.FIRST] = 1


@pytest.fixture
def played(make_actor):
    return PlayedPart(make_actor(on_failure="replay"))


def test_a_part_ends_if_its_actor_is_closed_after_the_policy_has_chosen(played):
    played.choose()
    played.actor.close()
    assert played.ended == [played.part]
    assert isinstance(played.part.error, ea.ActorClosedError)
