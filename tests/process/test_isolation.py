"""With one env per actor, a slow or crashing env does not slow the others (promise `neighbors`)."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import statistics
import struct
import time
import zlib
from pathlib import Path

import pytest
from helpers import FORK_SERVER, SOON, PacedEnv, wait_until, wait_while

import envactors as ea
from envactors.testing import expected_checksum

WORKING = range(7)
TROUBLED = 7
SEED = 100
RUN = 0.4  # seconds
# Where other programs use the same cores, a ratio of two runs of less than a second says little, and many of them do:
# pairs are added, to the ones that there are, until their median is as promised. What blocked the seven would show in
# each pair.
PAIRS = 5
MOST_PAIRS = 15
DEADLINE = 0.6  # seconds a step: far above what a step of the seven may take when the machine is busy
# The promise is 0.9 on an idle machine, and the long run's to measure; here others may be using the same cores.
AT_LEAST = 0.8


class Bench:
    """Eight envs; counts what seven of them do, and checks every result of theirs.

    Args:
        directory: For the files that hold up the eighth.
    """

    def __init__(self, directory: Path) -> None:
        # Each env has its own file; only the eighth env's is ever created.
        self.blocks_reset = directory / "reset"
        self.blocks_factory = directory / "factory"
        never = directory / "never"

        def troubled():
            if ea.current_actor().incarnation > 0:
                wait_while(self.blocks_factory)
            return PacedEnv(TROUBLED, self.blocks_reset)

        self.envs = ea.VectorEnv(
            [*(lambda i=i: PacedEnv(i, never) for i in WORKING), troubled],
            on_failure="renew",
            backend=FORK_SERVER,
            restart=ea.RestartPolicy(max_restarts=50, backoff=0.0),
            deadlines=ea.Deadlines(step=DEADLINE),
        )
        self.envs.reset(seed=SEED)
        self._numbers = itertools.count()
        self._sent: list[list[int]] = [[] for _ in WORKING]
        self._received: list[list[tuple[list[int], float, bool, int]]] = [[] for _ in WORKING]
        self.arrived: list[ea.EnvStep] = []

    def send(self, env_ids) -> None:
        """Lets envs step, each with an action that no other step has."""
        actions = [next(self._numbers) for _ in env_ids]
        self.envs.send(actions, env_ids)
        for env_id, action in zip(env_ids, actions, strict=True):
            if env_id != TROUBLED:
                self._sent[env_id].append(action)

    def receive(self) -> list[int]:
        """Receive results; collect those of the eighth env in `arrived`. Return which of the seven others had one."""
        batch = self.envs.recv(min_envs=1, timeout=SOON)
        assert len(batch.env_ids) > 0, "nothing came"
        for row, env_id in enumerate(batch.env_ids.tolist()):
            one = ea.EnvStep(env_id, *(column[row] for column in batch[1:]))
            if env_id == TROUBLED:
                self.arrived.append(one)
            else:
                failed = bool(one.terminated or one.truncated or one.info)
                self._received[env_id].append((one.obs.tolist(), float(one.reward), failed, int(one.incarnation)))
        return [env_id for env_id in batch.env_ids.tolist() if env_id != TROUBLED]

    def throughput(self, seconds: float) -> float:
        """Steps of the seven a second."""
        steps = 0
        begun = time.perf_counter()
        self.send(WORKING)
        while (elapsed := time.perf_counter() - begun) < seconds:
            back = self.receive()
            steps += len(back)
            if back:
                self.send(back)
        while any(len(sent) > len(received) for sent, received in zip(self._sent, self._received, strict=True)):
            self.receive()
        return steps / elapsed

    def next_of_the_troubled(self) -> ea.EnvStep:
        """Its next result."""
        while not self.arrived:
            self.receive()
        return self.arrived.pop(0)

    def check(self) -> None:
        """Every result of the seven is that of its own action, in order, none left out and none done twice."""
        for env_id in WORKING:
            seed = SEED + env_id
            checksum = expected_checksum(seed, [])
            for count, (action, result) in enumerate(zip(self._sent[env_id], self._received[env_id], strict=True), 1):
                checksum = zlib.crc32(struct.pack("<q", action), checksum)
                assert result == ([env_id, count, action, checksum], float(action), False, 0)
            assert checksum == expected_checksum(seed, self._sent[env_id])


class SlowReset:
    """The eighth is in a reset that takes long."""

    def begin(self, bench):
        bench.blocks_reset.touch()
        with pytest.raises(ea.VectorTimeoutError):
            bench.envs.reset(seed=[5], env_ids=[TROUBLED], timeout=0)
        wait_until(bench.blocks_reset.with_suffix(".seen").exists)

    def end(self, bench):
        assert bench.arrived == [], "it took as long as the run"
        bench.blocks_reset.unlink()
        step = bench.next_of_the_troubled()
        assert step.obs.tolist() == [TROUBLED, 0, -1, expected_checksum(5, [])]
        assert step.incarnation == 0


class SlowRebuild:
    """The eighth was killed, and its factory takes long."""

    def begin(self, bench):
        seen = bench.blocks_factory.with_suffix(".seen")
        seen.unlink(missing_ok=True)
        bench.blocks_factory.touch()
        self.incarnation = bench.envs[TROUBLED].incarnation
        os.kill(bench.envs[TROUBLED].pid, signal.SIGKILL)
        bench.send([TROUBLED])
        failed = bench.next_of_the_troubled()
        assert failed.truncated
        assert isinstance(failed.info["failure"], ea.ActorDiedError)
        bench.send([TROUBLED])
        wait_until(seen.exists)

    def end(self, bench):
        assert bench.arrived == [], "it took as long as the run"
        bench.blocks_factory.unlink()
        step = bench.next_of_the_troubled()
        assert step.obs.tolist()[:3] == [TROUBLED, 0, -1]
        assert step.incarnation == self.incarnation + 1


class HangInC:
    """The eighth hangs in C, holding its interpreter's lock, until its deadline; then it is rebuilt."""

    def begin(self, bench):
        self.incarnation = bench.envs[TROUBLED].incarnation
        bench.envs[TROUBLED].set("hangs", True).result(SOON)
        bench.send([TROUBLED])
        time.sleep(DEADLINE - RUN / 2)  # so that it is killed, and the next process starts, in the midst of the run

    def end(self, bench):
        failed = bench.next_of_the_troubled()
        assert isinstance(failed.info["failure"], ea.ActorTimeoutError)
        bench.send([TROUBLED])
        assert bench.next_of_the_troubled().incarnation == self.incarnation + 1


