"""What of an ended process runs again in the next one, in which order, and what waits meanwhile."""

from __future__ import annotations

import time

import pytest
from plainrows import WRITES_PER_ENV, PlayedActor

import envactors as ea
from envactors.actor.requests import CallRequest
from envactors.actor.slots import ASKED, POSTED
from envactors.mailbox import bundle
from envactors.mailbox.messages import Kind, Restore, episode_seed, renewed_seed
from envactors.mailbox.pickling import loads
from envactors.mailbox.slab import PAYLOAD, RESET, SEED

ENVS = PlayedActor.ENVS


def restart(actor):
    """Has the process end and the next one start; returns the envs that were restored to where they were."""
    actor.exit()
    actor.start()
    replayed = []
    while actor.core.table.running is not None and actor.core.table.running.kind == Kind.REPLAY:
        replayed.append(actor.reply(True).index)
    return replayed


def in_state(actor, state):
    return [env for env in ENVS if actor.slots.states[env] == state]


# Replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [None, *ENVS])
def test_with_replay_a_crash_changes_no_result(make_actor, begun):
    actor = make_actor(on_failure="replay")
    actor.step()
    if begun is not None:
        actor.begin_env(begun)
    complete = [env for env in ENVS if begun is not None and env < begun]
    assert restart(actor) == list(ENVS)
    assert in_state(actor, POSTED) == [env for env in ENVS if env not in complete]
    actor.work()
    results = actor.deliver()
    assert [results[env].obs for env in ENVS] == [1000 * env + actor.slab.completed[env] for env in ENVS]
    assert [results[env].info for env in ENVS] == [{}] * 3
    assert [results[env].incarnation for env in ENVS] == [0 if env in complete else 1 for env in ENVS]


def test_inputs_that_have_ended_two_processes_are_not_tried_again(make_actor):
    actor = make_actor(on_failure="replay")
    for _ in range(2):
        if in_state(actor, POSTED) == []:
            actor.step()
        actor.begin_env(3)
        restart(actor)
    actor.work()
    results = actor.deliver()
    failure = results[3].info["failure"]
    assert "the same inputs have ended two processes" in str(failure)
    assert failure.inputs[0] == ("reset", 5, None)
    assert failure.inputs[1:] == [("step", 3.0), ("step", 3.0)]
    assert results[3].truncated
    assert [results[env].info for env in (2, 4)] == [{}, {}], "those before and after it have run"
    assert [actor.core.recovery.journal(env).whole for env in ENVS] == [True, False, True]


@pytest.mark.parametrize("waits", [False, True], ids=["ran", "had not begun"])
def test_the_first_failure_of_a_reset_is_not_its_second_for_another_env_that_had_to_go(make_actor, waits):
    actor = make_actor(on_failure="replay", begins=False)
    actor.reset(2, seed=1)
    actor.work()
    actor.deliver()
    actor.step(2, stream=True)
    actor.reset(3, seed=9)
    actor.work(WRITES_PER_ENV if waits else WRITES_PER_ENV + 4, raises=[2])
    assert actor.deliver() == {}, "env 2 is tried once more in another process"
    assert actor.worker.is_killed
    restart(actor)
    assert in_state(actor, POSTED) == [2, 3]
    actor.begin_env(3)
    restart(actor)
    assert in_state(actor, POSTED) == [3], "its first failure"
    actor.work()
    results = actor.deliver()
    assert results[3].obs == 3000 + actor.slab.completed[3]
    assert results[3].info == {}
    assert results[2].info == {}


def test_what_began_while_its_process_was_being_killed_for_another_env_has_failed_once(make_actor):
    actor = make_actor(on_failure="replay", deadlines=ea.Deadlines(step=5.0))
    actor.step()
    actor.begin_env(2)
    actor.supervisor.on_timer(time.monotonic() + 6.0)
    actor.work(WRITES_PER_ENV)
    actor.begin_env(3)
    restart(actor)
    assert in_state(actor, POSTED) == list(ENVS)
    actor.begin_env(3)
    restart(actor)
    actor.work()
    results = actor.deliver()
    assert "the same inputs have ended two processes" in str(results[3].info["failure"])
    assert [results[env].info for env in (2, 4)] == [{}, {}]


def test_requests_that_the_user_aborted_are_not_retried(make_actor):
    actor = make_actor(on_failure="replay")
    actor.step()
    actor.begin_env(3)
    actor.abort()
    actor.start()
    while actor.core.table.running is not None:
        actor.reply(True)
    assert in_state(actor, POSTED) == [4]
    actor.work()
    results = actor.deliver()
    assert results[3].info["failure"].aborted
    assert [results[env].info for env in (2, 4)] == [{}, {}]


def test_an_env_that_was_not_restored_is_reported(make_actor):
    """Its observations were others in the replay."""
    actor = make_actor(on_failure="replay")
    actor.step()
    actor.exit()
    actor.start()
    for same in (True, False, True):
        actor.reply(same)
    assert in_state(actor, POSTED) == [2, 4]
    actor.work()
    results = actor.deliver()
    assert isinstance(results[3].info["failure"], ea.ActorDiedError)
    assert [results[env].info for env in (2, 4)] == [{}, {}]


def test_an_exception_of_a_process_that_has_ended_discards_no_later_one(make_actor):
    """It is read only after the next process has brought its env back."""
    actor = make_actor(on_failure="replay")
    actor.step(stream=True)
    actor.work(WRITES_PER_ENV, raises=[2])
    actor.exit()
    actor.start()
    assert actor.deliver() == {}
    assert not actor.worker.is_killed
    assert [actor.reply(True).index for _ in ENVS] == list(ENVS), "all are restored before anything else"
    assert in_state(actor, POSTED) == list(ENVS)
    actor.work()
    assert [result.info for result in actor.deliver().values()] == [{}] * 3


