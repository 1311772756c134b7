"""What an env is posted, and which envs need the episode that they had; the short way of steps of all envs."""

from __future__ import annotations

import numpy as np
import pytest
from plainrows import WRITES_PER_ENV, PlayedActor, make_slots

from envactors.actor.future import ActorFuture
from envactors.actor.slots import IDLE, LOST, NO_EPISODE, POSTED, READING, Op
from envactors.envs.selection import Selection
from envactors.mailbox.control_page import ASLEEP
from envactors.mailbox.messages import episode_seed, renewed_seed
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, RESET, RING, SEED
from envactors.vector.stepper import Stepper

ACTION = bytes(dumps(3.0))
OPTIONS = bytes(dumps({"level": 2}))


def plan(slots, index=0, *, incarnation=0):
    """The bits, the seed and the payload of what an env is posted."""
    payload = slots.plan(index, incarnation)
    bits = slots.ops[index]
    return bits, int(slots.slab.seeds[index]) if bits & SEED else None, payload


# What is posted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, HALF])
def test_a_result_goes_to_the_half_that_does_not_hold_the_last_one(half):
    slots = make_slots(2)
    slots.halves[1] = half
    assert plan(slots, 1) == (half ^ HALF, None, None)
    assert slots.halves[1] == half, "until it is complete"


@pytest.mark.parametrize(
    ("op", "ended", "bits", "payload"),
    [
        (None, False, 0, None),
        (None, True, RESET, None),
        (Op("step", payload=ACTION), False, PAYLOAD, ACTION),
        (Op("step", payload=ACTION), True, RESET, None),
        (Op("step", resets=True, failure=ValueError()), False, RESET, None),
        (Op("step", future=ActorFuture(None, None)), False, RING, None),
        (Op("step", future=ActorFuture(None, None)), True, RING | RESET, None),
        (Op("reset", resets=True), False, RESET, None),
        (Op("reset", resets=True, seed=7), False, RESET | SEED, None),
    ],
    ids=["step", "autoreset", "action", "action of an autoreset", "renewal", "future", "both", "reset", "seeded reset"],
)
def test_the_slots_tell_the_worker_whether_to_step_or_reset(op, ended, bits, payload):
    slots = make_slots(1)
    slots.of[0].op = op
    slots.ended[0] = ended
    assert plan(slots) == (HALF | bits, 7 if bits & SEED else None, payload)


@pytest.mark.parametrize("seed", [None, 7, (1 << 64) - 1, 1 << 64, 1 << 100])
def test_a_reset_takes_its_seed_and_options_wherever_they_fit(seed):
    slots = make_slots(1)
    slots.of[0].op = Op("reset", resets=True, seed=seed, payload=OPTIONS)
    bits, small, payload = plan(slots)
    large, options = loads(payload)
    assert bits & (RESET | PAYLOAD) == RESET | PAYLOAD
    assert loads(options.content) == {"level": 2}
    assert (small, large) == ((None, seed) if seed is not None and seed >= 1 << 64 else (seed, None))
    assert slots.seed_posted(0) == seed


def test_a_large_seed_alone_is_a_payload():
    slots = make_slots(1)
    slots.of[0].op = Op("reset", resets=True, seed=1 << 64)
    bits, small, payload = plan(slots)
    assert (bits & SEED, small, loads(payload)) == (0, None, (1 << 64, None))


@pytest.mark.parametrize("incarnation", [0, 2])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("root_seed", [None, 11])
def test_the_first_reset_of_a_later_process_has_a_seed_of_its_own(incarnation, fresh, root_seed):
    slots = make_slots(1)
    slots.of[0].op = Op("reset", resets=True)
    slots.of[0].fresh, slots.of[0].root_seed = fresh, root_seed
    _, seed, _ = plan(slots, incarnation=incarnation)
    has_one = fresh and incarnation > 0 and root_seed is not None
    assert seed == (renewed_seed(11, 2) if has_one else None)


def test_episodes_that_are_seeded_have_the_seed_of_the_next_one_unless_the_user_gives_another():
    slots = make_slots(1, autoreset="same_step")
    slot = slots.of[0]
    slot.next_seed = slot.root_seed = 11
    slot.count_episode()
    assert plan(slots)[1] == episode_seed(11, 1), "of a reset within the step"
    slots.ended[0] = True
    assert plan(slots, incarnation=3)[:2] == (HALF | RESET | SEED, episode_seed(11, 1))
    slot.op = Op("reset", resets=True, seed=4)
    assert plan(slots)[1] == 4


