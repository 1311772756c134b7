"""The rows of an actor: what is lost with its process, what is late, what runs again. The test plays the worker."""

from __future__ import annotations

import time

import pytest
from plainrows import WRITES_PER_ENV, PlayedActor

import envactors as ea
from envactors.actor import row_failures
from envactors.actor.slots import ASKED, POSTED
from envactors.backends.base import NodeLoss
from envactors.mailbox.control_page import FINISHED, METHOD_RESET, OVERFLOWS, SINCE, STEP

ENVS = PlayedActor.ENVS


def ran(error):
    """Whether an error says that its request had begun."""
    return "before its own" not in str(error)


# What is lost with a process -----------------------------------------------------------------------------

WRITES = WRITES_PER_ENV * len(ENVS) + 1


@pytest.mark.parametrize("overs", [(), (3,), ENVS], ids=["steps", "one resets", "all reset"])
@pytest.mark.parametrize("writes", range(WRITES + 1))
def test_a_crash_splits_a_step_wherever_its_worker_was(make_actor, writes, overs):
    actor = make_actor()
    for env in overs:
        actor.slots.ended[env] = True
    slab, number_before = actor.slab, int(actor.slab.completed[2])
    actor.step()
    number = int(slab.posted[2])
    at, doing = actor.work(writes)
    complete = [env for env in ENVS if slab.completed[env] == number]

    actor.exit()
    results = actor.deliver()

    again = [env for env in ENVS if actor.slots.states[env] == ASKED]
    assert sorted([*results, *again]) == list(ENVS), "each has one outcome"
    assert [env for env in results if not isinstance(results[env], ea.ActorDiedError)] == complete
    begun = [env for env in results if env not in complete and ran(results[env])]
    lost = [results[env] for env in results if env not in (*complete, *begun)]
    assert {error.__cause__.index for error in lost} <= {*begun, actor.FIRST}
    assert {error.__cause__.method is None for error in lost} <= {not begun}, "they say what ran, if anything did"
    if doing == "runs":
        assert begun == [at], "its env may have run code"
        assert results[at].method == ("reset" if at in overs else "step")
        assert results[at].elapsed is not None
    elif begun:
        assert (begun, doing) == ([at], "prepares"), "it was the next one, and about to begin"
    assert again == [env for env in overs if env not in (*complete, *begun)], "resets that had not begun"
    for env in ENVS:
        assert slab.posted[env] == slab.completed[env] == number, "nothing is left for another worker"
        last = slab.observations[0][actor.slots.halves[env], env]
        assert last == 1000 * env + (number if env in complete else number_before), "whole"
    actor.start()
    assert [env for env in ENVS if actor.slots.states[env] == POSTED] == again
    actor.work()
    assert list(actor.deliver()) == again


def test_a_step_of_some_envs_does_not_affect_the_others(make_actor):
    actor = make_actor()
    posted = actor.slab.posted.copy()
    actor.step(3)
    actor.exit()
    assert list(actor.deliver()) == [3]
    assert [env for env in range(6) if actor.slab.posted[env] != posted[env]] == [3]


@pytest.mark.parametrize("writes", range(WRITES + 1))
def test_each_of_several_posted_steps_fails_separately(make_actor, writes):
    """One scan of the worker runs all of them, in the order of the envs, whose numbers are in another order."""
    actor = make_actor()
    for env in (3, 4, 2):
        actor.step(env, stream=True)
    at, doing = actor.work(writes)
    complete = {env for env in ENVS if actor.slab.completed[env] == actor.slab.posted[env]}
    actor.exit()
    results = actor.deliver()
    assert sorted(results) == list(ENVS)
    assert {env for env in ENVS if not isinstance(results[env], ea.ActorDiedError)} == complete
    assert [env for env in ENVS if env not in complete and ran(results[env])] == ([at] if doing == "runs" else [])
    numbers = {env: error.call_id for env, error in results.items() if env not in complete}
    assert numbers == {env: int(actor.slots.numbers[env]) for env in numbers}


def test_a_result_that_was_taken_is_not_lost_with_its_process(make_actor):
    actor = make_actor()
    actor.step(stream=True)
    actor.begin_env(3)
    assert list(actor.deliver()) == [2]
    actor.step(2, stream=True)
    actor.exit()
    results = actor.deliver()
    assert sorted(results) == [2, 3, 4], "the second step of env 2, and the first ones of the others"
    assert [env for env in ENVS if ran(results[env])] == [3]


def test_a_result_is_taken_into_account_once(make_actor):
    actor = make_actor()
    completed = actor.core.completed
    actor.step()
    actor.work()
    assert len(actor.deliver()) == 3
    assert actor.deliver() == {}
    actor.exit()
    assert actor.deliver() == {}
    assert actor.core.completed == completed + 3


