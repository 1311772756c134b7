"""An actor with a worker that the test plays: no process is started."""

from __future__ import annotations

import math
import threading
import time

import pytest
from fakes import SOON, FakeBackend, call

import envactors as ea
from envactors.actor import actor as actor_module
from envactors.actor import recording
from envactors.actor.actor_process import EndReason
from envactors.actor.calls import Call, ReplayJob
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture
from envactors.actor.handle import send_request
from envactors.actor.permits import Permits
from envactors.actor.recording import Recorder
from envactors.actor.states import ActorState, Phase
from envactors.actor.tenant import Tenant
from envactors.backends.local import LocalWorker
from envactors.mailbox import packing
from envactors.mailbox.messages import Fault, Frame, Kind
from envactors.mailbox.pickling import dumps, loads, pack_failure


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_calls_run_in_order_one_at_a_time(actors):
    actor, backend = actors()
    futures = [call(actor, i) for i in range(3)]
    worker = backend.next_worker().serve_start()
    seen = [worker.serve_call(i)[2] for i in range(3)]
    assert seen == [(0,), (1,), (2,)]
    assert [future.result(SOON) for future in futures] == [0, 1, 2]
    assert not actor.jobs.unfinished


def test_a_crash_fails_the_call_that_had_begun_and_runs_the_others_in_the_next_process(actors):
    actor, backend = actors()
    first, second = call(actor), call(actor)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    worker.crash()
    with pytest.raises(ea.ActorDiedError, match="in method"):
        first.result(SOON)
    backend.next_worker().serve_start().serve_call(2)
    assert second.result(SOON) == 2
    assert actor.stats().restarts == 1


def test_a_call_that_had_not_begun_runs_in_the_next_process(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker().serve_start()
    worker.take()
    worker.crash()
    backend.next_worker().serve_start().serve_call(1)
    assert future.result(SOON) == 1


def test_a_call_with_retries_runs_again_before_the_queue(actors):
    actor, backend = actors()
    first, second = call(actor, "first", retries=1), call(actor, "second")
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    worker.crash()
    worker = backend.next_worker().serve_start()
    assert [worker.serve_call()[2], worker.serve_call()[2]] == [("first",), ("second",)]
    assert (first.result(SOON), second.result(SOON)) == ("done", "done")


def test_a_late_call_is_killed_and_the_first_reason_wins(actors):
    actor, backend = actors(deadlines=ea.Deadlines(call=0.05))
    future = call(actor)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    with pytest.raises(ea.ActorTimeoutError, match=r"passed its deadline of 0\.05 s"):
        future.result(SOON)
    assert worker.was_killed


def test_a_reply_of_an_earlier_incarnation_is_dropped(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker().serve_start()
    frame = worker.take()
    worker.reply(frame._replace(incarnation=7), "stale")
    worker.begin(frame)
    worker.reply(frame, "fresh")
    assert future.result(SOON) == "fresh"
    assert actor.stats().stale == 1


def test_a_renewal_takes_its_place_in_the_queue_and_is_not_counted(actors):
    actor, backend = actors()
    before, renewed = call(actor), ActorFuture(actor, None)
    actor.renew(renewed)
    after = call(actor)
    worker = backend.next_worker().serve_start()
    worker.serve_call("before")
    assert worker.take().kind == Kind.CLOSE
    wait_until(lambda: actor.state is ActorState.RENEWING)
    worker.crash()
    backend.next_worker().serve_start().serve_call("after")
    assert (before.result(SOON), renewed.result(SOON), after.result(SOON)) == ("before", 1, "after")
    assert actor.stats().restarts == 0


def test_a_dead_actor_fails_calls_until_a_renewal(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.DEAD)
    with pytest.raises(ea.ActorDiedError, match="while idle"):
        call(actor).result(SOON)
    renewed = ActorFuture(actor, None)
    actor.renew(renewed)
    backend.next_worker().serve_start()
    assert renewed.result(SOON) == 1


def test_a_factory_that_raises_at_the_first_start_is_not_retried(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker()
    failure = pack_failure(KeyError("no such env"), Fault.RAISED)
    worker.reply(worker.take(), tuple(failure), Kind.FAILED)
    with pytest.raises(ea.ActorStartError, match="no such env") as caught:
        future.result(SOON)
    assert isinstance(caught.value.__cause__, KeyError)
    assert actor.state is ActorState.DEAD


def test_the_error_of_a_factory_does_not_count_the_time_in_which_other_envs_close(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker()
    worker.reply(worker.take(), tuple(pack_failure(KeyError("no such env"), Fault.RAISED)), Kind.FAILED)
    assert worker.take().kind == Kind.CLOSE
    longest = time.monotonic() - actor.process.launched_at
    time.sleep(0.01)
    worker.crash()
    with pytest.raises(ea.ActorStartError) as caught:
        future.result(SOON)
    assert caught.value.elapsed <= longest


def test_a_call_that_is_slow_from_the_start_is_reported_and_continues(actors, caplog):
    actor, backend = actors(deadlines=ea.Deadlines(slow=0.0))
    future = call(actor)
    worker = backend.next_worker().serve_start()
    frame = worker.take()
    worker.begin(frame)
    wait_until(lambda: "has been running for" in caplog.text)
    worker.reply(frame, "done")
    assert future.result(SOON) == "done"
    assert caplog.text.count("has been running for") == 1


class Exits(Recorder):
    """Counts the exits of processes."""

    def __init__(self):
        self.count = 0

    def on_exit(self, actor, activity):
        self.count += 1


@pytest.fixture
def exits(monkeypatch):
    recorder = Exits()
    monkeypatch.setattr(recording, "recorder", recorder)
    return recorder


@pytest.mark.parametrize("max_restarts", [0, 5])
@pytest.mark.parametrize("restart", [False, True])
def test_killing_an_actor_without_a_process_keeps_the_cause_of_the_last_exit(actors, exits, max_restarts, restart):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=max_restarts, backoff=SOON, backoff_max=SOON))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is (Phase.BACKOFF if max_restarts else Phase.DEAD))
    crash = actor.last_exit_error
    queued = call(actor) if max_restarts else None
    actor.kill(restart)
    if restart:
        worker = backend.next_worker().serve_start()
        if queued is not None:
            worker.serve_call("kept")
            assert queued.result(SOON) == "kept"
    else:
        actor.wait_closed(SOON)
        if queued is not None:
            with pytest.raises(ea.ActorDiedError, match="was ended on purpose"):
                queued.result(SOON)
    assert actor.last_exit_error is crash
    assert exits.count == 1


def test_closing_a_dead_actor_records_no_second_exit(actors, exits):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.DEAD)
    crash = actor.last_exit_error
    actor.begin_close(SOON)
    actor.wait_closed(SOON)
    assert actor.last_exit_error is crash
    assert exits.count == 1