@pytest.mark.parametrize(("autoreset", "bit"), [("next_step", 0), ("same_step", NO_AUTORESET), ("disabled", 0)])
def test_an_env_that_is_to_leave_its_process_is_not_reset_within_its_last_step(autoreset, bit):
    slots = make_slots(1, autoreset=autoreset)
    slots.of[0].retiring = True
    assert plan(slots)[0] == HALF | bit
    slots.of[0].op = Op("reset", resets=True)
    assert plan(slots)[0] == HALF | RESET


def test_observations_in_different_halves_are_brought_together():
    slots = make_slots(4)
    slots.halves[:] = bytes([0, 1, 0, 1])
    slots.slab.observations[0][:] = [[0, 10, 20, 30], [1, 11, 21, 31]]
    slots.slab.checks[:] = [[5, 6, 7, 8], [15, 16, 17, 18]]
    slots.align_halves(1)
    assert slots.slab.observations[0][1].tolist() == [0, 11, 20, 31]
    assert slots.slab.checks[1].tolist() == [5, 16, 7, 18]
    assert slots.halves == bytes([1] * 4)


# Which envs need the episode that they had ---------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@pytest.mark.parametrize("retiring", [False, True])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("asked", ["step", "action", "reset", "renewal", "ending"])
def test_a_step_needs_its_episode_and_a_reset_does_not(on_failure, retiring, ended, asked):
    slots = make_slots(1, on_failure=on_failure)
    slots.ended[0] = ended
    slots.of[0].retiring = retiring
    slots.of[0].op = {
        "step": None,
        "action": Op("step", payload=ACTION),
        "reset": Op("reset", resets=True),
        "renewal": Op("step", resets=True, failure=ValueError()),
        "ending": Op("step", resets=True, ending=object()),
    }[asked]
    is_reset = asked in ("reset", "renewal", "ending")
    # Other failures between two episodes are reported first.
    is_free_autoreset = ended and (on_failure == "raise" or retiring)
    assert slots.is_bound(0) is not (is_reset or is_free_autoreset)


def test_only_episodes_that_were_there_are_lost():
    slots = make_slots(4)
    for index, holds in enumerate((0, NO_EPISODE, 3, 5)):
        slots.of[index].holds = holds
        slots.of[index].fresh = False
    slots.unusual.clear()
    slots.lose_episodes(0, 3)
    assert [slot.holds for slot in slots.of] == [LOST, NO_EPISODE, LOST, 5]
    assert [slot.fresh for slot in slots.of] == [True, True, True, False]
    assert slots.unusual == {0, 1, 2}


def test_an_env_is_usual_once_its_process_has_given_it_a_result():
    changes = {
        "holds": LOST,
        "incarnation": 2,
        "counted_in": 2,
        "needs_reset": True,
        "retiring": True,
        "op": Op("step"),
    }
    for name, value in [*changes.items(), (None, None)]:
        slots = make_slots(1)
        slot = slots.of[0]
        slot.holds, slot.needs_reset, slots.has_last[0] = 0, False, True
        if name is not None:
            setattr(slot, name, value)
        slots.note_usual(0)
        assert slots.unusual == (set() if name is None else {0}), name
    slots.has_last[0] = False
    slots.unusual.add(0)
    slots.note_usual(0)
    assert slots.unusual == {0}


# All envs at once ----------------------------------------------------------------------------------------


class LoneActor(PlayedActor):
    """An actor with all envs of its vector."""

    FIRST, COUNT = 0, 3
    ENVS = (0, 1, 2)
    AFTER = 0

    def __init__(self, reactor, **options):
        super().__init__(reactor, **options)
        self.stepper = Stepper(self.vector, self.asker)

    def close(self):
        del self.stepper  # and with it the descriptors of its wait set
        super().close()


@pytest.fixture(params=["raise", "replay"])
def actor(reactor, request):
    actor = LoneActor(reactor, on_failure=request.param)
    actor.begin()
    yield actor
    actor.close()


def post_all(actor):
    """Starts a step of all envs; returns whether they were posted at once."""
    return post_some(actor, actor.stepper.all)


def post_some(actor, envs):
    """Starts a step of some envs; returns whether they were posted at once."""
    resets = actor.stepper.write_rows(envs, np.array(envs.env_ids, np.float64))
    actor.posted = actor.stepper.prepare(envs, resets, 100.0)
    if actor.posted is None:
        return False
    actor.stepper._post_and_ring(actor.posted, ASLEEP)
    return True


def arrive(actor):
    """Takes the results of the step into account; returns whether that could be done at once."""
    return actor.stepper.arrive(actor.posted)


