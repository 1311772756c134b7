"""Workers that crash, hang, and send wrong replies: real kills and hangs.

They test the promises `crash`, `deadline`, `stale`, `deliberate`, `worker-dies`, `close`, and `rounds`.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from helpers import FORK_SERVER, SOON, UP, Counter, is_gone, promised, wait_for_path, wait_until

import envactors as ea
from envactors.actor.actor_process import ActorProcess
from envactors.backends.process import ProcessWorker
from envactors.testing import EchoEnv

MANY = ea.RestartPolicy(max_restarts=20, backoff=0.0)
NEVER = ea.RestartPolicy(max_restarts=0)


def timed(function):
    begun = time.monotonic()
    try:
        return function(), time.monotonic() - begun
    except Exception as error:
        return error, time.monotonic() - begun


@pytest.mark.parametrize(
    ("method", "args", "exitcode", "signum"),
    [
        ("die", (signal.SIGKILL,), None, signal.SIGKILL),
        ("segfault", (), None, signal.SIGSEGV),
        ("exit_now", (3,), 3, None),
        ("die", (signal.SIGTERM,), None, signal.SIGTERM),
    ],
)
def test_a_crash_in_a_call_fails_it_within_a_second(method, args, exitcode, signum):
    with ea.spawn(Counter, name="mortal", restart=MANY) as actor, ea.spawn(Counter) as sibling:
        sibling.add().result(SOON)
        actor.complain("first words", "last words").result(SOON)
        pid = actor.pid
        future, queued = actor.call(method, *args), actor.add()
        error, took = timed(future.result)
        assert isinstance(error, ea.ActorDiedError)
        assert took < promised(1.0)
        assert (error.exitcode, error.signal, error.aborted) == (exitcode, signum, False)
        assert (error.actor, error.index, error.pid, error.incarnation) == ("mortal", 0, pid, 0)
        assert error.method == method
        assert error.call_id > 0
        assert "first words\nlast words" in error.stderr_tail
        if signum == signal.SIGSEGV:
            assert "Segmentation fault" in error.stderr_tail
            assert "in segfault" in error.stderr_tail
        assert queued.result(SOON) == 1
        assert sibling.add().result(SOON) == 2
        assert actor.stats().restarts == 1


class Threaded(Counter):
    """Has threads that wait, beside the one that runs the calls."""

    def __init__(self, threads):
        super().__init__()
        for _ in range(threads):
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    def segfault_in_a_thread(self):
        threading.Thread(target=self.segfault).start()
        threading.Event().wait()


@pytest.mark.parametrize("method", ["segfault", "segfault_in_a_thread"])
@pytest.mark.parametrize("threads", [1, 30])
def test_a_segfault_shows_the_frames_of_the_thread_that_failed_first(threads, method):
    with ea.spawn(Threaded, threads) as actor:
        error = actor.call(method).exception(SOON)
    assert len(error.stderr_tail.splitlines()) <= 50
    for text in (str(error), error.stderr_tail):
        frames = [line for line in text.splitlines() if line.startswith("  File ")]
        at = next(index for index, frame in enumerate(frames) if frame.endswith("in segfault"))
        assert not any("threading.py" in frame for frame in frames[:at])
        assert "worker/main.py" not in text


@pytest.mark.parametrize("how", ["raise", "kill", "exit", "segfault"])
def test_a_factory_that_fails(how):
    def factory():
        if how == "raise":
            raise LookupError("no such ROM")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(9)
        ctypes.string_at(0)

    with ea.spawn(factory, name="stillborn") as actor:
        error, took = timed(actor.anything().result)
        assert isinstance(error, ea.ActorStartError)
        assert took < promised(5.0)  # an interpreter starts meanwhile
        assert error.actor == "stillborn"
        if how == "raise":
            assert isinstance(error.__cause__, LookupError)
            assert isinstance(error.__cause__.__cause__, ea.RemoteTraceback)
        else:
            expected = {"kill": (None, 9), "exit": (9, None), "segfault": (None, 11)}[how]
            assert (error.exitcode, error.signal) == expected
        assert actor.state is ea.ActorState.DEAD
        with pytest.raises(ea.ActorStartError):
            actor.anything().result(SOON)


def test_a_failed_start_is_retried_counted_and_listed():
    def factory():
        if ea.current_actor().incarnation == 0:
            os._exit(3)
        raise LookupError("never")

    policy = ea.RestartPolicy(max_restarts=2, backoff=0.0)
    with ea.spawn(factory, restart=policy) as actor:
        with pytest.raises(ea.RestartsExhaustedError) as caught:
            actor.anything().result(SOON)
        assert [type(cause) for cause in caught.value.causes] == [ea.ActorStartError] * 3
        assert [cause.incarnation for cause in caught.value.causes] == [0, 1, 2]
        assert actor.stats().restarts == 2


def test_a_start_that_works_at_the_second_try(tmp_path):
    mark = str(tmp_path / "mark")

    def factory():
        env = Counter()
        env.die_unless(mark)
        return env

    with ea.spawn(factory, restart=MANY) as actor:
        assert actor.add().result(SOON) == 1
        assert actor.incarnation == 1


def test_a_crash_while_idle_is_noticed_and_fails_no_call():
    with ea.spawn(Counter, restart=MANY) as actor:
        actor.add(5).result(SOON)
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: actor.incarnation == 1, patience=1.0)
        assert actor.add().result(SOON) == 1
        for expected in (2, 3, 4):
            os.kill(actor.pid, signal.SIGKILL)
            assert actor.add().result(SOON) == 1, "the call was not begun: it runs on the new incarnation"
            assert actor.incarnation == expected


def test_a_call_made_before_a_crash_is_noticed_runs_on_the_new_incarnation():
    with ea.spawn(Counter, restart=MANY) as actor:
        actor.add(5).result(SOON)
        with actor._actor.lock:  # until the call is sent, no thread notices the crash
            pid = actor.pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_gone(pid))
            future = actor.add()
        assert future.result(SOON) == 1
        assert actor.incarnation == 1


def test_without_restarts_a_crash_while_idle_is_the_error_of_later_calls():
    with ea.spawn(Counter, restart=NEVER) as actor:
        actor.add().result(SOON)
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: actor.state is ea.ActorState.DEAD, patience=1.0)
        with pytest.raises(ea.ActorDiedError) as caught:
            actor.add().result(SOON)
        assert caught.value.signal == signal.SIGKILL
        actor.renew().result(SOON)
        assert actor.add().result(SOON) == 1
        assert actor.incarnation == 1


def test_queued_calls_of_an_ended_actor_fail_and_later_ones_run_after_renew(tmp_path):
    touched = tmp_path / "touched"
    with ea.spawn(Counter, restart=NEVER) as actor:
        running = actor.hang_in_c(str(touched))
        queued, renewal, after = actor.add(), actor.renew(), actor.add()
        wait_for_path(touched)
        os.kill(actor.pid, signal.SIGKILL)
        for future in (running, queued):
            with pytest.raises(ea.ActorDiedError):
                future.result(SOON)
        assert renewal.result(SOON) == 1
        assert after.result(SOON) == 1


TWO = ea.RestartPolicy(max_restarts=2, backoff=0.0)
TWO_EVER = ea.RestartPolicy(max_restarts=math.inf, window=0.0, backoff=0.0, max_lifetime_restarts=2)


@pytest.mark.parametrize("policy", [TWO, TWO_EVER], ids=["in a window", "in its life"])
def test_restarts_are_exhausted_and_every_cause_is_listed(policy):
    with ea.spawn(Counter, restart=policy) as actor:
        for code in (1, 2):
            with pytest.raises(ea.ActorDiedError):
                actor.exit_now(code).result(SOON)
        with pytest.raises(ea.ActorDiedError):
            actor.exit_now(3).result(SOON)
        with pytest.raises(ea.RestartsExhaustedError) as caught:
            actor.add().result(SOON)
        assert [cause.exitcode for cause in caught.value.causes] == [1, 2, 3]
        reached = "max_restarts=2, window=600.0" if policy is TWO else "max_lifetime_restarts=2"
        assert f"restart=RestartPolicy({reached}) allows no more restarts" in str(caught.value)
        assert f"raise {reached.partition('=')[0]}, or set it to math.inf" in str(caught.value)
        assert actor.state is ea.ActorState.DEAD


def test_no_call_runs_twice_without_retries(tmp_path):
    log, mark = tmp_path / "log", str(tmp_path / "mark")

    class Env(Counter):
        def log_and_die_unless(self, mark):
            self.touch(str(log))
            return self.die_unless(mark)

    with ea.spawn(Env, restart=MANY) as actor:
        with pytest.raises(ea.ActorDiedError):
            actor.log_and_die_unless(mark).result(SOON)
        assert log.read_text() == "x"
        Path(mark).unlink()
        first, second = actor.options(retries=1).log_and_die_unless(mark), actor.add()
        assert first.result(SOON) == "alive"
        assert second.result(SOON) == 1
        assert log.read_text() == "xxx"
        with pytest.raises(ea.ActorDiedError):
            actor.options(retries=2).exit_now(4).result(SOON)
        wait_until(lambda: actor.stats().restarts == 2 + 3)
        with pytest.raises(ValueError, match="only once"):
            actor.options(retries=5).fail(ValueError, "only once").result(SOON)


@pytest.mark.parametrize("hang", ["sleep", "C", "SIGSTOP"])
def test_a_deadline_is_enforced_from_outside(hang):
    with ea.spawn(Counter, restart=MANY, deadlines=ea.Deadlines(call=0.5)) as actor:
        actor.add().result(SOON)
        pid = actor.pid
        if hang == "SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
        call = {"sleep": lambda: actor.sleep(60), "C": actor.hang_in_c, "SIGSTOP": actor.add}[hang]
        future = call()
        error, took = timed(future.result)
        assert isinstance(error, ea.ActorTimeoutError)
        assert isinstance(error, TimeoutError)
        assert 0.5 <= took < promised(1.5)
        assert error.timeout == 0.5
        assert (error.pid, error.incarnation) == (pid, 0)
        if hang == "SIGSTOP":
            assert error.stacks == ""
        else:
            assert f"in {'sleep' if hang == 'sleep' else 'hang_in_c'}" in error.stacks
        assert is_gone(pid)
        assert actor.add().result(SOON) == 1
        assert actor.stats().restarts == 1


def test_deadlines_count_from_when_the_call_could_start_and_have_their_own_for_step_and_reset():
    class Env(Counter):
        def step(self):
            return self.sleep(0.3)

        def reset(self):
            return self.sleep(60)

    deadlines = ea.Deadlines(call=1.0, reset=0.2)
    with ea.spawn(Env, deadlines=deadlines, restart=MANY) as actor:
        futures = [actor.step() for _ in range(6)]  # 1.8 s in all, each within its second
        for future in futures:
            assert future.result(SOON) == 0.3
        with pytest.raises(ea.ActorTimeoutError) as caught:
            actor.reset().result(SOON)
        assert caught.value.timeout == 0.2
        with pytest.raises(ea.ActorTimeoutError) as caught:
            actor.options(deadline=0.1).step().result(SOON)
        assert caught.value.timeout == 0.1


def test_the_start_deadline():
    for deadline in (UP + 0.5, 10 * UP):
        with ea.spawn(lambda: time.sleep(600), deadlines=ea.Deadlines(start=deadline)) as actor:
            error, took = timed(actor.anything().result)
        assert isinstance(error, ea.ActorStartError)
        assert deadline <= took < deadline + SOON
        assert isinstance(error.__cause__, ea.ActorTimeoutError)
        if error.__cause__.stacks:  # on a busy machine, a worker may need longer to come as far as its factory
            break
    assert "in <lambda>" in error.__cause__.stacks


def test_a_deadline_with_retries_runs_the_call_again(tmp_path):
    mark = tmp_path / "mark"

    class Env(Counter):
        def slow_once(self):
            if not mark.exists():
                mark.touch()
                time.sleep(60)
            return "quick"

    with ea.spawn(Env, restart=MANY) as actor:
        assert actor.options(deadline=0.5, retries=1).slow_once().result(SOON) == "quick"


def test_late_replies_are_dropped():
    """Calls that end just about when their deadline does: each result is its own call's, or an error."""

    class Env(Counter):
        def after(self, seconds, value):
            time.sleep(seconds)
            return value

    with ea.spawn(Env, restart=ea.RestartPolicy(max_restarts=100, backoff=0.0)) as actor:
        outcomes = {"in time": 0, "late": 0}
        for i in range(12):
            actor.echo(0).result(SOON)
            try:
                assert actor.options(deadline=0.05).after(0.02 + 0.02 * (i % 4), i).result(SOON) == i
                outcomes["in time"] += 1
            except ea.ActorTimeoutError:
                outcomes["late"] += 1
            assert actor.echo(i * 10).result(SOON) == i * 10
        assert outcomes["late"] >= 3
        assert outcomes["in time"] >= 3
        assert actor.stats().stale >= 1, "a reply within the grace period was dropped and counted"


