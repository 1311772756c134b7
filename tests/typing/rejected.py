# pyright: strict
"""What type checkers reject: each line with a mark, and no other. Checked by `test_types.py`, and never run.

A mark names mypy's code of the error; pyright reports one on the same line.
"""

from __future__ import annotations

import envactors as ea


class Counter:
    """A class whose methods are called in an actor."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, n: int, *, times: int = 1) -> int:
        self.count += n * times
        return self.count

    def name(self) -> str:
        return "counter"


class Other:
    """A class that no actor here has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def grow(self, by: int) -> None:
        self.size += by


def handles() -> None:
    ea.spwan(Counter)  # E: attr-defined
    ea.Deadlnes(step=1.0)  # E: attr-defined
    ea.spawn(Counter, "three")  # E: arg-type
    ea.spawn(Counter, 1, 2)  # E: call-arg
    ea.spawn(Other)  # E: call-arg
    ea.spawn(3)  # E: call-overload
    ea.spawn(Counter, nmae="counter")  # E: call-overload
    ea.spawn(Counter, deadlines="soon")  # E: call-overload
    ea.spawn(Counter, env_vars={"A": 3})  # E: dict-item
    wrong: ea.ActorHandle[Other] = ea.spawn(Counter)  # E: arg-type
    print(wrong)


def calls(actor: ea.ActorHandle[Counter]) -> None:
    actor.call(Counter.add)  # E: call-overload
    actor.call(Counter.add, "one")  # E: call-overload
    actor.call(Counter.add, 1, 2)  # E: call-overload
    actor.call(Counter.add, 1, time=2)  # E: call-arg
    actor.call(Counter.ad, 1)  # E: attr-defined
    actor.call(Other.grow, 1)  # E: call-overload
    actor.call(Counter(3).add, 1)  # E: call-overload
    actor.call(Counter.count)  # E: call-overload
    text: str = actor.call(Counter.add, 1).result()  # E: assignment
    future: ea.ActorFuture[str] = actor.call(Counter.add, 1)  # E: call-overload
    actor.call(Counter.name).result() + 1  # E: operator
    actor.options(timout=2.0)  # E: call-arg
    actor.options(deadline="2")  # E: arg-type
    actor.kill(True)  # E: call-arg
    print(text, future)


def pools(pool: ea.ActorPool[Counter]) -> None:
    ea.ActorPool(Counter, "two")  # E: call-overload
    ea.ActorPool(Counter, 2, nmae="pool")  # E: call-overload
    pool.submit(Counter.add, "one")  # E: call-overload
    pool.map(Counter.add, ["one"])  # E: arg-type
    pool.map(Other.grow, [1])  # E: arg-type


def verify(answer: str, *, strict: bool = False) -> float:
    return float(answer == "right" or not strict)


def executors(pool: ea.Executor) -> None:
    ea.Executor(deadlines=1.0)  # E: call-arg
    ea.Executor(deadline="1")  # E: arg-type
    pool.submit(verify)  # E: call-arg
    pool.submit(verify, 1)  # E: arg-type
    pool.submit(verify, "right", stric=True)  # E: call-arg
    pool.submit("verify", "right")  # E: arg-type
    pool.options(deadline=1.0).submit(verify, 1)  # E: arg-type
    future: ea.ActorFuture[str] = pool.submit(verify, "right")  # E: arg-type
    pool.submit(verify, "right").result().upper()  # E: attr-defined
    print(future)


async def futures(actor: ea.ActorHandle[Counter]) -> None:
    text: str = await actor.call(Counter.add, 1)  # E: call-overload
    async for future in ea.as_completed_async([actor.call(Counter.add, 1)]):
        future.result().upper()  # E: attr-defined
    ea.as_completed_async([1])  # E: type-var
    print(text)


def vectors(envs: ea.VectorEnv) -> None:
    ea.VectorEnv(Counter)  # E: arg-type
    ea.VectorEnv([Counter], autoreset="sometimes")  # E: arg-type
    ea.VectorEnv([Counter], env_per_actor=2)  # E: call-arg
    ea.VectorEnv([Counter], on_failure="ignore")  # E: arg-type
    envs.reset("seed")  # E: arg-type
    envs.recv(min_envs="all")  # E: arg-type
    envs.recv().reward.mean()  # E: attr-defined
    envs.submit([0])[0].result().rewards.mean()  # E: attr-defined


def options(stats: ea.ActorStats) -> None:
    ea.Deadlines(steps=1.0)  # E: call-arg
    ea.Deadlines(step="1")  # E: arg-type
    ea.RestartPolicy(max_restart=1)  # E: call-arg
    ea.RecyclePolicy(max_rss="1 GB")  # E: arg-type
    ea.SnapshotPolicy(1, print)  # E: arg-type
    stats.restarts = 0  # E: misc