def test_a_process_is_replaced_although_the_error_of_its_env_is_never_read(actors, monkeypatch):
    monkeypatch.setattr(actor_module, "_READ_PATIENCE", 0.05)
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    gate = threading.Event()
    try:
        actor.run_as_change(
            actor.replace_after_raise, 0, lambda: gate.wait(SOON) and ea.ActorDiedError("the error that was read")
        )
        future = call(actor)
        backend.next_worker().serve_start().serve_call("next")
        assert future.result(SOON) == "next"
        assert worker.was_killed
        assert "was replaced, since an env had raised" in str(actor.last_exit_error)
    finally:
        gate.set()


def test_an_actor_that_closes_while_the_error_of_its_env_is_read_is_not_closed_yet(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    gate = threading.Event()
    try:
        actor.run_as_change(actor.replace_after_raise, 0, lambda: gate.wait(SOON) and ea.ActorDiedError("read"))
        actor.begin_close(SOON)
        assert actor.state is not ActorState.CLOSED
        assert not worker.was_killed
    finally:
        gate.set()
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    actor.wait_closed(SOON)
    assert actor.state is ActorState.CLOSED


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("close", [None, 60.0])
def test_once_an_exception_was_read_the_envs_have_the_close_deadline_to_close(actors, close, starts):
    actor, backend = actors(deadlines=ea.Deadlines(start=None, close=close))
    worker = backend.next_worker()
    if starts:
        worker.serve_start()
        wait_until(lambda: actor.phase is Phase.LIVE)
        actor.run_as_change(actor.replace_after_raise, 0, lambda: ea.ActorDiedError("read"))
    else:
        worker.reply(worker.take(), tuple(pack_failure(KeyError("no such env"), Fault.RAISED)), Kind.FAILED)
    assert worker.take().kind == Kind.CLOSE
    with actor.lock:
        limits = [timer.when - time.monotonic() for timer in actor.timers._timers.values()]
    assert all(limit > 50.0 for limit in limits), "no timer of the reading is left"
    assert len(limits) == (close is not None)


class Blocks:
    """Blocks the thread that unpickles it."""

    gate = threading.Event()

    def __reduce__(self):
        return _block, ()


def _block():
    assert Blocks.gate.wait(SOON)
    raise ValueError("unpickled")


class StartError(Exception):
    pass


def test_a_start_deadline_that_passes_while_an_exception_is_read_kills_the_process(actors, monkeypatch):
    actor, backend = actors(deadlines=ea.Deadlines(start=0.01, close=None))
    worker = backend.next_worker()
    monkeypatch.setattr(Blocks, "gate", threading.Event())
    failure = pack_failure(StartError("own"), Fault.RAISED)._replace(pickled=bytes(dumps(Blocks())))
    worker.reply(worker.take(), tuple(failure), Kind.FAILED)
    wait_until(lambda: actor.process.end_reason is EndReason.TIMEOUT)
    Blocks.gate.set()
    wait_until(lambda: worker.was_killed)


def test_unpickling_the_error_of_a_factory_does_not_block_other_actors(actors):
    (first, one), (second, other) = actors(), actors()
    waiting, future = call(first), call(second)
    worker = one.next_worker()
    failure = pack_failure(StartError("own"), Fault.RAISED)._replace(pickled=bytes(dumps(Blocks())))
    worker.reply(worker.take(), tuple(failure), Kind.FAILED)
    other.next_worker().serve_start().serve_call("quick")
    assert future.result(SOON) == "quick"
    assert not waiting.done()
    Blocks.gate.set()
    with pytest.raises(ea.ActorStartError, match="own"):
        waiting.result(SOON)


def test_closing_runs_the_queue_first(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    future = call(actor)
    actor.begin_close(SOON)
    with pytest.raises(ea.ActorClosedError):
        call(actor)
    worker.serve_call("last")
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    assert future.result(SOON) == "last"
    assert actor.closed.wait(SOON)
    assert actor.state is ActorState.CLOSED


def test_killing_fails_running_and_queued_calls(actors):
    actor, backend = actors()
    futures = [call(actor), call(actor)]
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    actor.kill(restart=False)
    for future in futures:
        with pytest.raises(ea.ActorDiedError) as caught:
            future.result(SOON)
        assert caught.value.aborted


def test_a_queued_call_can_be_canceled_and_a_running_one_aborted(actors):
    actor, backend = actors()
    running, queued = call(actor), call(actor)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    assert not running.cancel()
    assert queued.cancel()
    assert running.abort()
    with pytest.raises(ea.ActorDiedError, match="on purpose"):
        running.result(SOON)
    assert not running.abort()


def test_aborting_a_call_whose_reply_the_loop_has_not_read_returns_false(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker().serve_start()
    frame = worker.take()
    worker.begin(frame)
    with actor.lock:
        worker.reply(frame, "done")
        assert not future.abort()
    assert future.result(SOON) == "done"
    assert not worker.was_killed


class Hit(Exception):
    pass


def test_an_interrupted_change_replaces_the_process_and_keeps_queued_calls(actors):
    actor, backend = actors()
    running, queued = call(actor), call(actor)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    with pytest.raises(Hit), actor.lock, actor.lock.change(actor):
        raise Hit
    with pytest.raises(ea.ActorDiedError, match="an exception interrupted the caller"):
        running.result(SOON)
    assert worker.was_killed
    backend.next_worker().serve_start().serve_call("kept")
    assert queued.result(SOON) == "kept"
    assert actor.stats().restarts == 0


@pytest.mark.parametrize("state", ["lost", "running and queued", "sent and queued"])
def test_the_repair_establishes_the_invariant_from_any_state(actors, state):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    future = call(actor)
    worker.take()
    with pytest.raises(Hit), actor.lock, actor.lock.change(actor):
        job, actor.jobs.running = actor.jobs.running, None
        if state == "running and queued":
            actor.jobs.running = job
            actor.jobs.waiting.append(job)
        elif state == "sent and queued":
            actor.jobs.waiting.append(job)
        raise Hit
    with pytest.raises(ea.ActorDiedError):
        future.result(SOON)
    backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    assert not actor.jobs.waiting
    assert not actor.jobs.unfinished
    assert actor.jobs.running is None


def lose_worker(actor, backend):
    """Lose the node of an actor's worker in a call."""
    future = call(actor)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    worker.lose()
    with pytest.raises(ea.NodeLostError, match="was lost with its node 'far'"):
        future.result(SOON)
    return worker


def test_a_process_starts_only_once_the_end_of_the_last_one_is_certain(actors):
    actor, backend = actors()
    lost = lose_worker(actor, backend)
    future = call(actor)
    wait_until(lambda: actor.phase is Phase.STARTING)
    actor.kill(restart=True)
    wait_until(lambda: actor.process.incarnation == 2)
    time.sleep(0.1)
    assert backend.workers.empty()
    lost.set_over()
    backend.next_worker().serve_start().serve_call(1)
    assert future.result(SOON) == 1
    assert actor.stats().restarts == 1


def test_a_renewal_of_a_dead_actor_waits_for_the_certain_end_of_the_last_process(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    lost = lose_worker(actor, backend)
    wait_until(lambda: actor.phase is Phase.DEAD)
    renewal = ActorFuture(actor, None)
    actor.renew(renewal)
    wait_until(lambda: actor.phase is Phase.STARTING)
    time.sleep(0.1)
    assert backend.workers.empty()
    lost.set_over()
    backend.next_worker().serve_start()
    assert renewal.result(SOON) == 1


@pytest.mark.parametrize("timeout", [None, 0.1])
def test_closing_does_not_wait_for_the_certain_end_of_the_last_process(actors, timeout):
    actor, backend = actors()
    lost = lose_worker(actor, backend)
    wait_until(lambda: actor.phase is Phase.STARTING)
    future = None if timeout is None else call(actor)
    started = time.monotonic()
    actor.begin_close(timeout)
    actor.wait_closed(timeout)
    assert actor.state is ActorState.CLOSED
    assert time.monotonic() - started < 1.0
    if future is not None:
        with pytest.raises(ea.ActorDiedError):
            future.result(SOON)
    lost.set_over()
    time.sleep(0.05)
    assert backend.workers.empty()


def test_a_handler_that_uses_an_actor_in_the_middle_of_a_change_gets_an_error(actors):
    actor, backend = actors()
    backend.next_worker().serve_start()
    with actor.lock, actor.lock.change(actor):
        with pytest.raises(RuntimeError, match="interrupted a change"):
            call(actor)
        assert actor.stats().queued == 0, "reading is allowed"


def test_a_large_call_behind_an_awaited_one_is_sent_completely(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    first, second = call(actor), call(actor, b"x" * 10**7)

    def serve():
        worker.serve_call("small")
        worker.serve_call("large")

    thread = threading.Thread(target=serve)
    thread.start()
    assert first.result(SOON) == "small"
    assert second.result(SOON) == "large"
    thread.join()


def test_an_internal_error_in_the_loop_closes_the_actor_and_is_the_cause(actors, caplog, monkeypatch):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=math.inf, backoff=0.0))
    first, second = call(actor), call(actor)
    worker = backend.next_worker()
    bug = KeyError("a bug")

    def fail(_frame):
        raise bug

    monkeypatch.setattr(actor, "_on_start_reply", fail)
    worker.serve_start()
    for future in (first, second):
        with pytest.raises(ea.ActorClosedError, match="report") as raised:
            future.result(SOON)
        assert raised.value.__cause__ is bug
    actor.wait_closed(SOON)
    assert actor.state is ActorState.CLOSED
    assert backend.workers.empty(), "it is not started again"
    wait_until(lambda: any(record.exc_info and record.exc_info[1] is bug for record in caplog.records))


def test_an_interrupt_does_not_revive_a_dead_actor(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.DEAD)
    with pytest.raises(KeyboardInterrupt), actor.lock, actor.lock.change(actor):
        raise KeyboardInterrupt
    with pytest.raises(ea.ActorDiedError):
        call(actor).result(SOON)
    assert (actor.state, backend.workers.qsize()) == (ActorState.DEAD, 0)


def test_an_interrupt_does_not_wake_an_actor_that_is_asleep(actors):
    actor, backend = actors(is_on_demand=True)
    with pytest.raises(KeyboardInterrupt), actor.lock, actor.lock.change(actor):
        raise KeyboardInterrupt
    actor.lock.repair_if_interrupted()
    assert (actor.is_asleep, backend.workers.qsize()) == (True, 0)
    actor.wake()
    future = call(actor)
    backend.next_worker().serve_start().serve_call("awake")
    assert future.result(SOON) == "awake"


def test_a_reply_that_came_in_time_counts_although_a_borrower_has_not_read_it(actors, monkeypatch):
    actor, backend = actors(deadlines=ea.Deadlines(call=0.3))
    future = call(actor)
    worker = backend.next_worker().serve_start()
    lent, replied = threading.Event(), threading.Event()

    def wait_for_reply(process, deadline, *, spins):
        lent.set()  # the borrower gets no time to read, as after SIGSTOP and SIGCONT
        replied.wait(SOON)
        return True

    monkeypatch.setattr(LocalWorker, "wait_for_reply", wait_for_reply)
    wait_until(future.running)
    thread = threading.Thread(target=future.exception)
    thread.start()
    assert lent.wait(SOON)
    worker.serve_call("in time")
    wait_until(future.done)
    replied.set()
    thread.join()
    assert future.result() == "in time"
    assert not worker.was_killed


@pytest.fixture
def borrower(actors, monkeypatch):
    """An actor with a call whose waiting thread has borrowed the channel, and is kept from reading by a signal handler.

    It is a tuple (actor, backend, future of the call, worker).
    """
    actor, backend = actors(deadlines=ea.Deadlines(slow=None))
    future = call(actor)
    worker = backend.next_worker().serve_start()
    lent, handled = threading.Event(), threading.Event()

    def wait_for_reply(process, deadline, *, spins):
        lent.set()
        handled.wait(2 * SOON)
        return False

    monkeypatch.setattr(LocalWorker, "wait_for_reply", wait_for_reply)
    wait_until(future.running)
    thread = threading.Thread(target=future.exception)
    thread.start()
    assert lent.wait(SOON)
    yield actor, backend, future, worker
    assert thread.is_alive()
    handled.set()
    thread.join()


def test_an_exit_does_not_wait_for_the_signal_handler_of_a_borrower(borrower):
    actor, backend, future, worker = borrower
    worker.begin(worker.take())
    worker.crash()
    wait_until(future.done)
    other = call(actor)
    backend.next_worker().serve_start().serve_call("in the next process")
    wait_until(other.done)
    assert isinstance(future.exception(), ea.ActorDiedError)


def test_a_reply_does_not_wait_for_the_signal_handler_of_a_borrower(borrower):
    actor, _, future, worker = borrower
    behind = call(actor)
    for reply in ("first", "second"):
        worker.serve_call(reply)
    wait_until(behind.done)
    assert future.result() == "first"


def test_a_signal_handler_may_read_the_result_that_its_thread_is_reading(actors):
    actor, _ = actors()
    future = call(actor)
    outcome = NestedOutcome(future)
    future.set_outcome(outcome)
    assert future.result(SOON) == "value"
    assert outcome.nested == "value"


class ReplayingTenant(Tenant):
    """Has each new process run replays first."""

    def on_started(self, process, *, is_renewal):
        return [ReplayJob(index, dumps(()), lambda _is_same: None) for index in range(2)]


def test_replays_of_an_ended_process_are_forgotten(actors):
    actor, backend = actors()
    actor.tenant = ReplayingTenant()
    worker = backend.next_worker().serve_start()
    wait_until(lambda: len(actor.jobs.unfinished) == 2)
    worker.crash()
    backend.next_worker()
    wait_until(lambda: actor.process.incarnation == 1)
    assert not actor.jobs.unfinished


def test_a_job_that_is_queued_first_runs_after_the_replays_that_prepare_its_process(actors):
    actor, backend = actors()
    actor.tenant = ReplayingTenant()
    worker = backend.next_worker().serve_start()
    replay = worker.take()
    last = call(actor, "last")
    first = Call("first", 0, Kind.CALL, ActorFuture(actor, None), payload=dumps((0, "method", ("first",), {})))
    with actor.lock, actor.lock.change(actor):
        actor.jobs.enqueue(first, first=True)
    worker.reply(replay, (True,))
    seen = [replay.kind]
    for _ in range(3):
        frame = worker.take()
        seen.append(loads(frame.payload)[2][0] if frame.kind == Kind.CALL else frame.kind)
        worker.reply(frame, (True,))
    assert seen == [Kind.REPLAY, Kind.REPLAY, "first", "last"]
    assert (first.future.result(SOON), last.result(SOON)) == ((True,), (True,))


class NestedOutcome:
    """Asks for the result of its future while that is read, as a signal handler may."""

    is_failure = False
    nested = None

    def __init__(self, future):
        self.future = future

    def read(self):
        if self.nested is None:
            self.nested = "reading"
            self.nested = self.future.result(SOON)
        return "value", None


def test_an_internal_error_while_a_process_is_taken_closes_both_actors(actors, monkeypatch):
    lock = ChangeLock()
    standby, spares = actors(lock=lock, is_standby=True)
    spare = spares.next_worker().serve_start()
    wait_until(lambda: standby.phase is Phase.LIVE)
    actor, backend = actors(lock=lock, standbys=[standby.give_process])
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)

    def fail():
        raise KeyError("a bug")

    monkeypatch.setattr(standby.deadline_watch, "stop", fail)
    worker.crash()
    for one in (actor, standby):
        one.wait_closed(SOON)
        assert one.state is ActorState.CLOSED
    assert spare.is_gone


def test_a_standby_on_a_node_that_is_drained_moves_and_is_not_taken(actors):
    lock = ChangeLock()
    standby, spares = actors(lock=lock, is_standby=True)
    spare = spares.next_worker().serve_start()
    wait_until(lambda: standby.phase is Phase.LIVE)
    spare.reason_to_move = "its node is being drained"
    actor, backend = actors(lock=lock, standbys=[standby.give_process])
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    worker.crash()
    backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    assert spare.take().kind == Kind.CLOSE
    spare.crash()
    spares.next_worker().serve_start()
    wait_until(lambda: standby.phase is Phase.LIVE)
    assert standby.stats().restarts == 0
    assert not actor.process.was_standby


def test_errors_of_a_standby_name_no_env(actors):
    standby, spares = actors(is_standby=True, restart=ea.RestartPolicy(max_restarts=0))
    worker = spares.next_worker()
    worker.crash()
    wait_until(lambda: standby.phase is Phase.DEAD)
    assert f"actor 'actor' (pid {worker.pid}, incarnation 0) was" in str(standby.stats().last_failure)


def crash_beside_a_standby(actors):
    """Return the worker of a standby, the standby, the actor that takes the worker, and the backends of both."""
    lock = ChangeLock()
    standby, spares = actors(lock=lock, is_standby=True)
    spare = spares.next_worker().serve_start()
    wait_until(lambda: standby.phase is Phase.LIVE)
    actor, backend = actors(lock=lock, standbys=[standby.give_process])
    backend.next_worker().serve_start().crash()
    return spare, standby, actor, spares, backend


def test_only_a_crash_of_a_standby_counts_as_its_restart(actors):
    spare, standby, actor, spares, _ = crash_beside_a_standby(actors)
    spare.serve_start()
    second = spares.next_worker().serve_start()
    wait_until(lambda: standby.phase is Phase.LIVE)
    assert (actor.stats().restarts, standby.stats().restarts) == (1, 0)
    second.crash()
    spares.next_worker()
    assert standby.stats().restarts == 1


def test_the_timers_of_a_standby_that_crashed_while_it_was_taken_do_not_end_the_next_process(actors):
    spare, _, actor, _, backend = crash_beside_a_standby(actors)
    wait_until(lambda: actor.process.was_standby)
    spare.far.close()  # the loop learns of the end of the channel before that of the process
    wait_until(lambda: actor.process.worker.at_end)
    spare.crash()
    worker = backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    time.sleep(1.2)
    assert not worker.was_killed
    assert actor.process.worker is worker


class BrokenError(Exception):
    def __repr__(self):
        raise KeyError("broken")

    __str__ = __repr__


class FailingTenant(Tenant):
    """Has memory that nobody can read."""

    def collect_completed(self):
        raise KeyError("a bug")


def test_an_internal_error_in_the_handling_of_an_exit_closes_the_actor(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    future = call(actor)
    worker.take()
    actor.tenant = FailingTenant()
    worker.crash()
    with pytest.raises(ea.ActorClosedError, match="report"):
        future.result(SOON)
    begun = time.monotonic()
    actor.begin_close(SOON)
    actor.wait_closed(SOON)
    assert actor.closed.is_set
    assert time.monotonic() - begun < SOON / 2
    assert backend.workers.empty(), "it is not started again"


def test_an_actor_that_a_bug_closes_gives_its_permit_back(actors):
    shared = {"lock": ChangeLock(), "permits": Permits(1)}
    (first, first_backend), (second, second_backend) = actors(**shared), actors(**shared)
    worker = first_backend.next_worker().serve_start()
    send_request(first, Kind.CALL, (0, "step", (), {}), "step")
    worker.take()
    waiting = send_request(second, Kind.CALL, (0, "step", (), {}), "step")
    first.tenant = FailingTenant()
    worker.crash()
    second_backend.next_worker().serve_start().serve_call("its turn")
    assert waiting.result(SOON) == "its turn"


def test_a_closing_actor_is_not_closed_while_calls_wait_for_its_backoff(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=0.3))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    future = call(actor)
    actor.begin_close(SOON)
    assert actor.state is ActorState.RENEWING
    worker = backend.next_worker().serve_start()
    worker.serve_call("last")
    assert future.result(SOON) == "last"
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    assert actor.closed.wait(SOON)
    assert actor.state is ActorState.CLOSED


@pytest.mark.parametrize("error", [OSError("no memory"), BrokenError()], ids=["plain", "broken"])
def test_a_first_launch_that_fails_after_its_deadline_is_retried(actors, monkeypatch, error):
    real, launches = FakeBackend.start, []

    def start(*args):
        launches.append(args)
        if len(launches) > 1:
            return real(*args)
        wait_until(lambda: actor.process.end_reason is EndReason.TIMEOUT)
        raise error

    monkeypatch.setattr(FakeBackend, "start", start)
    actor, backend = actors(deadlines=ea.Deadlines(start=0.05))
    future = call(actor)
    backend.next_worker().serve_start().serve_call("done")
    assert future.result(SOON) == "done"
    assert "could not be started" in str(actor.stats().last_failure)


def test_a_first_start_that_fails_uses_up_no_restart(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=1, backoff=0.0))
    worker = backend.next_worker()
    worker.reply(worker.take(), tuple(pack_failure(KeyError("no such env"), Fault.RAISED)), Kind.FAILED)
    wait_until(lambda: actor.phase is Phase.DEAD)
    actor.renew(ActorFuture(actor, None))
    backend.next_worker().serve_start().crash()
    backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    assert actor.stats().restarts == 1


def refuse_start(worker):
    worker.reply(worker.take(), tuple(pack_failure(KeyError("no such env"), Fault.RAISED)), Kind.FAILED)
    assert worker.take().kind == Kind.CLOSE
    worker.crash()


def test_a_factory_that_raises_after_a_kill_during_the_first_start_is_not_retried(actors):
    actor, backend = actors()
    backend.next_worker()
    actor.kill(restart=True)
    refuse_start(backend.next_worker())
    wait_until(lambda: actor.phase is Phase.DEAD)
    assert actor.process.incarnation == 1


def test_a_backend_whose_exception_has_no_repr_fails_the_start(actors, monkeypatch):
    def start(*_):
        raise BrokenError

    monkeypatch.setattr(FakeBackend, "start", start)
    actor, _ = actors(restart=ea.RestartPolicy(max_restarts=0))
    with pytest.raises(ea.ActorStartError, match="could not be started: <BrokenError"):
        call(actor).result(SOON)


@pytest.mark.parametrize(
    ("backoffs", "cause"),
    [((0.0, 5.0), "(backoff=0)"), ((1.0, 0.0), "(backoff_max=0)"), ((0.0, 0.0), "(backoff=0, backoff_max=0)")],
)
def test_an_actor_that_never_starts_names_the_option_that_delays_no_start(actors, backoffs, cause):
    actor, backend = actors(restart=ea.RestartPolicy(100, backoff=backoffs[0], backoff_max=backoffs[1]))
    future = call(actor)
    for _ in range(10):
        backend.next_worker().crash()
    with pytest.raises(ea.RestartsExhaustedError) as caught:
        future.result(SOON)
    assert f"failed to start 10 times in a row, and restart=RestartPolicy{cause} does not" in str(caught.value)


def test_an_actor_on_demand_whose_envs_were_made_before_retries_a_start(actors):
    actor, backend = actors(is_on_demand=True)
    actor.wake()
    backend.next_worker().serve_start().crash()
    refuse_start(backend.next_worker())
    backend.next_worker().serve_start()
    wait_until(lambda: actor.phase is Phase.LIVE)
    assert actor.process.incarnation == 2


def test_a_corrupt_reply_to_a_replay_does_not_count_as_completed(actors):
    actor, backend = actors()
    actor.tenant = ReplayingTenant()
    worker = backend.next_worker().serve_start()
    frame = worker.take()
    worker.begin(frame)
    junk(worker, Kind.RESULT, frame.call_id)
    wait_until(lambda: worker.was_killed)
    stats = actor.stats()
    assert (stats.completed, stats.replays) == (0, 0)


def test_a_call_without_any_time_limit_leaves_no_timer(actors):
    actor, backend = actors(deadlines=ea.Deadlines(slow=None))
    call(actor, deadline=0.05)
    worker = backend.next_worker().serve_start()
    worker.serve_call()
    call(actor)
    worker.begin(worker.take())
    wait_until(lambda: actor.deadline_watch.next_check_at == math.inf)  # the check for the first call has run
    assert all(when < math.inf for when, *_ in actor.runtime.loop._timers)


def test_a_renewal_during_the_backoff_starts_the_next_process_at_once_and_is_not_counted(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=60.0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    renewed = ActorFuture(actor, None)
    actor.renew(renewed)
    worker = backend.next_worker().serve_start()
    assert renewed.result(SOON) == 1
    assert actor.stats().restarts == 0
    after = call(actor)
    worker.serve_call("the same process")
    assert after.result(SOON) == "the same process"


def test_a_renewal_that_is_aborted_while_the_next_process_starts_was_ended_on_purpose(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    renewed = ActorFuture(actor, None)
    actor.renew(renewed)
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    backend.next_worker().take()
    assert renewed.abort()
    with pytest.raises(ea.ActorStartError, match=r"was ended on purpose after .* before its env was made"):
        renewed.result(SOON)


def test_a_renewal_that_is_aborted_after_its_process_was_late_tells_of_the_abort(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=60.0))
    worker = backend.next_worker().serve_start()
    renewed = ActorFuture(actor, None)
    actor.renew(renewed)
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    late = backend.next_worker()
    late.take()
    actor.run_as_change(actor.end_after_stacks)
    late.crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    assert renewed.abort()
    with pytest.raises(ea.ActorDiedError) as caught:
        renewed.result(SOON)
    assert caught.value.aborted


def test_envs_that_a_renewal_has_made_are_closed_if_the_factory_of_another_one_raises(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    actor.renew(ActorFuture(actor, None))
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    worker = backend.next_worker()
    worker.reply(worker.take(), tuple(pack_failure(KeyError("no such env"), Fault.RAISED)), Kind.FAILED)
    assert worker.take().kind == Kind.CLOSE


def test_a_call_does_not_run_if_its_cancel_was_interrupted(actors, monkeypatch):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=0.0))
    _, canceled, after = call(actor), call(actor, "canceled"), call(actor, "after")
    backend.next_worker().serve_start().take()
    set_canceled = ActorFuture.set_canceled

    def set_canceled_and_interrupt(future):
        set_canceled(future)
        raise KeyboardInterrupt

    monkeypatch.setattr(ActorFuture, "set_canceled", set_canceled_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        canceled.cancel()
    assert canceled.cancelled()
    assert backend.next_worker().serve_start().serve_call("done")[2] == ("after",)
    assert after.result(SOON) == "done"


def test_a_renewal_behind_a_call_waits_for_the_backoff_with_it(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=60.0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    before, renewed = call(actor), ActorFuture(actor, None)
    actor.renew(renewed)
    actor.run_as_change(actor._proceed)
    assert actor.phase is Phase.BACKOFF
    with actor.lock, actor.lock.change(actor):
        actor._restart()
    worker = backend.next_worker().serve_start()
    worker.serve_call("before")
    assert before.result(SOON) == "before"
    assert worker.take().kind == Kind.CLOSE


def test_a_second_renewal_during_the_backoff_does_not_replace_the_first(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=0.05))
    renewals = [ActorFuture(actor, None) for _ in range(2)]
    worker = backend.next_worker().serve_start()
    actor.renew(renewals[0])
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    backend.next_worker().crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    actor.renew(renewals[1])
    worker = backend.next_worker().serve_start()
    assert renewals[0].result(SOON) == 2
    assert worker.take().kind == Kind.CLOSE
    worker.crash()
    backend.next_worker().serve_start()
    assert renewals[1].result(SOON) == 3


def test_an_aborted_retry_counts_as_failed(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=60.0))
    future = call(actor, retries=1)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    worker.crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    assert actor.abort(future)
    assert actor.stats().failed == 1


@pytest.mark.parametrize("end", ["abort", "kill"])
def test_a_retry_that_never_began_has_not_run_for_any_time(actors, end):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=5, backoff=SOON, backoff_max=SOON))
    future = call(actor, retries=3)
    worker = backend.next_worker().serve_start()
    worker.begin(worker.take())
    worker.crash()
    wait_until(lambda: actor.phase is Phase.BACKOFF)
    if end == "abort":
        assert future.abort()
    else:
        actor.kill(restart=False)
    with pytest.raises(ea.ActorDiedError, match="was ended on purpose before method could run") as caught:
        future.result(SOON)
    assert (caught.value.elapsed, caught.value.call_id) == (None, None)