def test_a_reply_that_matches_nothing_is_dropped_and_counted():
    class Env(Counter):
        def forge(self):
            """Sends replies to calls that nobody made, over the worker's own channel."""
            import gc

            from envactors.mailbox.channel import Channel
            from envactors.mailbox.messages import Frame, Kind
            from envactors.mailbox.pickling import dumps

            (channel,) = (thing for thing in gc.get_objects() if isinstance(thing, Channel))
            for incarnation, call_id in ((0, 99), (7, 1), (7, 2)):
                channel.send(Frame(Kind.RESULT, incarnation, call_id, dumps("forged")))
            return "real"

    with ea.spawn(Env) as actor:
        assert actor.forge().result(SOON) == "real"
        assert actor.add().result(SOON) == 1
        assert actor.stats().stale == 3


def test_garbage_on_the_channel_is_a_crash_and_not_a_result():
    class Env(Counter):
        def babble(self):
            import gc

            from envactors.mailbox.channel import Channel

            (channel,) = (thing for thing in gc.get_objects() if isinstance(thing, Channel))
            channel.socket.sendall(b"\xff" * 100)
            time.sleep(60)

    with ea.spawn(Env, restart=MANY) as actor:
        with pytest.raises(ea.ActorDiedError):
            actor.babble().result(SOON)
        assert actor.add().result(SOON) == 1


