"""Batch steps over rows and a page in plain memory: what runs, what is late, what is lost with a process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.actor.batch_step import FrameBatchStep, StepRequest
from envactors.actor.future import ActorFuture
from envactors.actor.requests import RequestTable
from envactors.actor.shm_batch_step import SharedMemoryBatchStep
from envactors.arrays.slab import RESET, Layout, Slab
from envactors.arrays.specs import ArraySpec
from envactors.wire.control_page import (
    ASLEEP,
    BEGUN,
    ENV_INDEX,
    FINISHED,
    METHOD,
    METHOD_CALL,
    METHOD_RESET,
    METHOD_STEP,
    PAGE,
    SINCE,
    ControlPage,
)
from envactors.wire.control_page import (
    STEP as LAST_STEP,
)
from envactors.wire.info_codec import FAILED, OVERFLOW, PLAIN, InfoReader
from envactors.wire.messages import Frame, Kind, Reset, Step
from envactors.wire.steps import Outcome, OutcomePacker

# The actor's envs among those of its vector: its first one has this index.
FIRST, COUNT = 2, 3
DEADLINES = ea.Deadlines(step=5.0, reset=50.0)


class Bell:
    def ring_open(self):
        pass


class Actor:
    """Rows, a page, and a worker that writes to them one number at a time."""

    def __init__(self):
        spec = ArraySpec((), np.dtype(np.float64))
        layout = Layout(spec, spec, spec, FIRST + COUNT + 1)
        self.rows = Slab(layout, bytearray(layout.size))
        self.page = ControlPage(bytearray(PAGE), Bell(), Bell())
        self.infos = InfoReader(self.rows)
        self.last_id = 0
        self.clock = 100.0
        self.ended = []

    def make(self, *envs, stream=False, bound=7):
        return SharedMemoryBatchStep(
            self.rows, self.infos, self.page, list(envs), FIRST, bound, self, self.reissue, stream=stream
        )

    def reissue(self, env):
        resets = self.rows.ops[env] == RESET
        message = Reset(env - FIRST, None, None, None) if resets else Step(env - FIRST, 0.0, False, None)
        return StepRequest(message, env, lambda *outcome: self.ended.append(outcome), 7, pickled=False)

    def start(self, step):
        self.last_id += 1
        self.clock += 1
        step.arm()
        step.start(self.last_id, self.clock, ASLEEP)
        return step

    def scan(self):
        """What the worker writes for what has been posted, as (function, env, what happens); see `StepRunner._run`."""
        call_id, rows, page = self.page.counters[LAST_STEP], self.rows, self.page
        due = [env for env in range(FIRST, FIRST + COUNT) if rows.requested[env] != rows.completed[env]]
        for env in due:
            number, method = int(rows.requested[env]), METHOD_RESET if rows.ops[env] == RESET else METHOD_STEP
            yield lambda: page.times.__setitem__(SINCE, self.tick()), env, "prepares"
            yield lambda m=method: page.counters.__setitem__(METHOD, m), env, "prepares"
            yield lambda e=env: page.counters.__setitem__(ENV_INDEX, e - FIRST), env, "prepares"
            yield lambda: page.counters.__setitem__(BEGUN, call_id), env, "runs"
            yield lambda e=env, n=number: rows.observations[0].__setitem__((n & 1, e), 1000 * e + n), env, "runs"
            yield lambda e=env: rows.info_encoding.__setitem__(e, PLAIN), env, "runs"
            yield lambda e=env, n=number: rows.completed.__setitem__(e, n), env, "has ended"
        yield lambda: page.counters.__setitem__(BEGUN, call_id), None, "has ended"
        yield lambda: page.counters.__setitem__(FINISHED, call_id), None, "has ended"

    def tick(self):
        self.clock += 1
        return self.clock

    def work(self, until=None):
        """Does the first numbers of a scan; returns the env that is at it and what it does."""
        at, doing = None, "has ended"
        for write, env, what in itertools.islice(self.scan(), until):
            write()
            at, doing = env, what
        return at, doing

    def run(self, step):
        self.start(step)
        self.work()
        step.over = True


@pytest.fixture
def actor():
    actor = Actor()
    actor.run(actor.make(2, 3, 4))  # a step before, whose results stand in the rows
    return actor


def indices(requests):
    return [request.index for request in requests]


# How many numbers a worker writes for one env, and in a scan of all envs.
WRITES_PER_ENV = 7
WRITES = WRITES_PER_ENV * COUNT + 2


@pytest.mark.parametrize("overs", [(), (3,), (2, 3, 4)], ids=["steps", "one resets", "all reset"])
@pytest.mark.parametrize("writes", range(WRITES + 1))
def test_a_death_splits_a_step_wherever_its_worker_was(actor, writes, overs):
    for env in overs:
        actor.rows.ops[env] = RESET
    before = actor.rows.completed.copy()
    step = actor.start(actor.make(2, 3, 4))
    at, doing = actor.work(writes)
    complete = {env for env in (2, 3, 4) if actor.rows.completed[env] == before[env] + 1}

    current, waiting = step.split(actor.page, blame=False)

    lost = [env for env in (2, 3, 4) if env not in complete]
    assert list(step.failed_envs) == lost
    assert sorted([*indices(waiting), *([] if current is None else [current.index])]) == lost
    assert indices(waiting) == sorted(indices(waiting)), "in the order in which they run"
    if doing == "runs":
        assert current is not None, "its env may have run code"
        assert current.index == at
        assert current.started == actor.page.times[SINCE]
        assert current.method == ("reset" if at in overs else "step")
    elif current is not None:
        assert (current.index, doing) == (at, "prepares"), "it was the next one, and about to begin"
    assert {request.call_id for request in (*waiting, *filter(None, [current]))} <= {step.call_id}
    # What was asked of a lost env is taken back: its last result is the one before.
    assert step.over
    for env in (2, 3, 4):
        number = int(actor.rows.completed[env])
        assert number == actor.rows.requested[env] == before[env] + (env in complete)
        assert actor.rows.observations[0][number & 1, env] == 1000 * env + number, "whole"


def test_a_step_of_some_envs_leaves_the_others_alone(actor):
    requested = actor.rows.requested.copy()
    step = actor.start(actor.make(3))
    current, waiting = step.split(actor.page, blame=False)
    assert (current, indices(waiting)) == (None, [3])
    assert (actor.rows.requested == requested).all()


@pytest.mark.parametrize("writes", [0, 4, 7, 11, 14, 18, 21, 23])
def test_several_steps_that_were_posted_at_once_are_split_each_for_itself(actor, writes):
    """The scan for the first of them also runs the envs of the others."""
    first, second, third = actor.make(3), actor.make(4), actor.make(2)
    for step in (first, second, third):
        actor.start(step)
    at, doing = actor.work(writes)
    lost, current = [], []
    for step in (first, second, third):
        one, others = step.split(actor.page, blame=False)
        current += [] if one is None else [one]
        lost += [*indices(others), *([] if one is None else [one.index])]
        assert set(step.failed_envs) <= set(step.envs)
    assert sorted(lost) == [env for env in (2, 3, 4) if env >= FIRST + writes // WRITES_PER_ENV]
    assert indices(current) == ([at] if doing == "runs" else [])
    assert (actor.rows.requested == actor.rows.completed).all()


def test_a_result_that_was_claimed_is_not_lost(actor):
    step = actor.start(actor.make(2, 3, 4, stream=True))
    actor.work(9)  # the second env prepares
    assert [env for env in step.envs if step.complete(env)] == [2]
    step.claimed.add(2)
    after = actor.start(actor.make(2))  # the env that was claimed is asked again meanwhile
    assert not step.complete(2)
    step.split(actor.page, blame=False)
    assert step.failed_envs == [3, 4]
    after.split(actor.page, blame=False)
    assert after.failed_envs == [2]
    # Another run of the same step knows nothing of that.
    actor.start(step)
    assert (step.claimed, step.failed_envs, step.over) == (set(), (), False)
    assert not any(step.complete(env) for env in step.envs)


@pytest.mark.parametrize("streamed_before", [False, True])
def test_a_step_that_waits_in_the_queue_has_no_results(actor, streamed_before):
    step = actor.make(2, 3, 4, stream=True)
    if streamed_before:
        actor.run(step)
        step.claimed = {2, 3, 4}
    before = actor.rows.requested.copy()
    step.arm()
    step.call_id = actor.last_id + 1
    assert not step.over
    assert not any(step.complete(env) for env in step.envs), "those in the rows are of the step before"
    assert not step.finished
    current, waiting = step.split(None, blame=True)
    assert current is None, "it has not begun"
    assert indices(waiting) == list(step.failed_envs) == [2, 3, 4]
    assert step.over
    assert (actor.rows.requested == before).all()
    assert (actor.rows.completed == before).all()


@pytest.mark.parametrize("encoding", [OVERFLOW, FAILED])
def test_a_result_is_complete_with_what_comes_beside_it(actor, encoding):
    step = actor.start(actor.make(2, 3, 4))
    actor.work()
    actor.rows.info_encoding[3] = encoding
    assert [env for env in step.envs if step.complete(env)] == [2, 4]
    step.overflow[3] = memoryview(b"what did not fit")
    assert all(step.complete(env) for env in step.envs)
    actor.start(step)
    assert step.overflow == {}


def test_an_overflow_that_never_came_is_a_lost_result(actor):
    step = actor.start(actor.make(2, 3, 4))
    actor.work()
    actor.rows.info_encoding[4] = OVERFLOW
    current, waiting = step.split(actor.page, blame=False)
    assert (current, indices(waiting)) == (None, [4])
    assert actor.rows.completed[4] == actor.rows.requested[4] == 1


# Deadlines -----------------------------------------------------------------------------------------------


def test_a_deadline_is_that_of_the_env_that_runs(actor):
    actor.rows.ops[3] = RESET
    step = actor.start(actor.make(2, 3, 4))
    # Nobody has begun: the worker itself is late, from when it was asked.
    assert step.next_look(actor.page, DEADLINES, step.started + 1) == step.started + 5.0
    actor.work(5)
    since = actor.page.times[SINCE]
    assert step.next_look(actor.page, DEADLINES, since + 1) == since + 5.0
    actor.work(12)  # the first again, and then the second, which resets
    since = actor.page.times[SINCE]
    assert actor.page.counters[METHOD] == METHOD_RESET
    assert step.next_look(actor.page, DEADLINES, since + 1) == since + 50.0
    assert step.next_look(actor.page, ea.Deadlines(step=5.0), since + 1) == since + 1 + 5.0, "a reset has none"


@pytest.mark.parametrize("comes_late", [False, True])
@pytest.mark.parametrize(("writes", "overdue"), [(0, 2), (5, 2), (12, 3), (19, 4)])
def test_an_env_that_is_overdue_is_the_one_that_was_running_and_no_result_of_it_counts(
    actor, writes, overdue, comes_late
):
    step = actor.start(actor.make(2, 3, 4))
    actor.work(writes)
    assert step.next_look(actor.page, DEADLINES, actor.clock + 60) is None
    if comes_late:
        actor.work()
    assert not step.complete(overdue)
    current, waiting = step.split(actor.page, blame=True)
    assert current is not None
    assert current.index == overdue
    assert indices(waiting) == ([] if comes_late else [env for env in (2, 3, 4) if env > overdue])
    for env in (2, 3, 4):
        number = int(actor.rows.completed[env])
        assert actor.rows.requested[env] == number == 1 + (env not in step.failed_envs)
    # It may be made again.
    actor.start(step)
    actor.work()
    assert all(step.complete(env) for env in step.envs)


# Frames --------------------------------------------------------------------------------------------------


def make_frames(*messages, stream=True):
    requests = []
    for message in messages:
        request = StepRequest(message, FIRST + message.env, lambda *_: None, 7, pickled=True)
        request.future = ActorFuture(None, None)
        requests.append(request)
    entry = FrameBatchStep(requests, stream=stream)
    entry.call_id, entry.started = 40, 100.0
    return entry


def steps_of(*positions):
    return [Step(position, 0.5, False, None) for position in positions]


def outcomes(*positions, failed=()):
    packer = OutcomePacker(pickles=True)
    for position in positions:
        packer.add_transition(position, 11 * position, (position, 0.0, False, False, {}))
    for position in failed:
        packer._ready.append((position, Outcome(0, True, b"failure")))
    return Frame(Kind.OUTCOMES, 7, 40, packer.take_payload())


def page_at(call_id, position, method=METHOD_STEP, *, ended=False):
    page = ControlPage(bytearray(PAGE), Bell(), Bell())
    page.times[SINCE], page.last_call = 123.0, call_id
    page.counters[METHOD], page.counters[ENV_INDEX] = method, position
    page.counters[BEGUN], page.counters[FINISHED] = call_id, call_id if ended else call_id - 1
    return page


@settings(max_examples=examples(100))
@given(st.permutations([0, 1, 2]), st.lists(st.integers(0, 2), unique=True), st.booleans(), st.integers(0, 3))
def test_each_env_of_a_frame_ends_once_whether_by_its_outcome_or_by_a_split(order, answered, stream, running):
    entry = make_frames(*steps_of(*order), stream=stream)
    assert [item.number for item in entry.message.items] == list(order)
    assert entry.message.stream is stream
    ended = []
    for position in answered:
        answers, over = entry.answers(outcomes(position))
        entry.discard(answers)
        ended += [answer.request.index for answer in answers]
        assert [answer.check for answer in answers] == [11 * position]
        assert all(answer.request.started == 100.0 for answer in answers)
        assert over is (len(ended) == 3)
    page = page_at(39 if running == 3 else 40, 0 if running == 3 else running)
    current, waiting = entry.split(page, blame=False)
    assert (None if current is None else current.position) == (None if running == 3 or running in answered else running)
    gone = [*answered, *([] if current is None else [current.position])]
    rest = [position for position in order if position not in gone]
    assert [request.position for request in waiting] == rest
    everything = [*ended, *indices(waiting), *([] if current is None else [current.index])]
    assert sorted(everything) == [2, 3, 4]
    assert entry.parts == ()


@pytest.mark.parametrize("blame", [False, True])
@pytest.mark.parametrize(
    "page", [None, page_at(39, 1), page_at(39, 1, METHOD_CALL)], ids=["no page", "a step before", "a call"]
)
def test_a_frame_that_had_not_begun_is_to_blame_only_for_its_own_deadline(page, blame):
    entry = make_frames(*steps_of(2, 0))
    for request in entry.parts:
        request.started = 50.0  # it is tried again
    current, waiting = entry.split(page, blame=blame)
    assert (None if current is None else current.position) == (2 if blame else None)
    assert [request.position for request in waiting] == ([0] if blame else [2, 0])
    assert {request.started for request in waiting} == {0.0}


def test_a_step_that_resets_is_lost_in_a_reset():
    current, _ = make_frames(*steps_of(0, 1)).split(page_at(40, 1, METHOD_RESET), blame=False)
    assert (current.position, current.method, current.started) == (1, "reset", 123.0)


def test_what_could_not_be_sent_back_fails_its_own_env():
    entry = make_frames(*steps_of(0, 1))
    answers, over = entry.answers(outcomes(0, failed=[1]))
    assert [(answer.request.position, answer.failed) for answer in answers] == [(0, False), (1, True)]
    assert over


def test_the_deadline_of_a_frame_is_that_of_the_env_that_runs():
    entry = make_frames(Step(0, 0.5, False, None), Reset(1, 3, None, None))
    assert entry.next_look(None, DEADLINES, 101.0) == 105.0
    assert entry.next_look(page_at(40, 0), DEADLINES, 124.0) == 128.0
    assert entry.next_look(page_at(40, 1, METHOD_RESET), DEADLINES, 124.0) == 173.0
    assert entry.next_look(page_at(40, 0), DEADLINES, 129.0) is None
    assert entry.next_look(page_at(41, 0), DEADLINES, 129.0) is None, "another request's progress says nothing of it"
    assert entry.next_look(page_at(40, 0), ea.Deadlines(), 129.0) == float("inf")


def test_a_submitted_step_is_withdrawn_alone():
    entry = make_frames(*steps_of(0, 1))
    first, second = entry.parts
    assert entry.withdraw(ActorFuture(None, None)) is None
    assert entry.withdraw(first.future) is first
    assert entry.parts == (second,)
    table = RequestTable()
    table.queue.append(entry)
    assert table.start_next() is entry
    assert second.future.running()
    assert not first.future.running()
    assert second.call_id == 40