def test_a_row_that_is_completed_while_the_last_one_is_looked_at_is_still_listened_for(make_actor, monkeypatch):
    """Between two looks at it the caller stopped listening, and its future was never settled."""
    actor = make_actor()
    actor.reset()
    actor.work()
    actor.deliver()
    actor.submit(2, 3)
    is_complete = actor.rows.is_complete

    def complete_behind(index):
        found = is_complete(index)
        actor.work()
        return found

    with monkeypatch.context() as patch, actor.core.change, actor.core.lock:
        patch.setattr(actor.rows, "is_complete", complete_behind)
        actor.rows.arrive()
    assert actor.slots.states[2] == POSTED
    assert actor.core.process.on_ring is not None, "the ring is on its way"


def test_a_process_that_ends_while_idle_loses_the_episodes_of_its_envs(make_actor):
    actor = make_actor()
    actor.exit()
    actor.start()
    actor.step(3)
    error = actor.deliver()[3]
    assert isinstance(error, ea.ActorDiedError)
    assert error.method == "step"
    assert "before its own step" in str(error)
    actor.reset(4, seed=8)
    actor.work()
    assert actor.deliver()[4].obs == 4000 + actor.slab.completed[4]


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("why", ["node lost", "aborted"])
def test_the_first_env_without_a_result_fails_if_it_may_have_run(make_actor, why, ended):
    """What the worker of a lost node has begun may not have been told; the user wants what was asked to end."""
    actor = make_actor()
    actor.reset(seed=8)
    actor.work(ended * WRITES_PER_ENV)
    if why == "aborted":
        actor.abort()
    else:
        actor.worker.loss = NodeLoss("far", "unplugged")
        actor.exit()
    results = actor.deliver()
    assert list(results) == [2, 3][: 1 + ended]
    error = results[2 + ended]
    assert error.aborted if why == "aborted" else isinstance(error, ea.NodeLostError)
    assert [env for env in ENVS if actor.slots.states[env] == ASKED] == [3, 4][ended:]


def test_results_that_are_streamed_are_in_the_order_of_their_completion(make_actor):
    actor = make_actor()
    actor.step(2, 4, stream=True)
    actor.step(3)
    actor.work()
    actor.slab.when[2:5] = 43.0, 41.0, 42.0
    actor.rows.arrive()
    actor.outcomes.read(actor.slots.unread())
    assert actor.pending.ready_ids() == [4, 2, 3], "the row of the last one has an old time"


# What comes beside the rows ------------------------------------------------------------------------------


def test_a_result_waits_for_the_payload_beside_its_row(make_actor):
    actor = make_actor()
    actor.step(stream=True)
    actor.work(2 * WRITES_PER_ENV, large=[3])
    assert actor.deliver()[3].info == {"large": "x" * 10_000}
    actor.work()
    assert list(actor.deliver()) == [4]
    actor.step(stream=True)
    assert not actor.slots.overflow, "it belongs to the step before"
    actor.work()
    assert actor.deliver()[3].info == {}


def test_an_overflow_that_is_left_in_the_channel_of_an_ended_process_is_read(make_actor):
    actor = make_actor()
    actor.step(stream=True)
    actor.work(2 * WRITES_PER_ENV, large=[3])
    actor.exit()
    results = actor.deliver()
    assert results[3].info == {"large": "x" * 10_000}
    assert isinstance(results[4], ea.ActorDiedError)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_missing_overflow_fails_the_result_and_ends_the_process(make_actor, is_counted):
    actor = make_actor()
    actor.step(stream=True)
    actor.work(large=[3])
    actor.worker.replies.clear()
    if not is_counted:
        actor.page.counters[OVERFLOWS] -= 1
    assert 3 not in actor.deliver()
    assert actor.worker.is_killed
    actor.exit()
    results = actor.deliver()
    assert "overwritten memory that it shares" in str(results[3])


def test_a_row_without_its_overflow_is_not_complete_while_the_step_runs(make_actor):
    actor = make_actor()
    actor.step(stream=True)
    actor.work(2 * WRITES_PER_ENV, large=[3])
    actor.page.counters[OVERFLOWS] -= 1  # it is counted only once it was sent
    assert list(actor.deliver()) == [2]
    assert not actor.worker.is_killed
    actor.page.counters[OVERFLOWS] += 1
    assert list(actor.deliver()) == [3]


def test_an_env_that_raises_fails_alone(make_actor):
    actor = make_actor()
    actor.step()
    actor.work(raises=[3])
    results = actor.deliver()
    assert isinstance(results[3], ValueError)
    assert [results[env].obs for env in (2, 4)] == [1000 * env + actor.slab.completed[env] for env in (2, 4)]
    actor.step(3)
    actor.work()
    assert actor.deliver()[3].obs == 3000 + actor.slab.completed[3]