def test_a_stray_byte_on_the_channel_is_noticed_with_the_next_reply():
    class Env(Counter):
        def stray(self):
            import gc

            from envactors.mailbox.channel import Channel

            (channel,) = (thing for thing in gc.get_objects() if isinstance(thing, Channel))
            channel.socket.sendall(b"!")

    with ea.spawn(Env, restart=MANY) as actor:
        with pytest.raises(ea.ActorDiedError):
            actor.stray().result(SOON)
        assert actor.add().result(SOON) == 1


def test_huge_deadlines_have_no_effect():
    endless = ea.Deadlines(start=1e12, call=1e12, close=1e12)
    with ea.spawn(Counter, deadlines=endless) as patient, ea.spawn(Counter, restart=MANY) as other:
        assert patient.add().result(1e12) == 1
        future = patient.sleep(0.5)
        with pytest.raises(ea.ActorTimeoutError):
            other.options(deadline=0.2).sleep(60).result(SOON)
        assert future.result(1e12) == 0.5


def test_child_processes_of_a_worker_end_with_it():
    class Env(Counter):
        def start_child(self):
            return subprocess.Popen(["sleep", "60"]).pid

    with ea.spawn(Env, restart=MANY) as actor:
        children = [actor.start_child().result(SOON)]
        os.kill(actor.pid, signal.SIGKILL)
        children.append(actor.start_child().result(SOON))
        actor.renew()
        children.append(actor.start_child().result(SOON))
    wait_until(lambda: all(is_gone(pid) for pid in children), patience=5)


