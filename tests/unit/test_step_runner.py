"""The worker's half of a step, driven without a parent: rows of memory, and the items of frames."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SOON

from envactors.arrays.slab import RESET, STEP, Layout
from envactors.arrays.specs import ArraySpec
from envactors.backends.local import LocalMemory
from envactors.system.choice import PORTABLE
from envactors.system.polling import Doorbell
from envactors.wire import bundle
from envactors.wire.control_page import (
    ASLEEP,
    BEGUN,
    ENV_INDEX,
    FINISHED,
    METHOD,
    METHOD_CALL,
    METHOD_RESET,
    METHOD_STEP,
    OVERFLOWS,
    PAGE,
    ControlPage,
)
from envactors.wire.info_codec import InfoReader, InfoWriter
from envactors.wire.messages import Attach, Call, Close, Failure, Fault, Frame, Kind, Replay, Reset, Start, Step, Steps
from envactors.wire.pickling import dumps, dumps_by_value, loads, unpack_failure
from envactors.wire.steps import PickledItem, pack_item, pack_steps, unpack_outcomes
from envactors.worker.main import Server
from envactors.worker.step_runner import WorkerRetiredError, WriteGuard

OBSERVATION, ACTION, REWARD = (ArraySpec(shape, np.dtype(np.float64)) for shape in ((2,), (), ()))


class Box:
    def __init__(self, shape):
        self.shape, self.dtype = shape, np.dtype(np.float64)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("not me")


def unpickle_badly():
    raise RuntimeError("boom on arrival")


class ExplodesOnArrival:
    def __reduce__(self):
        return unpickle_badly, ()


class Scripted:
    """Counts its steps; action 2 ends an episode, 3 raises, 4 has an info that does not pickle, 5 a large one."""

    def __init__(self):
        self.observation_space, self.action_space = Box((2,)), Box(())
        self.obs, self.steps, self.seed, self.info = np.zeros(2), 0, None, {"same": [0]}
        self.hook = None

    def reset(self, *, seed=None, options=None):
        self.steps, self.seed = 0, seed
        self.obs[:] = 100 if seed is None else seed
        return self.obs, {"options": options} if options else {}

    def step(self, action):
        if self.hook is not None:
            self.hook()
        if action == 3:
            raise ValueError(f"step {self.steps}")
        self.steps += 1
        self.obs[:] = self.steps, action
        info = {}
        if action == 4:
            info = {"stuck": Unpicklable()}
        elif action == 5:
            info = {"large": "x" * 10_000}
        elif action == 6:
            self.info["same"][0] = self.steps
            info = self.info
        return self.obs, float(action), action == 2, action == 7, info


class Parent:
    """Stands for a worker's parent: posts what is asked and collects the replies."""

    def __init__(self, count=3, autoreset=False, pickles=True, guard=None):
        self.page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
        self.requests, self.replies = [], []
        self.pickles = pickles
        self.call_id = 0
        layout = Layout(OBSERVATION, ACTION, REWARD, count)
        self.memory = LocalMemory()
        self.slab, self.infos = self.memory.create(layout)
        if pickles:
            self.infos = InfoReader(self.slab)
        self.server = Server(self, self.page, self.open_rows, guard)
        start = Start("actor", 0, [dumps_by_value(Scripted)] * count, ([], []), Attach(layout, autoreset), journal=True)
        self.ask(Kind.START, dumps(tuple(start)))
        self.server.run_posted()
        assert [frame.kind for frame in self.take_replies()] == [Kind.ENV_MADE] * (count - 1) + [Kind.RESULT]

    def open_rows(self, layout):
        slab, infos = self.memory.open(layout)
        return slab, InfoWriter(slab) if self.pickles else infos

    # The worker's end of the channel

    def fileno(self):
        return -1

    def send(self, frame):
        self.replies.append(frame)

    def receive(self):
        frames, self.requests = self.requests, []
        return frames

    # The parent's

    def take_replies(self):
        replies, self.replies = self.replies, []
        return replies

    @property
    def envs(self):
        return [hosted.env for hosted in self.server._runner._host.hosted_envs]

    def ask(self, kind, payload):
        self.requests.append(Frame(kind, 7, self.call_id, payload))
        self.page.post_frame()
        self.call_id += 1

    def post_rows(self, actions, ops=None, stream=False):
        """Posts a step of these envs, a mapping of env and action."""
        self.call_id += 1
        for env, action in actions.items():
            self.slab.actions[0][env] = action
            self.slab.ops[env] = STEP if ops is None else ops[env]
        for env in actions:
            self.slab.requested[env] += 1
        self.page.post_step(self.call_id, ASLEEP, stream)
        return self.call_id

    def overflow(self):
        return {i: part for f in self.take_replies() if f.kind == Kind.OVERFLOW for i, part in bundle.unpack(f.payload)}

    def read_row(self, env, overflow=None):
        """An env's result: a transition's fields and the checksum, or its failure."""
        slab, half = self.slab, int(self.slab.requested[env]) & 1
        assert slab.completed[env] == slab.requested[env]
        part = (overflow or {}).get(env)
        if self.infos.failed(env):
            return self.infos.failure(env, part)
        info, _ = self.infos.decode(env, part)
        obs = slab.observations[0][half, env].tolist()
        flags = bool(slab.terminated[env]), bool(slab.truncated[env])
        return (obs, float(slab.rewards[env]), *flags, info), int(slab.checks[half, env])

    def run_rows(self, actions, ops=None):
        self.post_rows(actions, ops)
        self.server.run_posted()
        overflow = self.overflow()
        return {env: self.read_row(env, overflow) for env in actions}

    def run_items(self, items, stream=False):
        stream = stream or self.pickles  # between processes outcomes always stream
        if self.pickles:
            items = [item if isinstance(item, PickledItem) else pack_item(item) for item in items]
        self.ask(Kind.STEPS, pack_steps(Steps(items, stream), self.pickles))
        self.server.run_posted()
        frames = self.take_replies()
        assert all(frame.kind == Kind.OUTCOMES and frame.call_id == self.call_id - 1 for frame in frames)
        received = [pair for frame in frames for pair in unpack_outcomes(frame.payload)]
        self.frames = len(frames)
        return {env: as_result(outcome) for env, outcome in received}