@pytest.mark.parametrize("beyond", [0, 1000])
def test_a_call_that_has_ended_without_its_results_ends_the_process(make_actor, beyond):
    actor = make_actor()
    actor.step()
    actor.work(WRITES_PER_ENV)
    actor.page.counters[FINISHED] = actor.page.counters[STEP] + beyond
    actor.deliver()
    assert actor.worker.is_killed


# Deadlines -----------------------------------------------------------------------------------------------

DEADLINES = ea.Deadlines(step=5.0, reset=50.0)


def deadline(rows):
    """When the deadline of what the worker runs passes."""
    turn = row_failures.turn(rows)
    return turn.started + turn.timeout


def test_a_deadline_is_that_of_the_env_that_runs(make_actor):
    actor = make_actor(deadlines=DEADLINES)
    actor.slots.ended[3] = True
    actor.step()
    rows, posted = actor.rows, actor.rows.posted_at
    assert deadline(rows) == posted + 5.0, "nobody has begun: the worker itself is late"
    actor.begin_env(2)
    since = actor.page.times[SINCE]
    assert deadline(rows) == since + 5.0
    actor.work(WRITES_PER_ENV)
    since = actor.page.times[SINCE]
    assert deadline(rows) == since + 5.0, "between two envs"
    actor.begin_env(3)
    since = actor.page.times[SINCE]
    assert deadline(rows) == since + 50.0
    actor.work(WRITES_PER_ENV)
    actor.begin_env(4)
    since = actor.page.times[SINCE]
    assert deadline(rows) == since + 5.0
    actor.page.record_env(METHOD_RESET, 2)
    since = actor.page.times[SINCE]
    assert deadline(rows) == since + 50.0, "it resets within the step"


def test_a_worker_that_does_not_begin_is_late_from_the_first_post_on(make_actor):
    actor = make_actor(deadlines=DEADLINES)
    actor.reset(3, seed=1)
    posted = actor.rows.posted_at
    actor.step(4)
    assert deadline(actor.rows) == posted + 50.0


def test_a_post_behind_an_env_that_runs_gives_it_no_more_time(make_actor):
    actor = make_actor(deadlines=DEADLINES)
    actor.step(2)
    actor.begin_env(2)
    since = actor.page.times[SINCE]
    actor.step(4)
    assert deadline(actor.rows) == since + 5.0


def test_a_running_reset_without_a_deadline_sets_the_timer_again(make_actor):
    actor = make_actor(deadlines=ea.Deadlines(step=5.0))
    actor.reset(2, seed=1)
    actor.begin_env(2)
    now = time.monotonic() + 1000.0
    actor.supervisor.on_timer(now)
    assert actor.core.timers.next() == now + 5.0


@pytest.mark.parametrize("comes_late", [False, True])
@pytest.mark.parametrize(("writes", "overdue"), [(0, 2), (4, 2), (7, 3), (11, 3), (14, 4), (18, 4)], ids=str)
def test_no_result_counts_of_the_env_that_has_passed_its_deadline(make_actor, writes, overdue, comes_late):
    actor = make_actor(deadlines=DEADLINES)
    actor.step()
    actor.work(writes)
    actor.supervisor.on_timer(time.monotonic() + 6.0)
    if comes_late:
        actor.work()
    actor.exit()
    results = actor.deliver()
    late = results.pop(overdue)
    assert isinstance(late, ea.ActorTimeoutError)
    assert (late.index, late.method, late.timeout) == (overdue, "step", 5.0)
    assert late.elapsed is not None
    lost = {env for env, result in results.items() if isinstance(result, ea.ActorDiedError)}
    assert lost == (set() if comes_late else {env for env in ENVS if env > overdue})
    actor.start()
    actor.reset(seed=1)
    actor.work()
    assert len(actor.deliver()) == 3, "it may be late once more"


def test_an_overdue_env_is_blamed_even_if_its_worker_continued(make_actor):
    actor = make_actor(deadlines=DEADLINES)
    actor.step()
    actor.begin_env(3)
    actor.supervisor.on_timer(time.monotonic() + 6.0)
    actor.work(WRITES_PER_ENV)
    actor.begin_env(4)
    actor.exit()
    results = actor.deliver()
    assert [type(results[env]) for env in (3, 4)] == [ea.ActorTimeoutError, ea.ActorDiedError]


def test_a_timer_that_comes_too_early_is_set_again(make_actor):
    actor = make_actor(deadlines=DEADLINES)
    actor.step()
    actor.begin_env(4)
    actor.core.timers.set("call", 0.0)
    now = time.monotonic()
    actor.supervisor.on_timer(now)
    assert actor.core.timers.next() == actor.page.times[SINCE] + 5.0
    actor.work()
    actor.deliver()
    actor.supervisor.on_timer(actor.core.timers.next())
    assert actor.core.timers.next() == float("inf"), "nothing runs"