def test_a_call_that_passes_its_deadline_while_the_actor_is_closed_fails_with_that():
    actor = ea.spawn(Counter)
    actor.add().result(SOON)
    future, queued = actor.options(deadline=0.5).sleep(SOON), actor.add()
    closing = threading.Thread(target=actor.close, args=(SOON,))
    closing.start()
    try:
        error = future.exception(SOON)
        assert isinstance(error, ea.ActorTimeoutError)
        assert (error.timeout, error.method) == (0.5, "sleep")
        assert "in sleep" in error.stacks
        assert queued.exception(SOON).aborted
    finally:
        closing.join(SOON)


def test_a_thread_that_never_ends_does_not_hold_up_close():
    class Env(Counter):
        def start_thread(self):
            threading.Thread(target=time.sleep, args=(60,)).start()

    actor = ea.spawn(Env)
    actor.start_thread().result(SOON)
    _, took = timed(actor.close)
    assert took < promised(3.0)


def test_a_worker_that_loses_its_descriptors_is_replaced():
    class Env(Counter):
        def close_all(self):
            os.closerange(3, 1000)
            return "closed"

    with ea.spawn(Env, restart=MANY) as actor:
        with pytest.raises(ea.ActorDiedError):
            actor.close_all().result(SOON)
        assert actor.add().result(SOON) == 1


