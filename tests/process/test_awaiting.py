"""Futures in event loops: `await future`, and `as_completed_async`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading

import pytest
from helpers import FORK_SERVER, SOON, Counter

import envactors as ea


class Raising(Counter):
    def fail(self):
        raise KeyError("wanted")

    def stop(self):
        raise StopIteration("no more")


@pytest.fixture
def actor():
    with ea.spawn(Raising, backend=FORK_SERVER, restart=ea.RestartPolicy(backoff=0.0)) as handle:
        yield handle


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SOON))


def test_await_returns_the_result_and_raises_the_error(actor):
    async def main():
        assert await actor.echo(1) == 1
        done = actor.echo(2)
        done.result(SOON)
        assert [await done, await done] == [2, 2]
        with pytest.raises(KeyError, match="wanted"):
            await actor.fail()
        assert await asyncio.gather(*(actor.echo(i) for i in range(10))) == list(range(10))

    run(main())


def test_await_of_a_future_that_another_thread_settles_in_a_loop_of_any_thread(actor):
    results = []
    threads = [threading.Thread(target=lambda i=i: results.append(run(awaited(actor.echo(i))))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(results) == [0, 1, 2, 3]


async def awaited(future):
    return await future


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_await_works_on_every_backend(backend):
    with ea.spawn(Counter, backend=backend) as actor:
        assert run(awaited(actor.add(2))) == 2


def test_a_call_that_raises_stop_iteration_ends_the_await(actor):
    with pytest.raises(RuntimeError) as caught:
        run(awaited(actor.stop()))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_cancelling_the_task_cancels_a_queued_call_and_leaves_a_running_one(actor, tmp_path):
    async def main():
        started, gate = tmp_path / "started", tmp_path / "gate"
        running = actor.touch_then_wait(str(started), str(gate))
        queued = actor.add()
        tasks = [asyncio.ensure_future(awaited(future)) for future in (running, queued)]
        while not started.exists():
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
        assert queued.cancelled()
        assert not running.cancelled()
        with pytest.raises(asyncio.CancelledError):
            await queued
        gate.touch()
        assert await running == str(gate)
        assert await actor.get("count") == 0

    run(main())


def test_a_waiting_loop_runs_other_tasks_and_other_actors(actor, tmp_path):
    async def main():
        waiting = asyncio.ensure_future(awaited(actor.wait_for_file(str(tmp_path / "gate"))))
        with ea.spawn(Counter, backend=FORK_SERVER) as other:
            assert await other.add() == 1
            assert not waiting.done()
            (tmp_path / "gate").touch()
            await waiting

    run(main())


def test_an_await_outside_an_event_loop_raises_a_clear_error(actor):
    future = actor.echo(1)
    with pytest.raises(RuntimeError, match="no running event loop"):
        awaited(future).send(None)


def test_a_call_that_ends_after_its_loop_was_closed_logs_nothing(actor, tmp_path, caplog):
    started, gate = tmp_path / "started", tmp_path / "gate"
    future = actor.touch_then_wait(str(started), str(gate))

    async def leave():
        task = asyncio.ensure_future(awaited(future))
        while not started.exists():
            await asyncio.sleep(0.005)
        assert not task.done()

    run(leave())
    gate.touch()
    assert future.result(SOON) == str(gate)
    assert actor.echo(1).result(SOON) == 1
    assert caplog.records == []


def test_the_steps_of_a_vector_are_awaited_together():
    async def main():
        with ea.VectorEnv(["helpers:Echo"] * 3, backend=FORK_SERVER) as envs:
            envs.reset(seed=0)
            return await asyncio.gather(*envs.submit([0, 0, 0]))

    assert [step.env_id for step in run(main())] == [0, 1, 2]


def test_a_rollout_is_awaited():
    async def main():
        with ea.make_vec("CartPole-v1", 2, backend=FORK_SERVER) as envs:
            envs.reset(seed=0)
            envs.set_policy(lambda: lambda obs, context: [0] * len(obs))
            return await envs.rollout_async(3)

    assert run(main()).rewards.shape == (3, 2)


def test_futures_are_yielded_in_the_order_of_their_completion(tmp_path):
    async def main():
        with ea.spawn(Counter, backend=FORK_SERVER) as one, ea.spawn(Counter, backend=FORK_SERVER) as other:
            done = other.echo("done")
            done.result(SOON)
            last, first = one.wait_for_file(str(tmp_path / "gate")), other.echo("first")
            order = []
            async for future in ea.as_completed_async([last, first, done, first]):
                order.append(future)
                if future is first:
                    (tmp_path / "gate").touch()
            assert order == [done, first, last]

    run(main())


def test_futures_of_other_executors_and_pools_are_yielded_too():
    async def main():
        with concurrent.futures.ThreadPoolExecutor(1) as executor, ea.ActorPool(Counter, 2, backend="thread") as pool:
            futures = [executor.submit(abs, -1), pool.submit("echo", 2), pool.submit("echo", 3)]
            return sorted([future.result() async for future in ea.as_completed_async(futures)])

    assert run(main()) == [1, 2, 3]


def test_as_completed_async_ends_after_its_timeout_and_the_calls_continue(actor, tmp_path):
    async def main():
        done, slow = ea.Future(), actor.wait_for_file(str(tmp_path / "gate"))
        done.set_result(1)
        seen = []
        with pytest.raises(concurrent.futures.TimeoutError, match="1 of 2 futures are unfinished"):
            async for future in ea.as_completed_async([slow, done], timeout=0):
                seen.append(future)  # noqa: PERF401 # what came before the error counts
        assert seen == [done]
        (tmp_path / "gate").touch()
        assert await slow == str(tmp_path / "gate")
        assert [future async for future in ea.as_completed_async([slow], timeout=math.inf)] == [slow]
        assert [future async for future in ea.as_completed_async([])] == []

    run(main())


def test_as_completed_async_rejects_a_timeout_that_is_not_a_number():
    for timeout in ("1", math.nan, True):
        with pytest.raises(ValueError, match=r"^as_completed_async\(timeout=...\) is .*expected a number of seconds"):
            ea.as_completed_async([], timeout)