# Renew ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_with_renew_the_last_result_is_repeated_or_the_next_process_resets(make_actor, autoreset):
    actor = make_actor(on_failure="renew", autoreset=autoreset)
    before = {env: 1000 * env + int(actor.slab.completed[env]) for env in ENVS}
    actor.step()
    actor.begin_env(3)
    actor.exit()
    if autoreset == "same_step":
        assert in_state(actor, ASKED) == [3, 4]
        actor.start()
        actor.work()
    results = actor.deliver()
    for env in (3, 4):
        failure = results[env].info["failure"]
        assert isinstance(failure, ea.ActorDiedError)
        assert failure.index == env
        assert results[env].truncated
        assert not results[env].terminated
        if autoreset == "same_step":
            assert results[env].info["final_obs"] == before[env]
            assert results[env].obs == 1000 * env + actor.slab.completed[env]
        else:
            assert results[env].obs == before[env]
    assert [slot.needs_reset for slot in actor.slots.of[2:5]] == [False] + [autoreset == "disabled"] * 2
    assert actor.slots.ended[2:5].tolist() == [False] + [autoreset == "next_step"] * 2


def test_an_env_that_raises_has_its_process_discarded_and_its_neighbours_reported(make_actor):
    actor = make_actor(on_failure="renew")
    actor.step(stream=True)
    actor.work(WRITES_PER_ENV + 4, raises=[2])
    results = actor.deliver()
    assert isinstance(results[2].info["failure"], ValueError)
    assert actor.worker.is_killed
    actor.exit()
    for env, result in actor.deliver().items():
        assert "was replaced since step raised ValueError" in str(result.info["failure"])
        assert result.info["failure"].index == env
    assert actor.core.restarts == 0
    actor.start()
    assert actor.core.restarts == 1


def test_an_actor_without_restarts_fails_its_queued_requests(make_actor):
    actor = make_actor(on_failure="renew")
    actor.supervisor.lifecycle.tracker._policy = ea.RestartPolicy(max_restarts=0)
    actor.step()
    actor.begin_env(3)
    actor.exit()
    results = actor.deliver()
    assert [type(results[env]) for env in (3, 4)] == [ea.ActorDiedError] * 2
    actor.reset(4)
    assert isinstance(actor.deliver()[4], ea.ActorDiedError)


# Resets that had not begun -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [8, 1 << 70])
def test_a_reset_that_had_not_begun_is_retried_with_the_same_arguments(make_actor, seed):
    actor = make_actor()
    actor.reset(3, seed=seed, options={"level": 2})
    restart(actor)
    assert actor.slab.posted[3] == actor.page.last_call
    assert actor.slots.ops[3] & (RESET | PAYLOAD) == RESET | PAYLOAD
    assert bool(actor.slots.ops[3] & SEED) is (seed == 8)
    (frame,) = [frame for frame in actor.worker.requests if frame.kind == Kind.PAYLOADS]
    assert frame.call_id == actor.slab.posted[3], "it belongs to the new number"
    ((position, content),) = bundle.unpack(frame.payload)
    large_seed, options = loads(content)
    assert (position, loads(options.content)) == (1, {"level": 2})
    assert (large_seed or int(actor.slab.seeds[3])) == seed
    actor.work()
    assert actor.deliver()[3].obs == 3000 + actor.slab.completed[3]


def test_a_reset_that_ends_processes_has_the_seed_of_the_user_twice_and_then_another(make_actor):
    actor = make_actor(on_failure="renew")
    actor.reset(3, seed=8)
    seeds = [actor.slots.seed_posted(3)]
    for _ in range(2):
        actor.begin_env(3)
        restart(actor)
        seeds.append(actor.slots.seed_posted(3))
    assert seeds == [8, 8, renewed_seed(8, 2)]
    actor.work()
    assert isinstance(actor.deliver()[3].info["failure"], ea.ActorDiedError)


def test_the_first_reset_in_a_later_process_has_another_seed_and_those_after_it_none(make_actor):
    actor = make_actor()
    restart(actor)
    seeds = []
    for _ in range(2):
        actor.reset(3)
        seeds.append(actor.slots.seed_posted(3))
        actor.work()
        actor.deliver()
    assert seeds == [renewed_seed(5, 1), None]


def test_an_episode_counts_if_its_reset_may_have_run(make_actor):
    """Its seed may be the cause."""
    actor = make_actor(on_failure="renew")
    for slot in actor.slots.of[2:5]:
        slot.next_seed = slot.root_seed = 11
    actor.slots.ended[2:5] = True
    actor.step()
    actor.begin_env(3)
    actor.exit()
    actor.deliver()
    assert [slot.next_seed for slot in actor.slots.of[2:5]] == [episode_seed(11, 1), episode_seed(11, 1), 11]


def test_an_env_that_was_put_into_a_state_continues_from_there(make_actor):
    actor = make_actor()
    restart(actor)
    restore = CallRequest("restore", 3, kind=Kind.RESTORE)
    actor.supervisor.calls.submit(restore, Restore(1, 0, b""))
    actor.reply(None)
    actor.step(3, 4)
    actor.work()
    results = actor.deliver()
    assert results[3].obs == 3000 + actor.slab.completed[3]
    assert isinstance(results[4], ea.ActorDiedError)