def test_a_grandchild_that_holds_the_descriptors_hides_no_crash():
    class Env(Counter):
        def fork_and_die(self):
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    with ea.spawn(Env, restart=MANY) as actor:
        actor.add().result(SOON)
        error, took = timed(actor.fork_and_die().result)
        assert isinstance(error, ea.ActorDiedError)
        assert took < promised(1.0)


def test_big_arguments_to_a_worker_that_does_not_read_block_nobody():
    with ea.spawn(Counter, restart=MANY) as actor:
        actor.add().result(SOON)
        os.kill(actor.pid, signal.SIGSTOP)
        future, took = timed(lambda: actor.options(deadline=0.5).echo(bytes(50_000_000)))
        assert took < promised(1.0)
        with pytest.raises(ea.ActorTimeoutError):
            future.result(SOON)
        assert actor.echo(bytes(50_000_000)).result(SOON) == bytes(50_000_000)


class Sleeper(EchoEnv):
    """An env with a method that hangs."""

    def hang(self):
        time.sleep(60)


def test_a_call_behind_a_step_whose_result_nobody_took_has_its_deadline():
    with ea.VectorEnv([Sleeper], deadlines=0.5) as envs:
        envs.reset()
        envs.send([1])
        time.sleep(0.2)
        with pytest.raises(ea.ActorTimeoutError):
            envs[0].hang().result(SOON)


class LateOrLarge(EchoEnv):
    """Env 0 is late; env 1 has an info that has no place in its row."""

    def __init__(self, env_id, is_late):
        super().__init__(env_id)
        self.is_late = is_late

    def step(self, action):
        if self.env_id == 0:
            wait_for_path(self.is_late)
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"large": os.urandom(100_000)} if self.env_id else {}