def test_a_call_whose_process_is_gone_says_that_it_could_not_run_and_counts_as_failed(actors):
    actor, backend = actors()
    future = call(actor, incarnation=7)
    backend.next_worker().serve_start()
    with pytest.raises(ea.ActorDiedError, match="before method could run"):
        future.result(SOON)
    assert actor.stats().failed == 1


JUNK = b"\x80\x05junk"


def junk(worker, kind, call_id, content=JUNK):
    worker.far.send(Frame(kind, 0, call_id, content))


@pytest.mark.parametrize("content", [JUNK, dumps("three"), dumps(threading.Event), dumps((-2,)), dumps((9,))])
def test_a_worker_that_sends_junk_in_place_of_the_count_of_its_envs_is_killed(actors, content):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    worker = backend.next_worker()
    worker.take()
    junk(worker, Kind.ENV_MADE, 0, content)
    with pytest.raises(ea.ActorStartError, match="overwritten memory that it shares"):
        call(actor).result(SOON)
    assert worker.was_killed


def test_a_worker_that_sends_junk_in_place_of_the_failure_of_its_start_is_killed(actors):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    worker = backend.next_worker()
    worker.take()
    junk(worker, Kind.FAILED, 0)
    with pytest.raises(ea.ActorStartError, match="overwritten memory that it shares"):
        call(actor).result(SOON)