def test_all_envs_at_once_have_the_results_that_each_for_itself_has(actor):
    results = []
    for _ in range(2):
        assert post_all(actor)
        actor.work()
        assert arrive(actor)
        assert [actor.slots.states[env] for env in actor.ENVS] == [READING] * 3
        actor.stepper._give_back(actor.posted.envs)
        results.append(actor.deliver())
        actor.step()
        actor.work()
        results.append(actor.deliver())
    numbers = range(4, 8)  # after those of the rows being attached, a reset and a step
    assert [[one[env].obs for env in actor.ENVS] for one in results] == [
        [1000 * env + number for env in actor.ENVS] for number in numbers
    ]
    journals = [actor.core.recovery.journal(env) for env in actor.ENVS]
    if actor.core.recovery.replays:
        assert [journal.length for journal in journals] == [5] * 3, "the one step before, and these four"


def test_all_envs_are_posted_at_once_only_if_nothing_waits_or_is_out_of_the_ordinary(actor):
    posted = actor.slab.posted.copy()
    actor.slots.unusual.add(2)
    assert not post_all(actor)
    actor.slots.unusual.clear()
    actor.exit()
    assert not post_all(actor), "there is no process"
    assert (actor.slab.posted == posted).all()
    assert [actor.slots.states[env] for env in actor.ENVS] == [IDLE] * 3


@pytest.mark.parametrize("env_ids", [[1], [2, 0], [0, 2, 1]])
def test_some_envs_at_once_have_the_results_that_each_for_itself_has(actor, env_ids):
    number = actor.core.config.ids.last + 1
    assert post_some(actor, Selection(env_ids))
    assert [actor.slots.states[env] for env in actor.ENVS] == [POSTED if env in env_ids else IDLE for env in actor.ENVS]
    actor.work()
    obs, _, _, _, infos = actor.stepper.gather(actor.posted)
    assert obs.tolist() == [1000 * env + number for env in env_ids]
    assert infos == [{}] * len(env_ids)
    assert actor.slots.states == actor.slots.zeros
    assert actor.episodes.steps.tolist() == [1 + (env in env_ids) for env in actor.ENVS]
    if actor.core.recovery.replays:
        lengths = [actor.core.recovery.journal(env).length for env in actor.ENVS]
        assert lengths == [1 + (env in env_ids) for env in actor.ENVS]


def test_some_envs_are_posted_at_once_only_if_no_other_env_of_their_actor_runs(actor):
    actor.step(0, stream=True)
    assert not post_some(actor, Selection([1, 2]))
    assert [actor.slots.states[env] for env in actor.ENVS] == [POSTED, IDLE, IDLE]
    actor.work()
    actor.deliver()
    assert post_some(actor, Selection([1, 2]))


def test_some_envs_are_taken_at_once_whatever_is_out_of_the_ordinary_with_others(actor):
    actor.step(0)
    actor.work(large=[0])
    assert actor.deliver()[0].info == {"large": "x" * 10_000}
    actor.slots.unusual.add(0)
    assert post_some(actor, Selection([2, 1]))
    actor.work()
    assert arrive(actor)


def test_an_autoreset_of_some_envs_is_no_step(actor):
    actor.slots.ended[:] = [True, False, True]
    assert post_some(actor, Selection([1, 2]))
    assert [actor.slots.ops[env] & RESET for env in (1, 2)] == [0, RESET]
    actor.work()
    assert actor.stepper.gather(actor.posted) is not None
    assert actor.slots.ended.tolist() == [True, False, False]
    assert actor.episodes.steps.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("env_ids", "ranges"),
    [([], []), ([3], [(3, 4)]), ([5, 0, 1, 4, 2], [(0, 3), (4, 6)]), ([2, 0], [(0, 1), (2, 3)])],
)
def test_consecutive_ids_are_taken_together(env_ids, ranges):
    envs = Selection(env_ids)
    assert [(each.start, each.stop) for each in envs.ranges] == ranges
    assert envs.index.tolist() == env_ids


@pytest.mark.parametrize("writes", range(3 * WRITES_PER_ENV))
def test_a_step_of_all_envs_has_not_ended_before_its_rows_are_complete(actor, writes):
    assert post_all(actor)
    actor.work(writes)
    assert not arrive(actor)
    assert [actor.slots.states[env] for env in actor.ENVS] == [POSTED] * 3
    actor.work()
    assert arrive(actor)


@pytest.mark.parametrize("what", ["raises", "large"])
def test_a_result_with_more_than_its_row_is_looked_at_alone(actor, what):
    assert post_all(actor)
    actor.work(**{what: [1]})
    assert not arrive(actor)
    assert [actor.slots.states[env] for env in actor.ENVS] == [POSTED] * 3
    results = actor.deliver()
    if what == "large":
        assert results[1].info == {"large": "x" * 10_000}
    elif actor.slots.on_failure == "raise":
        assert isinstance(results[1], ValueError)
    else:
        assert actor.worker.is_killed, "it is tried once more"
    assert results[2].obs == 2000 + actor.slab.completed[2]
