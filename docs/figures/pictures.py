"""Draws the pictures of docs/guides/seeing-inside.md: ``python docs/figures/pictures.py``, with the extra ``docs``."""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

import envactors as ea
from envactors.cli.top import draw, sample
from envactors.testing import EchoEnv, FaultyEnv

HERE = Path(__file__).parent
COLORS = {
    "step": "#2a7f62",
    "reset": "#8bbf56",
    "start": "#d9a441",
    "renewal": "#f0d9a8",
    "replay": "#c46a6a",
    "wait in step": "#a9b4bd",
    "policy": "#5b7fa6",
}


class Paced(EchoEnv):
    """Takes so long for a step, in seconds."""

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self.seconds = 0.004 if env_id != 2 else 0.009

    def step(self, action: int) -> object:
        time.sleep(self.seconds)
        return super().step(action)


def draw_trace(path: Path) -> None:
    """Record four envs, one of which is killed, and draw it as trace viewers do."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "run.json")
        with ea.VectorEnv([lambda i=i: Paced(i) for i in range(4)], on_failure="replay") as envs:
            envs.reset(seed=0)
            envs.step([0] * 4)
            with ea.trace(file):
                for turn in range(12):
                    if turn == 5:
                        os.kill(envs[1].pid or 0, signal.SIGKILL)
                    envs.step([0] * 4)
                    time.sleep(0.003)
        events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = [tid for tid in names if names[tid] != "nodes"]
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()
    for event in sorted(events, key=lambda event: event["name"] != "renewal"):
        if event["ph"] == "X":
            row, color = tracks.index(event["tid"]), COLORS.get(event["name"], "#c46a6a")
            axes.barh(row, event["dur"] / 1000, left=event["ts"] / 1000, color=color, height=0.72)
        elif event["ph"] == "i" and "was killed by" in event["name"]:
            axes.plot(event["ts"] / 1000, tracks.index(event["tid"]), marker="x", color="#b02020", markersize=9)
    for name, color in COLORS.items():
        axes.barh(0, 0, color=color, label=name)
    axes.plot([], [], marker="x", color="#b02020", linestyle="", label="killed with SIGKILL")
    axes.set_yticks(range(len(tracks)), [names[tid] for tid in tracks])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=8, fontsize=8, frameon=False)
    figure.savefig(path)


def draw_top(path: Path) -> None:
    """Draw what ``envactors top`` shows of six envs, one of which hangs and one of which is stopped."""
    factories = [lambda i=i: FaultyEnv(Paced(i)) for i in range(6)]
    with ea.VectorEnv(factories, on_failure="renew", deadlines=ea.Deadlines(step=5.0)) as envs:
        envs.reset(seed=0)
        samples = sample(os.getpid())
        next(samples)
        envs[1].arm("crash").result()
        for _ in range(60):
            envs.step([0] * 6)
            time.sleep(0.002)
        next(samples)
        for _ in range(60):
            envs.step([0] * 6)
        envs[3].arm("hang_in_c").result()
        os.kill(envs[5].pid or 0, signal.SIGSTOP)
        thread = threading.Thread(target=envs.step, args=([0] * 6,))
        thread.start()
        time.sleep(1.2)
        snapshot = next(samples) | {"command": ["python", "train.py"]}
        console = Console(record=True, width=118, height=16, file=io.StringIO(), force_terminal=True)
        console.print(draw(snapshot, "name", console))
        thread.join()
    path.write_text(console.export_svg(title="envactors top"))


if __name__ == "__main__":
    draw_top(HERE / "top.svg")
    draw_trace(HERE / "trace.svg")