def measure(directory, trouble, seconds, at_least):
    bench = Bench(directory)
    with bench.envs:
        bench.throughput(RUN)  # the first run warms up
        ratios: list[float] = []
        while len(ratios) < PAIRS or (len(ratios) < MOST_PAIRS and statistics.median(ratios) < at_least):
            figures = {}
            for troubled in (False, True) if len(ratios) % 2 else (True, False):
                if troubled:
                    trouble.begin(bench)
                figures[troubled] = bench.throughput(seconds)
                if troubled:
                    trouble.end(bench)
            ratios.append(figures[True] / figures[False])
        restarts = [stats.restarts for stats in bench.envs.stats().actors]
    bench.check()
    assert restarts == [0] * len(WORKING) + [0 if isinstance(trouble, SlowReset) else len(ratios)]
    print("throughput with the trouble, to that without:", *(f"{ratio:.3f}" for ratio in sorted(ratios)))
    assert statistics.median(ratios) >= at_least, ratios


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "trouble",
    [pytest.param(SlowReset, marks=pytest.mark.soak), pytest.param(SlowRebuild, marks=pytest.mark.soak), HangInC],
)
def test_the_other_seven_keep_their_throughput(tmp_path, trouble):
    measure(tmp_path, trouble(), RUN, AT_LEAST)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trouble", [SlowReset, SlowRebuild])
def test_the_other_seven_keep_nine_tenths_while_one_takes_ten_seconds(tmp_path, trouble):
    """The exact promise, for an idle machine."""
    measure(tmp_path, trouble(), 10.0, 0.9)


class Crashing(PacedEnv):
    """Ends its process in every step."""

    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SOON)


@pytest.mark.soak
@pytest.mark.fresh_processes
@pytest.mark.timeout(300)
def test_the_other_seven_keep_nine_tenths_while_one_crashes_without_end(tmp_path):
    """With processes started afresh and the policy's own backoff; for an idle machine."""

    def throughput(crashes):
        kinds = [*[PacedEnv] * 7, Crashing if crashes else PacedEnv]
        factories = [functools.partial(kind, env_id, tmp_path / "never") for env_id, kind in enumerate(kinds)]
        with ea.VectorEnv(factories, on_failure="renew", restart=ea.RestartPolicy(max_restarts=10**6)) as envs:
            envs.reset(seed=0)
            envs.send([0] * 8)
            steps, begun = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begun) < 5.0:
                ids = envs.recv(min_envs=1, timeout=SOON).env_ids
                steps += int((ids != TROUBLED).sum())
                envs.send([0] * len(ids), ids)
            envs.recv()
            assert (envs[TROUBLED].incarnation > 2) is crashes
        return steps / elapsed

    ratios = [throughput(True) / throughput(False) for _ in range(5)]
    print("throughput with the crashes, to that without:", *(f"{ratio:.3f}" for ratio in sorted(ratios)))
    assert statistics.median(ratios) >= 0.9, ratios
