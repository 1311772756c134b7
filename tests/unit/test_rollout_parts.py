"""One actor's part of a rollout whose process ends at a certain moment. The test plays the worker."""

from __future__ import annotations

import pytest
from helpers import wait_until
from plainrows import SCALAR, PlayedActor

import envactors as ea
from envactors.actor.slots import ROLLING
from envactors.actor.states import ENDING, EndReason
from envactors.backends.local import LocalMemory
from envactors.envs.core import EnvFuture
from envactors.mailbox.control_page import BEGUN, ENV_INDEX, METHOD, METHOD_POLICY, METHOD_STEP
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.rollout.buffers import TrajectoryBuffers
from envactors.rollout.part import ActorPart
from envactors.rollout.requests import Policy
from envactors.rollout.trajectory import TrajectoryLayout

STEPS = 4


class Books:
    """The state of a vector, as far as a part of a rollout asks for it."""

    observation_spec = SCALAR

    def __init__(self, actor):
        self.actor = actor

    def make_future(self, index):
        return EnvFuture(self.actor.supervisor, None, index)

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
        self.part.progress.trajectory, self.part.place = buffer.trajectory, buffer.place
        self.part.begin()

    def on_learnt(self, part, stop):
        raise AssertionError("the policy returns actions alone")

    def begin_policy(self):
        """Has the worker begin to choose the first actions."""
        self.actor.page.last_call = self.actor.core.table.running.call_id
        self.actor.page.counters[BEGUN] = self.actor.page.last_call
        self._write(METHOD_POLICY, PlayedActor.FIRST)

    def choose(self):
        """Has the policy choose the first actions."""
        self.part.trajectory.chosen[PlayedActor.FIRST] = 1

    def step(self, *envs, runs):
        """Has some envs take their first step, and the next one begin."""
        for env in envs:
            self.part.trajectory.done[env] = 1
        self._write(METHOD_STEP, runs)

    def _write(self, method, env):
        counters = self.actor.page.counters
        counters[METHOD], counters[ENV_INDEX] = method, env - PlayedActor.FIRST

    def pass_deadline(self):
        """Has what the worker runs pass its deadline, after which it runs for another moment."""
        core, page = self.actor.core, self.actor.page
        with core.change, core.lock:
            call = core.table.running
            call.on_overdue(call.turn(page, core.config.deadlines), page)
            core.phase, core.reason = ENDING, EndReason.TIMEOUT


@pytest.fixture
def make_played(make_actor):
    return lambda on_failure: PlayedPart(make_actor(on_failure=on_failure))


def test_a_part_ends_if_its_actor_is_closed_after_the_policy_has_chosen(make_played):
    played = make_played("replay")
    played.begin_policy()
    played.choose()
    played.actor.close()
    assert played.ended == [played.part]
    assert isinstance(played.part.error, ea.ActorClosedError)


def test_steps_that_end_after_a_deadline_do_not_count(make_played):
    played = make_played("raise")
    first, late, waiting = PlayedActor.ENVS
    played.begin_policy()
    played.choose()
    played.step(first, runs=late)
    played.pass_deadline()
    played.step(late, runs=waiting)
    played.actor.exit()
    assert played.part.progress.counted == {first: 1, late: 0, waiting: 0}
    assert played.part.trajectory.done[list(PlayedActor.ENVS)].tolist() == [1, 0, 0]
    wait_until(lambda: played.ended)
    assert {env: type(error) for env, error in played.part.errors.items()} == {
        late: ea.ActorTimeoutError,
        waiting: ea.ActorDiedError,
    }


def test_a_late_policy_is_blamed_even_if_the_envs_step_before_the_end(make_played):
    played = make_played("raise")
    played.begin_policy()
    played.pass_deadline()
    played.choose()
    played.step(PlayedActor.FIRST, runs=PlayedActor.FIRST + 1)
    played.actor.exit()
    wait_until(lambda: played.ended)
    assert played.part.progress.counted == dict.fromkeys(PlayedActor.ENVS, 0)
    assert list(played.part.errors) == list(PlayedActor.ENVS)
    assert played.part.errors[PlayedActor.FIRST].method == "policy"
