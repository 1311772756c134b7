# pyright: strict
"""What type checkers accept, and what they know about it. Checked by `test_types.py`, and never run."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import envactors as ea


class Counter:
    """A class whose methods are called in an actor."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.count = start
        self.step = step

    def add(self, n: int, *, times: int = 1) -> int:
        self.count += n * times
        return self.count

    def name(self) -> str:
        return "counter"


class Doubling(Counter):
    """A subclass, whose base's methods can be called too."""

    def double(self, n: float) -> list[float]:
        return [n, n]


class NeedsStart:
    """A class whose constructor requires an argument."""

    def __init__(self, start: int, name: str) -> None:
        self.start = start
        self.named = name


def make_counter() -> Counter:
    return Counter()


def handles() -> None:
    assert_type(ea.spawn(Counter), ea.ActorHandle[Counter])
    assert_type(ea.spawn(Counter, 3), ea.ActorHandle[Counter])
    assert_type(ea.spawn(Counter, 3, 2, name="counter", backend="inline"), ea.ActorHandle[Counter])
    assert_type(ea.spawn(NeedsStart, 3, "three"), ea.ActorHandle[NeedsStart])
    assert_type(ea.spawn(make_counter, deadlines=2.0, env_vars={"A": "b"}), ea.ActorHandle[Counter])
    assert_type(ea.spawn(lambda: Counter(3)), ea.ActorHandle[Counter])
    assert_type(ea.spawn(lambda: "text").call(str.upper), ea.ActorFuture[str])
    assert_type(ea.spawn("package:make", 3, restart=ea.RestartPolicy(max_restarts=3)), ea.ActorHandle[Any])
    with ea.spawn(Doubling, backend=ea.ThreadBackend()) as actor:
        assert_type(actor, ea.ActorHandle[Doubling])
        base: ea.ActorHandle[Counter] = actor
        untyped: ea.ActorHandle = actor
        print(base, untyped)
    assert_type(actor.name, str)
    assert_type(actor.pid, int | None)
    assert_type(actor.state, ea.ActorState)
    assert_type(actor.stats().last_failure, ea.ActorError | None)
    assert_type(actor.stacks(), str)
    assert_type(actor.renew(), ea.ActorFuture[int])
    assert_type(actor.kill(restart=True), None)


def calls(actor: ea.ActorHandle[Doubling]) -> None:
    assert_type(actor.call(Doubling.add, 1), ea.ActorFuture[int])
    assert_type(actor.call(Counter.add, n=1, times=2), ea.ActorFuture[int])
    assert_type(actor.call(Doubling.double, 1.5).result(timeout=1.0), list[float])
    assert_type(actor.call(Counter.name).exception(), BaseException | None)
    assert_type(actor.call("add", "anything"), ea.ActorFuture[Any])
    assert_type(actor.add(1), ea.ActorFuture[Any])
    assert_type(actor.get("count"), ea.ActorFuture[Any])
    assert_type(actor.set("count", 3), ea.ActorFuture[Any])
    assert_type(actor.options(deadline=2.0, retries=1).call(Doubling.add, 1), ea.ActorFuture[int])
    assert_type(actor.options(retries=1).double(1), ea.ActorFuture[Any])
    assert_type(actor.options(retries=1).pid, int | None)


def pools() -> None:
    with ea.ActorPool(Doubling, 2, name="pool", restart=ea.RestartPolicy()) as pool:
        assert_type(pool, ea.ActorPool[Doubling])
    assert_type(ea.ActorPool("package:make", 2), ea.ActorPool[Any])
    assert_type(pool.submit(Counter.add, 1, times=2), ea.ActorFuture[int])
    assert_type(pool.submit("add", 1), ea.ActorFuture[Any])
    assert_type(pool.map(Doubling.double, [1.0, 2.0]), Iterator[list[float]])
    assert_type(pool.map_unordered(Counter.add, [1, 2], timeout=1.0), Iterator[int])
    assert_type(pool.map("add", [1, 2]), Iterator[Any])
    assert_type(pool.actors[0].call(Counter.name), ea.ActorFuture[str])


def verify(answer: str, *, strict: bool = False) -> float:
    return float(answer == "right" or not strict)


async def executors() -> None:
    with ea.Executor(2, deadline=1.0, recycle=ea.RecyclePolicy(max_calls=10), initializer=print) as pool:
        assert_type(pool, ea.Executor)
    standard: concurrent.futures.Executor = pool
    assert_type(pool.submit(verify, "right", strict=True), ea.ActorFuture[float])
    assert_type(await pool.options(deadline=2.0, retries=1).submit(verify, "right"), float)
    assert_type(pool.submit(Counter, 3).result(timeout=1.0), Counter)
    assert_type(pool.map(verify, ["right", "wrong"], chunksize=2), Iterator[float])
    assert_type(pool.stats().completed, int)
    print(standard)


async def futures(actor: ea.ActorHandle[Counter]) -> None:
    assert_type(await actor.call(Counter.add, 1), int)
    several = [actor.call(Counter.add, n) for n in range(3)]
    standard: concurrent.futures.Future[int] = several[0]
    print(standard, ea.wait(several).done)
    assert_type(ea.as_completed_async(several, timeout=1.0), AsyncIterator[ea.ActorFuture[int]])
    async for future in ea.as_completed_async(several):
        assert_type(future.result(), int)
    for completed in ea.as_completed(several):
        assert_type(completed.result(), int)
    assert_type(several[0].abort(), bool)


async def vectors() -> None:
    with ea.VectorEnv([make_counter, "package:make"], envs_per_actor="auto", autoreset="same_step") as envs:
        assert_type(envs, ea.VectorEnv)
    observations, infos = envs.reset(seed=[1, None], options={"easy": True}, timeout=1.0)
    assert_type(infos, list[dict[str, Any]])
    _, rewards, terminated, _, _ = envs.step([observations])
    assert_type(rewards, npt.NDArray[np.float64])
    assert_type(terminated, npt.NDArray[np.bool_])
    assert_type(envs.recv(min_envs=1), ea.Batch)
    assert_type(envs.recv().env_ids, npt.NDArray[np.int64])
    assert_type(envs.submit([1])[0].result(), ea.EnvStep)
    assert_type((await envs.submit([1])[0]).terminated, bool)
    assert_type(envs.actors[0], ea.ActorHandle[Any])
    assert_type(envs[0].call("name"), ea.ActorFuture[Any])
    assert_type(envs.call("name", env_ids=[0]), list[Any])
    assert_type(envs.stats().steps, list[int])
    assert_type(envs.rollout(8, timeout=1.0), ea.Rollout)
    assert_type((await envs.rollout_async(8)).rewards, npt.NDArray[np.float64])
    assert_type(envs.evaluate(3).returns, npt.NDArray[np.float64])


def options_and_errors(error: ea.VectorStepError, death: ea.ActorDiedError) -> None:
    snapshot = ea.SnapshotPolicy(Counter.name, print, every=10)
    options = {"deadlines": ea.Deadlines(step=1.0, close=None), "recycle": ea.RecyclePolicy(max_rss=10**9)}
    print(
        snapshot,
        options,
        ea.RestartPolicy(max_restarts=3, window=60.0),
        ea.ProcessBackend("forkserver", preload=["numpy"]),
    )
    assert_type(error.failures, dict[int, BaseException])
    assert_type(death.exitcode, int | None)
    assert_type(ea.RestartsExhaustedError().causes, list[ea.ActorError])
    print(ea.NodeLostError("lost", node="first").node.upper(), ea.__version__.split("."))
    context = ea.current_actor()
    assert_type(context, ea.ActorContext | None)
