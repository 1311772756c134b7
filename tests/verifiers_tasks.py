"""Tasks of verifiers for tests: reverse a text. Workers import them."""

from __future__ import annotations

import os
import signal
import time
from typing import ClassVar

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    """The text to reverse is the prompt."""

    answer: str


class ReverseTask(vf.Task[ReverseData]):
    """Rewards the share of characters that are right; the answers "crash" and "hang" do so to the reward."""

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        if reply == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if reply == "hang":
            time.sleep(1000)  # no `asyncio.wait_for` ends this
        if reply == "fail":
            raise ValueError("not an answer")
        trace.info["scored in"] = os.getpid()
        return sum(map(str.__eq__, reply, self.data.answer)) / len(self.data.answer)

    @vf.metric
    async def length(self, task: ReverseData, trace: vf.Trace) -> float:
        return len(trace.last_reply or "") / len(task.answer)

    @vf.reward
    async def has_workdir(self, runtime: vf.Runtime) -> float:
        return float(runtime.workdir is not None)


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    """Texts to reverse."""

    texts: ClassVar[tuple[str, ...]] = ("abc", "level", "drawer")

    def load(self) -> list[ReverseTask]:
        return [
            ReverseTask(ReverseData(idx=i, prompt=text, answer=text[::-1]), self.config.task)
            for i, text in enumerate(self.texts)
        ]


class FaultyTaskset(ReverseTaskset):
    """Texts of which some end the reward's process."""

    texts = (*ReverseTaskset.texts, "crash", "hang", "fail")