@pytest.fixture
def make_parent():
    parents = []

    def make(**options):
        parents.append(Parent(**options))
        return parents[-1]

    yield make
    for parent in parents:
        parent.page.to_worker.close()
        parent.page.to_parent.close()


def as_result(outcome):
    content = outcome.content if isinstance(outcome.content, tuple) else loads(outcome.content)
    if outcome.failed:
        return Failure(*content)
    obs, *rest = content
    return (obs.tolist(), *rest), outcome.check


def step(env, action, autoreset=False):
    return Step(env, np.float64(action), autoreset, None)


def as_text(result):
    if isinstance(result, Failure):
        return result.fault, result.text
    return repr(result)


@pytest.fixture(params=[True, False], ids=["pickled", "objects"])
def pickles(request):
    return request.param


@pytest.mark.parametrize("autoreset", [False, True])
def test_both_carriers_lead_to_equal_results(make_parent, pickles, autoreset):
    rows, items = make_parent(autoreset=autoreset, pickles=pickles), make_parent(pickles=pickles)
    for parent in (rows, items):
        parent.run_items([Reset(env, 10 + env, None, None) for env in range(3)])
    script = [(0, 1, 2), (1, 2, 3), (5, 0, 7), (4, 6, 6), (2, 2, 2), (1, 1, 1)]
    for actions in script:
        by_row = rows.run_rows(dict(enumerate(actions)))
        by_item = items.run_items([step(env, action, autoreset) for env, action in enumerate(actions)])
        assert {env: as_text(result) for env, result in by_row.items()} == {
            env: as_text(result) for env, result in by_item.items()
        }
    assert [vars(env)["steps"] for env in rows.envs] == [vars(env)["steps"] for env in items.envs]


def test_resets_through_both_carriers_are_equal(make_parent, pickles):
    rows, items = make_parent(pickles=pickles), make_parent(pickles=pickles)
    for parent in (rows, items):
        parent.run_items([Reset(0, 5, None, None)])
    by_row, by_item = rows.run_rows({0: 0}, {0: RESET}), items.run_items([Reset(0, None, None, None)])
    assert as_text(by_row[0]) == as_text(by_item[0])
    assert by_row[0][0] == ([100, 100], 0.0, False, False, {})


def test_an_ended_episode_is_reset_within_the_step(make_parent):
    parent = make_parent(autoreset=True)
    parent.run_items([Reset(0, 5, None, None)])
    (obs, reward, terminated, truncated, info), _ = parent.run_rows({0: 2})[0]
    assert (obs, reward, terminated, truncated) == ([100, 100], 2.0, True, False)
    assert info["final_obs"].tolist() == [1, 2]
    assert info["final_info"] == {}


