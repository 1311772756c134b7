"""Notebooks: what cells define works in the workers, and a cell that is stopped loses nothing.

They test the promises `main-script`, `futures`, and `output`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers import SOON, is_gone, wait_until

# Imported by the first test of the one process that runs these: all processes collect this module.
for package in ("nbclient", "nbformat", "ipykernel", "jupyter_client"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

CELL_TIMEOUT = 40  # seconds

ENVS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import envactors as ea

class OutOfFuel(Exception):
    def __init__(self, env_id, litres):
        super().__init__(f"env {env_id} has {litres} l")
        self.env_id, self.litres = env_id, litres

class Tank:
    observation_space = SimpleNamespace(shape=(2,), dtype=np.dtype(np.int64))
    action_space = SimpleNamespace(shape=(), dtype=np.dtype(np.int64))

    def __init__(self, env_id):
        self.env_id, self.count = env_id, 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.array([self.env_id, -1]), {"pid": os.getpid(), "main": __name__}

    def step(self, action):
        if action == 13:
            raise OutOfFuel(self.env_id, 0.5)
        if action == 99:
            Path(f"started-{self.env_id}").touch()
            while not Path("gate").exists():
                time.sleep(0.005)
        self.count += 1
        return np.array([self.env_id, action]), float(self.count), False, False, {}

    def speak(self, text):
        print(text)
        print(text.upper(), file=sys.stderr)
"""


class Notebook:
    """A real notebook, executed by nbclient in a kernel of this interpreter.

    Args:
        directory: Where it runs; files that its cells name are here.
        cells: The source of each.
    """

    def __init__(self, directory: Path, *cells: str) -> None:
        import nbformat

        self.directory = directory
        self.cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in cells]

    def run(self, while_running=None, end: str = "immediate") -> None:
        """Executes the cells one by one, and ends the kernel.

        Args:
            while_running: Per index of a cell, a coroutine function that is called while the cell runs.
            end: ``"immediate"``: the kernel is killed; ``"graceful"``: it is asked to end, which takes seconds.
        """
        asyncio.run(self._run(while_running or {}, end))

    async def _run(self, while_running, end) -> None:
        import jupyter_client
        import nbclient
        import nbformat

        spec = self.directory / "kernels" / "python3"
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "P", "language": "python"}))
        self.manager = jupyter_client.AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=jupyter_client.kernelspec.KernelSpecManager(
                kernel_dirs=[str(spec.parent)], ensure_native_kernel=False
            ),
            connection_file=str(self.directory / "connection.json"),
        )
        client = nbclient.NotebookClient(
            nbformat.v4.new_notebook(cells=self.cells),
            km=self.manager,
            timeout=CELL_TIMEOUT,
            shutdown_kernel=end,
            resources={"metadata": {"path": str(self.directory)}},
        )
        async with client.async_setup_kernel(cleanup_kc=True):  # the test made the manager, so the test ends it
            for index, cell in enumerate(self.cells):
                running = asyncio.ensure_future(client.async_execute_cell(cell, index))
                try:
                    if index in while_running:
                        await while_running[index]()
                finally:
                    await running

    def text(self, index: int, stream: str = "stdout") -> str:
        """Return the output of a cell so far."""
        outputs = self.cells[index].get("outputs", ())
        return "".join(one.text for one in outputs if one.output_type == "stream" and one.name == stream)

    def errors(self, index: int) -> list[str]:
        """The names of the exceptions that a cell has ended with."""
        return [one.ename for one in self.cells[index].outputs if one.output_type == "error"]

    def expect_error(self, index: int) -> None:
        """Allows a cell to end with an exception."""
        self.cells[index].metadata["tags"] = ["raises-exception"]

    def assert_silent(self) -> None:
        """No cell wrote anything to stderr: neither warnings nor what a thread or a worker crashed with."""
        assert [self.text(index, "stderr") for index in range(len(self.cells))] == [""] * len(self.cells)


