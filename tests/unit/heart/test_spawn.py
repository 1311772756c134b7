"""Making actors: an exception at any line leaves no actor, and no start that holds up others."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from fakes import SOON, FakeBackend, FakeUse, PlayedEnv, wait_until
from interrupting import interrupt

import envactors as ea
from envactors import runtime as runtimes
from envactors.actor import inline
from envactors.actor.actor_process import EndReason
from envactors.actor.handle import ActorHandle, Lifeline, close_all
from envactors.actor.states import Phase
from envactors.vector import build
from envactors.vector.table import EnvTable

# The distance of the lines that are tried; `-m slow` tries every line.
STRIDE = 9


@pytest.mark.parametrize("keeps_runtime", [True, False])
def test_an_exception_at_some_lines_of_spawn_leaves_no_actor(keeps_runtime):
    check_spawn(keeps_runtime, range(keeps_runtime, 10_000, STRIDE))


@pytest.mark.slow
@pytest.mark.parametrize("keeps_runtime", [True, False])
def test_an_exception_at_every_line_of_spawn_leaves_no_actor(keeps_runtime):
    check_spawn(keeps_runtime, range(10_000))


def check_spawn(keeps_runtime, numbers):
    backend = FakeBackend(max_starting=1)
    with backend.playing():
        keeper = ea.spawn(PlayedEnv, backend=backend) if keeps_runtime else None
        for number in numbers:
            made = []
            where = interrupt(lambda made=made: made.append(ea.spawn(PlayedEnv, backend=backend)), number)
            if where is None:
                break
            assert not made
            wait_until(lambda: len(runtimes.members()) == keeps_runtime)
            with ea.spawn(PlayedEnv, backend=backend) as actor:
                assert actor.echo(number).result(SOON) == number, where
        assert number > 20
        for actor in (keeper, *made):
            if actor is not None:
                actor.close(SOON)


def test_an_exception_at_some_lines_of_spawn_in_process_leaves_no_actor():
    for number in range(2, 10_000, STRIDE):
        made = []
        where = interrupt(lambda made=made: made.append(ea.spawn(PlayedEnv, backend="inline")), number)
        for actor in made:  # it may have become the error of a factory
            actor.close()
        wait_until(lambda: not runtimes.members())
        if where is None:
            break


# Not the making of doorbells: an exception between two lines there loses a descriptor.
BUILDING = {
    "make_actor",
    "launch_actors",
    "join_and_start",
    "join",
    "describe_envs",
    "build_row_engine",
    "add_actor",
    "enqueue",
    "send_request",
    "send_call",
}


def test_a_vector_whose_building_is_interrupted_leaves_no_actor():
    backend = FakeBackend()
    keeper = ea.spawn(PlayedEnv, backend=backend)
    with backend.playing():
        for number in range(0, 100_000, 5):
            made = []

            def make(made=made):
                made.append(ea.VectorEnv([PlayedEnv] * 2, backend=backend))

            where = interrupt(make, number, only=BUILDING)
            for envs in made:
                envs.close()
            gc.collect()
            wait_until(lambda: len(runtimes.members()) == 1)
            if where is None:
                break
        keeper.close()


def test_a_backend_that_cannot_be_used_leaves_no_actor(monkeypatch):
    backend = FakeBackend()

    def refuse(_):
        raise OSError("no cluster")

    monkeypatch.setattr(FakeUse, "open", refuse)
    with pytest.raises(OSError, match="no cluster") as caught:
        ea.spawn(PlayedEnv, backend=backend)
    wait_until(lambda: not runtimes.members())
    assert caught.value.__traceback__ is not None, "it keeps the handle"


def test_every_use_of_a_backend_is_closed_however_far_it_was_opened(monkeypatch):
    backend = FakeBackend()
    first = ea.spawn(PlayedEnv, backend=backend)

    def interrupt(use):
        use.is_open = True
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeUse, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ea.spawn(PlayedEnv, backend=backend)
    with backend.playing():
        first.close(SOON)
    wait_until(lambda: not runtimes.members())
    assert [use.is_open for use in backend.uses] == [False, False]


def test_calls_before_the_first_start_wait_for_it():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend)
    assert actor.state.value == "starting"
    future = actor.echo(1)
    with backend.playing():
        assert future.result(SOON) == 1
        actor.close(SOON)


def test_an_actor_that_is_closed_before_its_first_start_launches_nothing():
    backend = FakeBackend(max_starting=1)
    blocker = ea.spawn(PlayedEnv, backend=backend)
    backend.next_worker()
    actor = ea.spawn(PlayedEnv, backend=backend)
    actor.close(SOON)
    assert backend.workers.empty()
    with backend.playing():
        blocker.close(SOON)


def test_at_most_so_many_processes_start_at_a_time():
    backend = FakeBackend(max_starting=1)
    actors = [ea.spawn(PlayedEnv, backend=backend) for _ in range(3)]
    for _ in range(3):
        worker = backend.next_worker()
        assert backend.workers.empty()
        wait_until(worker.play)
    with backend.playing():
        for actor in actors:
            actor.close(SOON)


@pytest.mark.parametrize("restart", [True, False])
def test_killing_an_actor_that_waits_to_start_again(restart):
    """The timer of the delay may run at the same time."""
    backend = FakeBackend()
    policy = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
    for _ in range(50):
        actor = ea.spawn(PlayedEnv, backend=backend, restart=policy)
        worker = backend.next_worker()
        wait_until(worker.play)
        worker.crash()
        wait_until(lambda actor=actor: actor._actor.phase in (Phase.BACKOFF, Phase.STARTING))
        actor.kill(restart=restart)
        if restart:
            with backend.playing():
                assert actor.echo(2).result(SOON) == 2
            actor.kill()
        actor._actor.wait_closed(SOON)
        assert actor._actor.closed.is_set
        while not backend.workers.empty():
            backend.workers.get()


def test_a_kill_just_before_the_delay_is_over_starts_no_other_process():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend, restart=ea.RestartPolicy(max_restarts=9, backoff=60.0))
    worker = backend.next_worker()
    wait_until(worker.play)
    worker.crash()
    core = actor._actor
    wait_until(lambda: core.phase is Phase.BACKOFF)
    with core.lock, core.lock.change(core):  # the loop has taken the timer, and waits for the lock
        core.is_closing = True
        core.end_now(EndReason.CLOSE)
        core._restart()
    core.wait_closed(SOON)
    assert core.closed.is_set
    assert backend.workers.empty()


def test_closing_while_it_waits_to_start_again_lets_queued_calls_run():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend, restart=ea.RestartPolicy(max_restarts=9, backoff=0.1))
    worker = backend.next_worker()
    wait_until(worker.play)
    worker.crash()
    wait_until(lambda: actor._actor.phase is Phase.BACKOFF)
    future = actor.echo(3)
    with backend.playing():
        actor.close(SOON)
    assert future.result(SOON) == 3


def test_closing_while_it_waits_to_start_again_without_calls_starts_nothing():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend, restart=ea.RestartPolicy(max_restarts=9, backoff=60.0))
    worker = backend.next_worker()
    wait_until(worker.play)
    worker.crash()
    wait_until(lambda: actor._actor.phase is Phase.BACKOFF)
    actor.close(SOON)
    assert backend.workers.empty()


def test_closing_with_a_timeout_ends_a_delay_with_queued_calls():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend, restart=ea.RestartPolicy(max_restarts=9, backoff=60.0))
    worker = backend.next_worker()
    wait_until(worker.play)
    worker.crash()
    wait_until(lambda: actor._actor.phase is Phase.BACKOFF)
    future = actor.echo(3)
    actor.close(0.1)
    with pytest.raises(ea.ActorDiedError):
        future.result(SOON)
    assert actor._actor.closed.is_set


# Finalizers ----------------------------------------------------------------------------------------------


def test_a_finalizer_in_the_middle_of_a_change_may_close_the_actor():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend)
    core = actor._actor
    with backend.playing():
        with core.lock, core.lock.change(core):
            actor.close(SOON)  # it returns at once: nothing can be closed before this change has ended
        core.wait_closed(SOON)
    assert core.closed.is_set


def test_a_finalizer_while_the_state_is_read_may_close_the_actor():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend)
    with backend.playing():
        with actor._actor.lock:
            actor.close(SOON)
        actor._actor.wait_closed(SOON)
    assert actor._actor.closed.is_set


def test_an_actor_without_handles_is_closed():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend)
    core = actor._actor
    with backend.playing():
        del actor
        wait_until(lambda: core.closed.is_set)


# Timers --------------------------------------------------------------------------------------------------


def test_a_timer_that_is_replaced_while_the_loop_waits_for_the_lock_does_not_run():
    backend = FakeBackend()
    actor = ea.spawn(PlayedEnv, backend=backend)
    core, ran = actor._actor, []
    with core.lock:
        core.timers.set("test", 0.0, lambda: ran.append("first"))
        taken = threading.Event()
        core.runtime.loop.call_soon(taken.set)
        taken.wait(0.1)  # the loop is in the first timer
        core.timers.set("test", 0.0, lambda: ran.append("second"))
    wait_until(lambda: ran)
    done = threading.Event()
    core.runtime.loop.call_soon(done.set)
    assert done.wait(SOON)
    assert ran == ["second"]
    assert "test" not in core.timers._timers
    with backend.playing():
        actor.close(SOON)


def test_the_processes_of_envs_are_recorded_only_under_the_lock(monkeypatch, stages):
    """The loop records the process that replaces another one, and a vector is being built meanwhile."""

    class GuardedTable(EnvTable):
        def __init__(self, lock, rows, *args):
            super().__init__(lock, rows, *args)

            class Guarded(np.ndarray):
                def __setitem__(self, at, value):
                    assert lock.is_held_here()
                    super().__setitem__(at, value)

            rows._incarnation_array = rows._incarnation_array.view(Guarded)

    monkeypatch.setattr(build, "EnvTable", GuardedTable)
    stage = stages(2)
    assert stage.table.rows.incarnations.tolist() == [0, 0]


def test_closing_many_actors_whose_workers_cannot_be_killed_takes_as_long_as_closing_one(actors):
    made = [actors() for _ in range(4)]
    workers = [backend.next_worker().serve_start() for _, backend in made]
    for worker in workers:
        worker.kill = lambda: None  # as in state D
    handles = [ActorHandle(actor, Lifeline(actor)) for actor, _ in made]
    begun = time.monotonic()
    close_all(handles, 0.1)
    assert time.monotonic() - begun < 0.1 + 0.9 + 0.5
    for worker in workers:
        worker.crash()


def test_options_add_to_those_of_the_handle():
    with ea.spawn(PlayedEnv, backend="inline") as actor:
        with pytest.warns(UserWarning, match="deadlines"):
            handle = actor.options(deadline=1.5).options(retries=2)
        assert (handle._deadline, handle._retries) == (1.5, 2)
        handle = handle.options(deadline=2.5)
        assert (handle._deadline, handle._retries) == (2.5, 2)
        assert handle.options(retries=0)._retries == 0


def test_an_in_process_actor_whose_making_was_interrupted_can_be_closed(monkeypatch):
    def enroll(member):
        runtimes.enroll(member)
        raise KeyboardInterrupt

    monkeypatch.setattr(inline, "enroll", enroll)
    with pytest.raises(KeyboardInterrupt):
        ea.spawn(PlayedEnv, backend="inline")
    runtimes.close_members([*runtimes.members()], None)
    wait_until(lambda: not runtimes.members())