def test_items_are_run_in_their_order_and_know_their_options(make_parent, pickles):
    parent = make_parent(pickles=pickles)
    order = []
    for position, env in enumerate(parent.envs):
        env.hook = lambda position=position: order.append(position)
    results = parent.run_items([step(2, 1), Reset(1, 4, {"a": 1}, None), step(0, 1)])
    assert order == [2, 0]
    assert list(results) == [2, 1, 0]
    assert results[1][0][4] == {"options": {"a": 1}}


@pytest.mark.parametrize(("pickles", "stream"), [(True, True), (False, True), (False, False)])
def test_outcomes_come_one_by_one_or_together(make_parent, stream, pickles):
    parent = make_parent(pickles=pickles)
    results = parent.run_items([step(env, 1) for env in range(3)], stream)
    assert parent.frames == (3 if stream else 1)
    assert len(results) == 3


def test_a_result_that_does_not_pickle_fails_its_env_alone(make_parent):
    parent = make_parent()
    for results in (
        parent.run_items([step(0, 1), step(1, 4), step(2, 1)]),
        parent.run_rows({0: 1, 1: 4, 2: 1}),
    ):
        assert isinstance(results[1], Failure)
        assert results[1].fault == Fault.RESULT
        assert "not me" in results[1].text
        assert not any(isinstance(results[env], Failure) for env in (0, 2))


def test_an_item_that_does_not_unpickle_fails_its_env_alone(make_parent):
    parent = make_parent()
    broken = PickledItem(1, dumps(ExplodesOnArrival()))
    results = parent.run_items([step(0, 1), broken, step(2, 1)])
    assert results[1].fault == Fault.ARGUMENTS
    assert "boom on arrival" in results[1].text
    assert [parent.envs[env].steps for env in range(3)] == [1, 0, 1]


def test_an_env_that_raises_keeps_no_other_from_its_step(make_parent, pickles):
    parent = make_parent(pickles=pickles)
    for results in (parent.run_items([step(0, 3), step(1, 1)]), parent.run_rows({0: 3, 1: 1})):
        assert isinstance(unpack_failure(results[0]), ValueError)
        assert results[0].fault == Fault.RAISED
    assert parent.envs[1].steps == 2


def test_a_value_of_a_wrong_shape_is_the_envs_fault(make_parent):
    parent = make_parent()
    parent.envs[0].obs = np.zeros(3)
    parent.envs[1].step = lambda action: (np.zeros(2), 0.0, np.zeros(2), False, {})
    for results in (parent.run_items([step(0, 1), step(1, 1)]), parent.run_rows({0: 1, 1: 1})):
        assert [results[env].fault for env in (0, 1)] == [Fault.RAISED] * 2


def test_large_infos_overflow_and_are_counted_over_the_workers_life(make_parent):
    parent = make_parent()
    for count in (1, 2, 3):
        results = parent.run_rows({0: 5, 1: 1})
        assert results[0][0][4] == {"large": "x" * 10_000}
        assert parent.page.counters[OVERFLOWS] == count


def test_nothing_that_was_returned_changes_later_nor_changes_the_env(make_parent):
    parent = make_parent(pickles=False)
    by_item = parent.run_items([step(0, 6)])[0][0]
    by_row = parent.run_rows({0: 6})[0][0]
    assert (by_item[4], by_row[4]) == ({"same": [1]}, {"same": [2]})
    by_row[4]["same"].append("mine")
    assert parent.envs[0].info == {"same": [2]}
    assert parent.run_rows({0: 6})[0][0][4] == {"same": [3]}
    assert by_row[4] == {"same": [2, "mine"]}


def test_actions_that_pass_as_objects_are_copied_on_the_way_in(make_parent):
    parent = make_parent(pickles=False)
    seen = []
    parent.envs[0].step = lambda action: (seen.append(action), (np.zeros(2), 0.0, False, False, {}))[1]
    action = [np.zeros(1)]
    parent.ask(Kind.STEPS, pack_steps(Steps([Step(0, action, False, None)], False), pickles=False))
    action[0][0] = 5
    parent.server.run_posted()
    assert seen == [[np.zeros(1)]]


def test_objects_that_do_not_pickle_pass_within_one_process(make_parent):
    parent = make_parent(pickles=False)
    parent.envs[0].step = lambda action: (np.zeros(2), 0.0, False, False, {"f": action})
    outcome = parent.run_items([Step(0, lambda: 5, False, None)])[0]
    assert outcome[0][4]["f"]() == 5


# Rings -----------------------------------------------------------------------------------------------------


def count_rings(parent):
    fd = parent.page.to_parent.fileno()
    try:
        return len(os.read(fd, 100)) if PORTABLE else os.eventfd_read(fd)
    except BlockingIOError:
        return 0