async def until(condition) -> None:
    """As `wait_until`, while the kernel's messages are taken in."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def test_what_cells_define_works_in_workers(tmp_path):
    notebook = Notebook(
        tmp_path,
        ENVS,
        """
        envs = ea.VectorEnv([lambda i=i: Tank(i) for i in range(2)], on_failure="renew",
                            restart=ea.RestartPolicy(max_restarts=9, backoff=0.0))
        obs, infos = envs.reset(seed=1)
        assert obs.tolist() == [[0, -1], [1, -1]]
        assert [info["main"] for info in infos] == ["__main__"] * 2
        pids = [info["pid"] for info in infos]
        assert len({*pids, os.getpid()}) == 3
        """,
        """
        obs, rewards, _, truncated, infos = envs.step([3, 13])
        assert obs.tolist() == [[0, 3], [1, -1]]
        assert (rewards.tolist(), truncated.tolist()) == ([1.0, 0.0], [False, True])
        """,
        """
        try:
            raise infos[1]["failure"]
        except OutOfFuel as error:
            assert type(error) is OutOfFuel
            assert (error.env_id, error.litres, error.args) == (1, 0.5, ("env 1 has 0.5 l",))
            assert "in step" in str(error.__cause__)
        """,
        """
        envs.send([4, 4])
        batch = envs.recv()
        order = np.argsort(batch.env_ids)
        assert batch.obs[order].tolist() == [[0, 4], [1, -1]]
        assert batch.incarnations[order].tolist() == [0, 1]
        assert envs.step([5, 5])[0].tolist() == [[0, 5], [1, 5]]
        assert envs.stats().actors[0].restarts == 0
        """,
        """
        class Tank(Tank):  # the cell is edited and run again
            def step(self, action):
                return super().step(action + 100)

        envs[1].renew().result(20)  # its factory was sent before
        with ea.VectorEnv([lambda: Tank(7)]) as others:
            others.reset()
            assert others.step([1])[0].tolist() == [[7, 101]]
        """,
        "envs.close()",
    )
    notebook.run()
    notebook.assert_silent()


def test_an_exception_of_a_cell_is_caught_by_its_class(tmp_path):
    notebook = Notebook(
        tmp_path,
        ENVS,
        """
        actor = ea.spawn(lambda: Tank(5))
        envs = ea.VectorEnv([lambda i=i: Tank(i) for i in range(2)])
        """,
        """
        try:
            actor.step(13).result(20)
        except OutOfFuel as error:
            assert (error.env_id, error.litres) == (5, 0.5)
        else:
            raise AssertionError
        assert actor.step(1).result(20)[0].tolist() == [5, 1]
        """,
        """
        envs.reset()
        try:
            envs.step([1, 13])
        except ea.VectorStepError as error:
            assert type(error.failures[1]) is OutOfFuel
            assert error.failures[1].litres == 0.5
            assert error.batch.obs.tolist() == [[0, 1]]
        else:
            raise AssertionError
        assert envs.step([2, 2])[0].tolist() == [[0, 2], [1, 2]]
        """,
        """
        envs.close()
        actor.close()
        """,
    )
    notebook.run()
    notebook.assert_silent()


def test_a_stopped_cell_loses_nothing(tmp_path):
    notebook = Notebook(
        tmp_path,
        ENVS,
        """
        envs = ea.VectorEnv([lambda i=i: Tank(i) for i in range(3)], on_failure="renew")
        envs.reset(seed=1)
        pids = [actor.pid for actor in envs.actors]
        """,
        "envs.step([99, 5, 99])",
        """
        try:
            envs.step([6, 6, 6])
        except ea.AlreadyPendingError:
            pass
        else:
            raise AssertionError
        assert envs.recv(min_envs=1).env_ids.tolist() == [1]
        Path("gate").touch()
        batch = envs.recv(timeout=20)
        assert sorted(batch.env_ids.tolist()) == [0, 2]
        assert batch.obs[np.argsort(batch.env_ids)].tolist() == [[0, 99], [2, 99]]
        for count in range(2, 22):
            assert envs.step([count] * 3 if count != 13 else [0] * 3)[1].tolist() == [count] * 3
        assert batch.incarnations.tolist() == [0, 0]
        assert [actor.pid for actor in envs.actors] == pids
        assert not any(stats.restarts for stats in envs.stats().actors)
        envs.close()
        """,
    )
    notebook.expect_error(2)

    async def stop():
        await until(lambda: (tmp_path / "started-0").exists() and (tmp_path / "started-2").exists())
        await notebook.manager.interrupt_kernel()

    notebook.run({2: stop})
    assert notebook.errors(2) == ["KeyboardInterrupt"]
    notebook.assert_silent()


def test_output_of_workers_appears_in_the_running_cell(tmp_path):
    notebook = Notebook(
        tmp_path,
        ENVS,
        """
        def wait_for_the_reader(name):
            while not Path(name).exists():
                time.sleep(0.005)

        envs = ea.VectorEnv([lambda i=i: Tank(i) for i in range(2)])
        actor = ea.spawn(lambda: Tank(9), name="guest")
        envs.call("speak", "first")
        wait_for_the_reader("seen-1")
        """,
        """
        envs.call("speak", "second", env_ids=[1])
        actor.speak("third").result(20)
        wait_for_the_reader("seen-2")
        """,
        """
        envs.close()
        actor.close()
        """,
    )
    spoken = {1: ["[env-0] first", "[env-1] first"], 2: ["[env-1] second", "[guest] third"]}
    shouted = {1: ["[env-0] FIRST", "[env-1] FIRST"], 2: ["[env-1] SECOND", "[guest] THIRD"]}

    def watch(index):
        def heard(stream):
            return sorted(notebook.text(index, stream).splitlines())

        async def read():
            try:
                await until(lambda: (heard("stdout"), heard("stderr")) == (spoken[index], shouted[index]))
            finally:
                (tmp_path / f"seen-{index}").touch()

        return read

    notebook.run({index: watch(index) for index in spoken})


REGISTERED = """
import gymnasium