@pytest.mark.parametrize("content", [b"", JUNK, bytes(8) + bytes([255]) * 40, packing.pack([(0, JUNK)])[:-1]])
def test_a_worker_that_sends_junk_in_place_of_large_results_is_killed(stages, content):
    stage = stages(2)
    stage.start([1, 2])
    worker = stage.worker()
    junk(worker, Kind.OVERFLOW, 0, content)
    stage.settle()
    assert worker.was_killed
    with pytest.raises(ea.VectorStepError, match="overwritten memory that it shares"):
        stage.finish()


def test_a_piece_of_a_reply_that_the_running_job_does_not_wait_for_is_dropped(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker().serve_start()
    frame = worker.take()
    actor.jobs.running.on_reply_piece = lambda _frame: pytest.fail("it is not its own")
    junk(worker, Kind.PIECE, frame.call_id + 1)
    worker.begin(frame)
    worker.reply(frame, "fine")
    assert future.result(SOON) == "fine"
    assert actor.stats().stale == 1


class RaisingTenant(Tenant):
    """Has a bug in its repair."""

    def repair(self, error_of):
        raise KeyError("a bug")


def test_a_bug_in_a_repair_closes_the_actor(actors):
    actor, backend = actors()
    worker = backend.next_worker().serve_start()
    future = call(actor)
    worker.take()
    actor.tenant = RaisingTenant()
    with pytest.raises(Hit), actor.lock, actor.lock.change(actor):
        raise Hit
    assert actor.closed.wait(SOON)
    with pytest.raises(ea.ActorError):
        future.result(SOON)
    with pytest.raises(ea.ActorClosedError):
        call(actor)
    assert backend.workers.empty()


class Boom(Exception):
    """A bug of this library, planted by a test."""


def raise_once(monkeypatch, holder, name):
    """Have a method raise when it is called for the first time."""
    real = getattr(holder, name)

    def broken(*args):
        monkeypatch.setattr(holder, name, real)
        raise Boom

    monkeypatch.setattr(holder, name, broken)


def test_an_actor_whose_worker_cannot_be_reaped_is_closed(actors, monkeypatch):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker().serve_start()
    close = worker.close

    def broken():  # the end of `LocalWorker.reap`, which watches the worker no more
        close()
        raise Boom

    monkeypatch.setattr(worker, "close", broken)
    worker.crash()
    with pytest.raises(ea.ActorClosedError, match="internal error"):
        future.result(SOON)
    wait_until(lambda: actor.closed.is_set)


def test_a_dead_actor_whose_close_meets_a_bug_is_closed_nevertheless(actors, monkeypatch):
    actor, backend = actors(restart=ea.RestartPolicy(max_restarts=0))
    backend.next_worker().serve_start().crash()
    wait_until(lambda: actor.phase is Phase.DEAD)
    raise_once(monkeypatch, actor.jobs, "fail_all")
    actor.begin_close(None)
    wait_until(lambda: actor.closed.is_set)


class NamelessError(ImportError):
    """Its name is code of a user, which must not run under the lock."""

    @property
    def name(self):
        raise ValueError("code of a user")


def test_an_import_error_of_a_factory_whose_name_is_computed_is_reported(actors):
    actor, backend = actors()
    future = call(actor)
    worker = backend.next_worker()
    worker.reply(worker.take(), tuple(pack_failure(NamelessError("no such module"), Fault.RAISED)), Kind.FAILED)
    worker.take()
    worker.crash()
    with pytest.raises(ea.ActorStartError, match="no such module"):
        future.result(SOON)