@pytest.mark.parametrize(("ring_at", "rings"), [(0, 0), (1, 3), (2, 2), (3, 1)])
def test_streamed_results_ring_from_so_many_on(make_parent, ring_at, rings):
    parent = make_parent()
    count_rings(parent)
    parent.page.ring_at(ring_at)
    parent.post_rows({0: 1, 1: 1, 2: 1}, stream=True)
    parent.server.run_posted()
    assert count_rings(parent) == rings


def test_a_failure_rings_whoever_waits(make_parent):
    parent = make_parent()
    count_rings(parent)
    parent.page.ring_at(3)
    parent.post_rows({0: 3, 1: 1}, stream=True)
    parent.server.run_posted()
    assert count_rings(parent) == 2, "the failure, and the last one"


def test_the_end_rings_unless_the_results_are_streamed_and_nobody_waits_for_it(make_parent):
    parent = make_parent()
    for stream, watched, rings in ((False, False, 1), (True, False, 0), (True, True, 1)):
        count_rings(parent)
        call_id = parent.post_rows({0: 1}, stream=stream)
        if watched:
            parent.page.ring_at_end(call_id)
        parent.server.run_posted()
        assert count_rings(parent) == rings


def test_the_end_of_a_step_rings_also_if_it_runs_with_a_streamed_one(make_parent):
    parent = make_parent()
    count_rings(parent)
    parent.post_rows({0: 1})
    parent.post_rows({1: 1}, stream=True)
    parent.server.run_posted()
    assert count_rings(parent) == 1


# Several steps posted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_several_steps_may_be_posted_before_the_first_is_run(make_parent, stream):
    parent = make_parent()
    first, second = parent.post_rows({0: 1}, stream=stream), parent.post_rows({1: 2, 2: 3}, stream=stream)
    parent.server.run_posted()
    overflow = parent.overflow()
    assert second > first
    assert parent.page.counters[FINISHED] == second
    assert [as_text(parent.read_row(env, overflow))[0] for env in (0, 1)] == ["(", "("]
    assert isinstance(parent.read_row(2, overflow), Failure)
    assert [env.steps for env in parent.envs] == [1, 1, 0]


def test_a_step_that_is_posted_while_another_runs_is_run_next(make_parent):
    parent = make_parent()
    posted = []
    parent.envs[0].hook = lambda: posted.append(parent.post_rows({1: 1}))
    first = parent.post_rows({0: 1})
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == first
    assert parent.envs[1].steps == 0
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == posted[0]
    assert parent.envs[1].steps == 1


def test_a_step_of_which_nothing_is_left_to_do_is_over_at_once(make_parent):
    parent = make_parent()
    parent.post_rows({0: 1})
    parent.server.run_posted()
    parent.call_id += 1
    parent.page.post_step(parent.call_id, ASLEEP, False)
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == parent.page.counters[BEGUN] == parent.call_id
    assert parent.envs[0].steps == 1


def test_a_step_posted_between_two_looks_of_the_worker_is_taken_for_no_frame(make_parent):
    """The worker reads how much was posted, then which step: the second may be newer."""
    parent = make_parent()
    parent.post_rows({0: 1})
    counters = parent.server._counters

    class Late:
        """A page whose second step is posted in between."""

        def __getitem__(self, index):
            value = counters[index]
            if not posted:
                posted.append(parent.post_rows({1: 1}))
            return value

    posted = []
    parent.server._counters = Late()
    parent.server.run_posted()
    parent.server._counters = counters
    assert parent.page.counters[FINISHED] == posted[0]
    received = []
    parent.receive = lambda: received.append(1)
    assert parent.server.handled != counters[0], "the worker looks once more"
    parent.server.run_posted()
    assert received == []


# The page ------------------------------------------------------------------------------------------------


def glance(parent):
    counters = parent.page.counters
    return counters[BEGUN], counters[METHOD], counters[ENV_INDEX]