def test_a_large_result_of_a_process_that_is_about_to_be_killed_counts(monkeypatch, tmp_path):
    ask_stacks, kill = ActorProcess.request_stacks, ProcessWorker.kill

    def note_and_ask(incarnation):  # the deadline has passed
        (tmp_path / "late").touch()
        ask_stacks(incarnation)

    def kill_late(worker):
        wait_until(lambda: rows.written_ids[1] == rows.posted_ids[1])
        kill(worker)

    factories = [lambda i=i: LateOrLarge(i, tmp_path / "late") for i in range(2)]
    with ea.VectorEnv(factories, envs_per_actor=2, deadlines=ea.Deadlines(step=0.5)) as envs:
        envs.reset()
        rows = envs._engine.table.slab
        monkeypatch.setattr(ActorProcess, "request_stacks", note_and_ask)
        monkeypatch.setattr(ProcessWorker, "kill", kill_late)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 2], timeout=SOON)
        assert list(caught.value.failures) == [0]
        assert isinstance(caught.value.failures[0], ea.ActorTimeoutError)
        assert caught.value.batch.env_ids.tolist() == [1]


@pytest.mark.parametrize("state", ["healthy", "hung", "hung in C", "stopped", "dead", "unread", "starting"])
def test_close_returns_in_time_whatever_the_worker_does(state, tmp_path):
    touched = tmp_path / "touched"
    actor = ea.spawn((lambda: time.sleep(60)) if state == "starting" else Counter)
    futures = []
    if state != "starting":
        actor.add().result(SOON)
        pid = actor.pid
    if state == "hung":
        futures = [actor.sleep(60), actor.add()]
    elif state == "hung in C":
        futures = [actor.hang_in_c(str(touched)), actor.add()]
        wait_for_path(touched)
    elif state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    elif state == "dead":
        os.kill(pid, signal.SIGKILL)
    elif state == "unread":
        futures = [actor.echo(bytes(1_000_000)) for _ in range(50)]
    _, took = timed(lambda: actor.close(0.5))
    assert took < promised(1.5)
    assert actor.state is ea.ActorState.CLOSED
    for future in futures:
        assert future.done()
        if state != "unread":
            error = future.exception()
            assert isinstance(error, ea.ActorDiedError)
            assert error.aborted
    _, took = timed(actor.close)
    assert took < promised(0.1)


def test_an_idle_worker_is_never_killed_for_being_idle():
    deadlines = ea.Deadlines(call=0.5, step=0.5, reset=0.5)
    with ea.spawn(Counter, deadlines=deadlines) as actor:
        pid = actor.call("pid").result(SOON)
        time.sleep(1.2)
        assert actor.add().result(SOON) == 1
        assert actor.pid == pid


def test_a_deliberate_end_is_not_a_crash():
    with ea.spawn(Counter, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        for _ in range(3):
            actor.renew().result(SOON)
            actor.kill(restart=True)
            actor.add().result(SOON)
        assert actor.stats().restarts == 0
        assert actor.stats().last_failure is None


@pytest.mark.fresh_processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rounds", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_rounds_of_create_renew_close_leave_nothing(rounds):
    """Promise `rounds`; the fixture around every test compares descriptors, processes, threads and /dev/shm."""
    # A fresh interpreter costs a tenth of a second of a core, and twice a round: every fortieth round has them.
    for turn in range(rounds // 8):
        backends = [FORK_SERVER if turn % 5 else "process"] + [FORK_SERVER] * 7
        actors = [ea.spawn(Counter, backend=backend) for backend in backends]
        renewals = [actor.renew() for actor in actors]
        for renewal in renewals:
            assert renewal.result(SOON) == 1
        for actor in actors:
            actor.close()


def test_errors_of_queued_calls_name_the_deadline_that_ended_the_process():
    class Env:
        def hang(self):
            time.sleep(60)

    with ea.spawn(Env, deadlines=ea.Deadlines(call=0.3)) as actor:
        first, queued = actor.hang(), actor.hang()
        assert "deadline" in str(first.exception())
        assert "deadline" in str(queued.exception())
