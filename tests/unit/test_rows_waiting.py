"""What waits to be posted: behind calls, for permits, or withdrawn; and posts that are interrupted."""

from __future__ import annotations

import pytest
from helpers import SOON
from interrupting import interrupt
from plainrows import PlayedActor

import envactors as ea
from envactors.actor.future import ActorFuture
from envactors.actor.permits import Permits
from envactors.actor.requests import CallRequest
from envactors.actor.slots import ARRIVED, ASKED, IDLE, POSTED
from envactors.mailbox.messages import Call, Kind

ENVS = PlayedActor.ENVS


def in_state(actor, state):
    return [env for env in ENVS if actor.slots.states[env] == state]


# What waits ----------------------------------------------------------------------------------------------


def call(actor):
    """Asks for a call, and returns its future."""
    future = ActorFuture(actor.supervisor, None)
    request = CallRequest("look", 2, future=future, kind=Kind.CALL)
    actor.supervisor.calls.submit(request, Call(0, "look", (), {}))
    return future


def test_calls_and_rows_run_in_the_order_of_submission(make_actor):
    actor = make_actor()
    actor.step(2, stream=True)
    future = call(actor)
    assert not future.running(), "the row is in flight"
    actor.step(3, stream=True)
    actor.work()
    actor.deliver()
    assert future.running()
    assert in_state(actor, ASKED) == [3]
    assert actor.due() == []
    actor.reply("seen")
    assert future.result() == "seen"
    assert in_state(actor, POSTED) == [3]
    actor.work()
    assert list(actor.deliver()) == [3]


def test_a_failure_is_there_when_threads_are_woken_to_look_for_it(make_actor):
    actor = make_actor()
    actor.step()
    seen = []
    wake = actor.core.reactor.wake

    def look_and_wake(key):
        seen.append(in_state(actor, ARRIVED))
        wake(key)

    actor.core.reactor.wake = look_and_wake
    actor.exit()
    assert seen[: len(ENVS)] == [list(ENVS[: count + 1]) for count in range(len(ENVS))]


def test_envs_that_wait_have_no_results(make_actor):
    """Their rows are complete: those of the steps before."""
    actor = make_actor()
    call(actor)
    actor.step()
    assert actor.deliver() == {}
    assert in_state(actor, ASKED) == list(ENVS)
    actor.exit()
    assert sorted(actor.deliver()) == list(ENVS)


def test_an_env_that_waits_can_be_cancelled_alone(make_actor):
    actor = make_actor()
    call(actor)
    first, second = actor.submit(2, 3)
    assert first.cancel()
    assert actor.slots.states[2] == IDLE
    actor.reply(None)
    assert second.running()
    assert not second.cancel()
    assert in_state(actor, POSTED) == [3]
    actor.work()
    actor.deliver()
    assert second.result().obs == 3000 + actor.slab.completed[3]


def test_envs_that_were_all_cancelled_are_not_posted(make_actor):
    actor = make_actor()
    call(actor)
    futures = actor.submit(2, 3)
    last = actor.page.last_call
    assert [future.cancel() for future in futures] == [True, True]
    actor.reply(None)
    assert (actor.due(), actor.page.last_call) == ([], last)
    actor.step(2)
    assert in_state(actor, POSTED) == [2]


def test_aborting_a_posted_env_ends_its_process(make_actor):
    actor = make_actor()
    first, second = actor.submit(2, 3)
    actor.begin_env(2)
    assert first.abort()
    assert actor.worker.is_killed
    actor.exit()
    assert first.exception().aborted
    assert "could run" in str(second.exception())
    assert not first.abort(), "it has ended"


def test_actors_that_share_a_permit_step_one_after_the_other(make_actor):
    permits = Permits(1)
    first = make_actor(permits=permits)
    second = make_actor(permits=permits)
    first.step()
    second.step()
    assert (in_state(first, POSTED), in_state(second, ASKED)) == (list(ENVS), list(ENVS))
    first.work()
    assert len(first.deliver()) == 3
    assert in_state(second, POSTED) == list(ENVS)
    first.step()
    second.exit()
    assert in_state(first, POSTED) == list(ENVS), "a process that has ended holds none"
    assert len(second.deliver()) == 3


# Interrupts ----------------------------------------------------------------------------------------------


def settle(actor):
    """Does what the next request of the vector, the reactor and the worker do after an interrupt."""
    actor.asker.settle_interrupted()
    if actor.worker.is_killed:
        actor.exit()
        actor.start()
    actor.work()
    futures = [slot.op.future for slot in actor.slots.of if slot.op is not None and slot.op.future is not None]
    results = actor.deliver()
    for future in futures:
        future.exception(SOON)
    return results


@pytest.mark.parametrize("ask", ["step", "reset", "submit"])
def test_an_interrupt_anywhere_in_a_post_loses_no_env(make_actor, ask):
    """Each env is idle then, or has an outcome; and its next result is none of an earlier request."""
    asks = {
        "step": lambda actor: actor.step(2, 3),
        "reset": lambda actor: actor.reset(2, 3, seed=6, options={"a": 1}),
        "submit": lambda actor: actor.submit(2, 3),
    }
    number, where = 0, ""
    while where is not None:
        actor = make_actor()
        where = interrupt(lambda actor=actor: asks[ask](actor), number)
        for env, result in settle(actor).items():
            assert isinstance(result, ea.ActorDiedError) or result.obs == 1000 * env + actor.slots.numbers[env], where
        assert in_state(actor, IDLE) == list(ENVS), where
        actor.reset(seed=1)
        results = settle(actor)
        assert [results[env].obs for env in ENVS] == [1000 * env + actor.slots.numbers[env] for env in ENVS], where
        number += 1
    assert number > 50