def test_the_page_says_what_runs(make_parent, pickles):
    parent = make_parent(pickles=pickles, autoreset=True)
    seen = []
    for env in parent.envs:
        env.hook = lambda: seen.append(glance(parent))
    call_id = parent.post_rows({0: 1, 2: 1})
    parent.server.run_posted()
    assert seen == [(call_id, METHOD_STEP, 0), (call_id, METHOD_STEP, 2)]
    seen.clear()
    reset = parent.envs[1].reset
    parent.envs[1].reset = lambda **kwargs: (seen.append(glance(parent)), reset(**kwargs))[1]
    parent.run_items([step(1, 2, autoreset=True)])
    asked = parent.call_id - 1
    assert seen == [(asked, METHOD_STEP, 1), (asked, METHOD_RESET, 1)]
    assert parent.page.counters[FINISHED] == asked
    parent.envs[1].look = lambda: glance(parent)
    parent.ask(Kind.CALL, dumps(tuple(Call(1, "look", (), {}))))
    parent.server.run_posted()
    assert loads(parent.take_replies()[0].payload) == (parent.call_id - 1, METHOD_CALL, 1)


def test_a_request_whose_payload_is_bad_has_begun_and_ended(make_parent):
    parent = make_parent()
    parent.call_id += 10
    parent.ask(Kind.CALL, dumps(ExplodesOnArrival()))
    parent.server.run_posted()
    (frame,) = parent.take_replies()
    assert frame.kind == Kind.FAILED
    assert Failure(*loads(frame.payload)).fault == Fault.ARGUMENTS
    assert parent.page.counters[BEGUN] == parent.page.counters[FINISHED] == parent.call_id - 1


def test_a_replay_says_of_each_entry_what_it_is(make_parent):
    parent = make_parent()
    seen = []
    env = parent.envs[1]
    reset = env.reset
    env.reset = lambda **kwargs: (seen.append(glance(parent)[1:]), reset(**kwargs))[1]
    env.hook = lambda: seen.append(glance(parent)[1:])
    env.work = lambda: seen.append(glance(parent)[1:])
    entries = [
        (Kind.RESET, dumps(Reset(1, 3, None, None))),
        (Kind.STEP, dumps(step(1, 1))),
        (Kind.CALL, dumps(tuple(Call(1, "work", (), {})))),
        (Kind.STEP, dumps(step(1, 1))),
    ]
    parent.ask(Kind.REPLAY, dumps(tuple(Replay(1, [], ACTION, False, entries, 0))))
    parent.server.run_posted()
    assert seen == [(METHOD_RESET, 1), (METHOD_STEP, 1), (METHOD_CALL, 1), (METHOD_STEP, 1)]
    assert loads(parent.take_replies()[0].payload) is False, "another checksum"


# Workers that are given up ---------------------------------------------------------------------------------


def test_a_worker_that_was_given_up_writes_no_result(make_parent):
    guard = WriteGuard()
    parent = make_parent(guard=guard)
    parent.run_rows({0: 1})
    before = parent.slab.observations[0].copy()
    parent.envs[0].hook = guard.close
    parent.post_rows({0: 1, 1: 1})
    with pytest.raises(WorkerRetiredError):
        parent.server.run_posted()
    assert parent.slab.completed[:2].tolist() == [1, 0]
    assert (parent.slab.observations[0] == before).all()


def test_closing_a_guard_waits_for_the_result_that_is_being_written(make_parent):
    guard = WriteGuard()
    parent = make_parent(guard=guard)
    writing, go_on, order = threading.Event(), threading.Event(), []
    row = parent.server._runner._rows[0]
    write = row.write

    def slowly(*args):
        writing.set()
        go_on.wait(SOON)
        write(*args)
        order.append("written")

    row.write = slowly
    parent.post_rows({0: 1})
    thread = threading.Thread(target=parent.server.run_posted)
    thread.start()
    writing.wait(SOON)
    closer = threading.Thread(target=lambda: (guard.close(), order.append("closed")))
    closer.start()
    go_on.set()
    thread.join()
    closer.join()
    assert order == ["written", "closed"]


def test_serving_ends_with_the_channel():
    page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
    ended = Doorbell()
    ended.ring()
    channel = SimpleNamespace(fileno=ended.fileno, receive=lambda: None, send=None)
    Server(channel, page).serve()
    page.to_worker.close()
    page.to_parent.close()
    ended.close()


def test_serving_ends_with_the_last_request():
    page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
    bell, replies = Doorbell(), []
    start = Frame(Kind.START, 0, 0, dumps(tuple(Start("a", 0, [dumps_by_value(Scripted)], ([], [])))))
    waiting = [[start], [Frame(Kind.CLOSE, 0, 1, dumps(tuple(Close())))]]
    page.post_frame()

    def send(frame):
        replies.append(frame.kind)
        page.post_frame()

    Server(SimpleNamespace(fileno=bell.fileno, receive=lambda: waiting.pop(0), send=send), page).serve()
    assert replies == [Kind.RESULT, Kind.RESULT]
    page.to_worker.close()
    page.to_parent.close()
    bell.close()