class Grid(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(0, 9, 2), {}

    def step(self, action):
        return np.array([action, action]), 1.0, False, False, {"main": __name__}

def check(factory):
    once = ea.RestartPolicy(max_restarts=0)
    with ea.VectorEnv([factory] * 2, restart=once) as envs, ea.VectorEnv([Grid] * 2, restart=once) as plain:
        assert np.array_equal(envs.reset(seed=3)[0], plain.reset(seed=3)[0])
        obs, *_, infos = envs.step([1, 2])
        assert obs.tolist() == [[1, 1], [2, 2]]
        assert [info["main"] for info in infos] == ["__main__"] * 2
        assert envs.call("get_wrapper_attr", "spec")[0].id == "Grid-v0"
"""


def test_envs_that_the_factory_registers(tmp_path):
    pytest.importorskip("gymnasium")
    notebook = Notebook(
        tmp_path,
        ENVS + REGISTERED,
        """
        def factory():
            gymnasium.register("Grid-v0", entry_point=Grid)
            return gymnasium.make("Grid-v0")

        check(factory)
        assert "Grid-v0" not in gymnasium.registry
        """,
    )
    notebook.run()
    notebook.assert_silent()


def test_envs_that_a_cell_registers(tmp_path):
    pytest.importorskip("gymnasium")
    notebook = Notebook(
        tmp_path,
        ENVS + REGISTERED,
        """
        gymnasium.register("Grid-v0", entry_point=Grid)
        check(lambda: gymnasium.make("Grid-v0"))
        """,
    )
    notebook.run()
    notebook.assert_silent()


@pytest.mark.parametrize("end", ["graceful", "immediate"])
def test_the_workers_end_with_the_kernel(tmp_path, end):
    notebook = Notebook(
        tmp_path,
        ENVS,
        """
        envs = ea.VectorEnv([lambda i=i: Tank(i) for i in range(2)])
        envs.reset()
        envs.send([99, 1])  # left as it is: env 0 hangs
        print(*[actor.pid for actor in envs.actors])
        while not Path("started-0").exists():
            time.sleep(0.005)
        """,
    )

    notebook.run(end=end)
    pids = [int(pid) for pid in notebook.text(1).split()]
    assert len(pids) == 2
    wait_until(lambda: all(is_gone(pid) for pid in pids))
