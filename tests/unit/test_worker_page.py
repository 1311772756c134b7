"""What a worker writes on its page and when it rings; which posts it runs; and workers that are given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SOON
from plainworker import ACTION, Scripted, fault_of

from envactors.mailbox.control_page import (
    ASLEEP,
    BEGUN,
    ENV_INDEX,
    FINISHED,
    METHOD,
    METHOD_CALL,
    METHOD_RESET,
    METHOD_STEP,
    PAGE,
    ControlPage,
)
from envactors.mailbox.messages import Call, Close, Failure, Fault, Frame, Kind, Replay, Reset, Start, Step
from envactors.mailbox.pickling import dumps, dumps_by_value, loads
from envactors.mailbox.slab import RESET, RING
from envactors.system.polling import Doorbell
from envactors.worker.env_rows import WorkerRetiredError, WriteGuard
from envactors.worker.main import Server

# Rings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring_at", "rings"), [(0, 0), (1, 3), (2, 2), (3, 1)])
def test_streamed_results_ring_once_enough_are_complete(make_parent, ring_at, rings):
    parent = make_parent()
    parent.count_rings()
    parent.page.ring_at(ring_at)
    parent.post({0: 1, 1: 1, 2: 1}, stream=True)
    parent.server.run_posted()
    assert parent.count_rings() == rings


def test_failure_rings_whatever_the_caller_waits_for(make_parent):
    parent = make_parent()
    parent.count_rings()
    parent.page.ring_at(3)
    parent.post({0: 3, 1: 1}, stream=True)
    parent.server.run_posted()
    assert parent.count_rings() == 2, "the failure, and the last one"


@pytest.mark.parametrize("stream", [False, True])
def test_result_for_a_future_rings_whatever_the_caller_waits_for(make_parent, stream):
    parent = make_parent()
    parent.count_rings()
    seen = []
    parent.envs[2].hook = lambda: seen.append(parent.count_rings())
    parent.post({0: 1, 1: 1, 2: 1}, ops={1: RING}, stream=stream)
    parent.server.run_posted()
    assert seen == [1], "before the next env runs"
    assert parent.count_rings() == (0 if stream else 1), "the end"


def test_end_of_a_step_rings_unless_streamed_and_unwatched(make_parent):
    parent = make_parent()
    for stream, watched, rings in ((False, False, 1), (True, False, 0), (True, True, 1)):
        parent.count_rings()
        number = parent.post({0: 1}, stream=stream)
        if watched:
            parent.page.ring_at_end(number)
        parent.server.run_posted()
        assert parent.count_rings() == rings


def test_end_of_a_step_rings_when_it_runs_with_a_streamed_step(make_parent):
    parent = make_parent()
    parent.count_rings()
    parent.post({0: 1})
    parent.post({1: 1}, stream=True)
    parent.server.run_posted()
    assert parent.count_rings() == 1


# Which posts are run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_several_steps_posted_before_the_first_runs_all_run(make_parent, stream):
    parent = make_parent()
    parent.post({0: 1}, stream=stream)
    second = parent.post({1: 2, 2: 3}, stream=stream)
    parent.server.run_posted()
    overflow = parent.overflow()
    assert parent.page.counters[FINISHED] == second
    assert [fault_of(parent.read(env, overflow)) for env in range(3)] == [None, None, Fault.RAISED]
    assert [env.steps for env in parent.envs] == [1, 1, 0]


def test_step_posted_while_another_runs_is_run_next(make_parent):
    parent = make_parent()
    posted = []
    parent.envs[0].hook = lambda: posted.append(parent.post({1: 1}))
    first = parent.post({0: 1})
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == first
    assert parent.envs[1].steps == 0
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == posted[0]
    assert parent.envs[1].steps == 1


def test_step_without_due_rows_finishes_at_once(make_parent):
    parent = make_parent()
    begun = parent.post({0: 1})
    parent.server.run_posted()
    number = parent.post({})
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == number
    assert parent.page.counters[BEGUN] == begun, "no env has run"
    assert parent.envs[0].steps == 1


def test_step_posted_between_two_reads_of_the_page_is_not_taken_for_a_frame(make_parent):
    """The worker reads how much was posted, then which step: the second may be newer."""
    parent = make_parent()
    parent.post({0: 1})
    counters = parent.server._counters
    posted = []

    class Late:
        """A page whose second step is posted in between."""

        def __getitem__(self, index):
            value = counters[index]
            if not posted:
                posted.append(parent.post({1: 1}))
            return value

    parent.server._counters = Late()
    parent.server.run_posted()
    parent.server._counters = counters
    assert parent.page.counters[FINISHED] == posted[0]
    received = []
    parent.receive = lambda: received.append(1)
    assert parent.server.handled != counters[0], "the worker looks once more"
    parent.server.run_posted()
    assert received == []


def test_row_waits_until_its_payload_was_read(make_parent):
    """It was written after the worker has looked for frames, and before it looks at the rows."""
    parent = make_parent(action=None)
    parent.run({1: 4})
    server, later = parent.server, []
    run_rows = server._run_rows

    def run_late(number):
        later.append(parent.write_rows({1: 2}))
        server._run_rows = run_rows
        run_rows(number)

    server._run_rows = run_late
    first = parent.post({0: 1})
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == first
    assert [env.steps for env in parent.envs[:2]] == [1, 1], "the payload that it had is of the step before"
    parent.page.post_step(later[0], ASLEEP, False)
    parent.server.run_posted()
    assert parent.page.counters[FINISHED] == later[0]
    assert parent.read(1)[0] == ([2, 2], 2.0, True, False, {})


def test_complete_rows_do_not_run_again(make_parent):
    parent = make_parent()
    parent.run({0: 1, 1: 3})
    parent.run({2: 1})
    assert [env.steps for env in parent.envs] == [1, 0, 1]


# The page ------------------------------------------------------------------------------------------------


def glance(parent):
    counters = parent.page.counters
    return counters[BEGUN], counters[METHOD], counters[ENV_INDEX]


@pytest.mark.parametrize("action", [ACTION, None], ids=["actions in rows", "actions as payload"])
def test_page_shows_the_running_request(make_parent, action):
    parent = make_parent(autoreset=True, action=action)
    seen = []
    for env in parent.envs:
        env.hook = lambda: seen.append(glance(parent))
    first = parent.post({2: 1})
    second = parent.post({0: 1})
    parent.server.run_posted()
    assert seen == [(second, METHOD_STEP, 0), (first, METHOD_STEP, 2)], "each row has a number of its own"
    seen.clear()
    reset = parent.envs[1].reset
    parent.envs[1].reset = lambda **kwargs: (seen.append(glance(parent)), reset(**kwargs))[1]
    within = parent.post({1: 2})
    parent.server.run_posted()
    asked = parent.post({1: None if action is None else 0}, ops={1: RESET})
    parent.server.run_posted()
    assert seen == [(within, METHOD_STEP, 1), (within, METHOD_RESET, 1), (asked, METHOD_RESET, 1)]
    assert parent.page.counters[FINISHED] == asked


def test_page_shows_a_reset_among_steps(make_parent):
    """Also among those whose results are written without a call."""
    parent = make_parent()
    seen = []
    for index, env in enumerate(parent.envs):
        env.step = lambda action, index=index: (seen.append((index, *glance(parent)[1:])), *plain)[1:]
    plain = np.zeros(2), 1.0, False, False, {}
    reset = parent.envs[1].reset
    parent.envs[1].reset = lambda **kwargs: (seen.append((1, *glance(parent)[1:])), reset(**kwargs))[1]
    for _ in range(2):
        parent.post({0: 1, 1: None, 2: 1}, ops={1: RESET})
        parent.server.run_posted()
    assert seen == [(0, METHOD_STEP, 0), (1, METHOD_RESET, 1), (2, METHOD_STEP, 2)] * 2


def test_page_shows_the_env_of_a_call(make_parent):
    parent = make_parent()
    parent.envs[1].look = lambda: glance(parent)
    number = parent.ask(Kind.CALL, dumps(tuple(Call(1, "look", (), {}))))
    parent.server.run_posted()
    assert loads(parent.take_replies()[0].payload) == (number, METHOD_CALL, 1)
    assert parent.page.counters[FINISHED] == number


class ExplodesOnArrival:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_request_with_a_bad_payload_begins_and_ends(make_parent):
    parent = make_parent()
    parent.call_id += 10
    number = parent.ask(Kind.CALL, dumps(ExplodesOnArrival()))
    parent.server.run_posted()
    (frame,) = parent.take_replies()
    assert frame.kind == Kind.FAILED
    assert Failure(*loads(frame.payload)).fault == Fault.ARGUMENTS
    assert parent.page.counters[BEGUN] == parent.page.counters[FINISHED] == number


def test_page_shows_each_entry_of_a_replay(make_parent):
    parent = make_parent()
    seen = []
    env = parent.envs[1]
    reset = env.reset
    env.reset = lambda **kwargs: (seen.append(glance(parent)[1:]), reset(**kwargs))[1]
    env.hook = lambda: seen.append(glance(parent)[1:])
    env.work = lambda: seen.append(glance(parent)[1:])
    entries = [
        (Kind.RESET, dumps(tuple(Reset(1, 3, None)))),
        (Kind.STEP, dumps(tuple(Step(1, np.float64(1), False, None)))),
        (Kind.CALL, dumps(tuple(Call(1, "work", (), {})))),
        (Kind.STEP, dumps(tuple(Step(1, np.float64(1), False, None)))),
    ]
    parent.ask(Kind.REPLAY, dumps(tuple(Replay(1, [], ACTION, False, entries, 0))))
    parent.server.run_posted()
    assert seen == [(METHOD_RESET, 1), (METHOD_STEP, 1), (METHOD_CALL, 1), (METHOD_STEP, 1)]
    assert loads(parent.take_replies()[0].payload) is False, "another checksum"


# Workers that are given up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [1, 3, 6], ids=["returns", "raises", "has an info"])
def test_abandoned_worker_writes_no_result(make_parent, action):
    guard = WriteGuard()
    parent = make_parent(guard=guard)
    parent.run({0: 1})
    before = parent.slab.completed.tolist(), parent.slab.observations[0].tolist(), parent.slab.info_encoding.tolist()
    parent.envs[0].hook = guard.close
    parent.post({0: action, 1: 1})
    with pytest.raises(WorkerRetiredError):
        parent.server.run_posted()
    after = parent.slab.completed.tolist(), parent.slab.observations[0].tolist(), parent.slab.info_encoding.tolist()
    assert after == before
    assert parent.take_replies() == []
    assert parent.envs[1].steps == 0


@pytest.mark.parametrize("action", [1, 6], ids=["plain", "has an info"])
def test_closing_a_guard_waits_for_the_result_that_is_being_written(make_parent, action):
    guard = WriteGuard()
    parent = make_parent(guard=guard, pickles=False)
    writing, go_on, order = threading.Event(), threading.Event(), []
    row = parent.server.rows[0]

    class SlowColumn:
        """Takes the time of the test to be written."""

        def __setitem__(self, *_):
            writing.set()
            go_on.wait(SOON)
            order.append("written")

    row.terminated = SlowColumn()
    parent.post({0: action})
    thread = threading.Thread(target=parent.server.run_posted)
    thread.start()
    assert writing.wait(SOON)
    closer = threading.Thread(target=lambda: (guard.close(), order.append("closed")))
    closer.start()
    go_on.set()
    thread.join()
    closer.join()
    assert order == ["written", "closed"]
    assert parent.slab.completed[0] == parent.slab.posted[0]


# Serving -------------------------------------------------------------------------------------------------


def test_serve_returns_when_the_channel_is_closed():
    page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
    ended = Doorbell()
    ended.ring()
    channel = SimpleNamespace(fileno=ended.fileno, receive=lambda: None, send=None)
    Server(channel, page).serve()
    page.to_worker.close()
    page.to_parent.close()
    ended.close()


def test_serve_returns_after_the_last_request():
    page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
    bell, replies = Doorbell(), []
    start = Frame(Kind.START, 0, 0, dumps(tuple(Start("a", 0, [dumps_by_value(Scripted)], ([], [])))))
    waiting = [[start], [Frame(Kind.CLOSE, 0, 1, dumps(tuple(Close())))]]
    page.post_frame(ASLEEP)

    def send(frame):
        replies.append(frame.kind)
        page.post_frame(ASLEEP)

    Server(SimpleNamespace(fileno=bell.fileno, receive=lambda: waiting.pop(0), send=send), page).serve()
    assert replies == [Kind.RESULT, Kind.RESULT]
    page.to_worker.close()
    page.to_parent.close()
    bell.close()
