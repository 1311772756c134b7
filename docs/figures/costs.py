"""Measures what parts of envactors cost: calls, starts, nodes, observing, the portable system, seeds, and snapshots."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import loky
import psutil
import workloads
from turns import SECONDS, WARM_UP, Side, Turn, alternate, compare, in_process, per_second, rate, table, times
from vectors import ENVS, NUM_ENVS, Factory, RandomActions, async_vector, installed_envs, our_vector, stepping

import envactors as ea
from envactors.integrations.gymnasium import ActorVectorEnv
from envactors.mailbox.control_page import TIMED
from envactors.remote import LocalNodes
from envactors.state import gymnasium_snapshot

START_METHODS = ("forkserver", "loky")
PEER = "AsyncVectorEnv, forkserver"
# Envs by the names that figures have: title in tables, and factory.
NOTHING, WORK, LONG_WORK = "does nothing, 4 float32", "100 us of fixed work", "1 ms of fixed work"


def our_side(make: Factory, envs_per_actor: int, **options: Any) -> Side:
    """Return the side that steps a vector of ours with random actions."""
    vectorize = functools.partial(our_vector, envs_per_actor=envs_per_actor, **options)
    return functools.partial(stepping, make, NUM_ENVS, False, vectorize)


# Calls -----------------------------------------------------------------------------------------------------------


class Echo:
    """Answers calls."""

    def echo(self, value: Any) -> Any:
        """Return the value."""
        return value


def calling(call: Callable[[], object]) -> Turn:
    """Return the turn that makes calls, one after the other."""

    def run() -> int:
        call()
        return 1

    return functools.partial(rate, run)


@contextlib.contextmanager
def actor_calls() -> Iterator[Turn]:
    """Call an actor."""
    with ea.spawn(Echo) as actor:
        yield calling(lambda: actor.echo(1).result())


@contextlib.contextmanager
def pipe_calls() -> Iterator[Turn]:
    """Send a value through a pipe to a process that sends it back."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=send_back, args=(theirs,))
    process.start()

    def call() -> None:
        ours.send(1)
        ours.recv()

    yield calling(call)
    ours.send(None)
    process.join()


def send_back(pipe: Any) -> None:
    """Send everything back until None comes."""
    while (value := pipe.recv()) is not None:
        pipe.send(value)


@contextlib.contextmanager
def loky_calls() -> Iterator[Turn]:
    """Submit a function to an executor of loky."""
    with loky.ProcessPoolExecutor(max_workers=1) as executor:
        yield calling(lambda: executor.submit(abs, 1).result())


CALLS: dict[str, Side] = {
    "`actor.echo(1).result()`": actor_calls,
    "a bare `multiprocessing.Pipe`": pipe_calls,
    "`loky` executor, `submit(...).result()`": loky_calls,
}


def measure_calls(rounds: int) -> Any:
    """Measure a call and its result."""
    return compare(CALLS, rounds)


def show_calls(measured: Any) -> str:
    """Return the table of calls."""
    ours = next(iter(measured.values()))
    rows = [[name, per_second(each), times(ours, each)] for name, each in measured.items()]
    return table(["one call after the other", "calls/s", "envactors / this"], rows)


# Starts ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def starting(method: str) -> Iterator[Callable[[float], Any]]:
    """Start a vector env of 8 CartPoles; the turn returns what was measured instead of a rate."""
    factories = [ENVS["CartPole-v1"]] * NUM_ENVS
    begun = time.perf_counter()
    if method == PEER:
        envs: Any = gymnasium.vector.AsyncVectorEnv(factories, context="forkserver")
    else:
        envs = ActorVectorEnv(factories, context=method)
    envs.reset(seed=0)
    measured = {"first reset (s)": time.perf_counter() - begun}
    workers = envs.processes if method == PEER else envs.actors
    memory = [psutil.Process(worker.pid).memory_full_info().uss for worker in workers]
    measured["private memory of a worker (MB)"] = max(memory) / 1e6
    if method != PEER:
        seconds = []
        for _ in range(5):
            again = time.perf_counter()
            workers[0].renew().result()
            seconds.append(time.perf_counter() - again)
        measured["a renewal (ms)"] = 1000 * statistics.median(seconds)
    yield lambda _: measured
    envs.close()


def measure_start(rounds: int) -> Any:
    """Measure what 8 envs cost before their first step, and what a renewal does."""
    measured: dict[str, list[Any]] = {method: [] for method in (*START_METHODS, PEER)}
    for _ in range(rounds):
        for method, results in measured.items():
            with in_process(functools.partial(starting, method)) as turn:
                results.append(turn(0.0))
    return measured


def show_start(measured: Any) -> str:
    """Return the table of the start."""
    rows = []
    for name in ("first reset (s)", "private memory of a worker (MB)", "a renewal (ms)"):
        values = [[one[name] for one in results if name in one] for results in measured.values()]
        rows.append([name, *(f"{statistics.median(each):.3g}" if each else "" for each in values)])
    return table(["8 CartPole-v1 envs", *measured], rows)


# Nodes -----------------------------------------------------------------------------------------------------------


def vector_on_nodes(factories: Any) -> ea.VectorEnv:
    """Return a vector on two nodes, which are processes of this machine."""
    return our_vector(factories, 4, backend=ea.RemoteBackend(LocalNodes(2)))


def measure_nodes(rounds: int) -> Any:
    """Step envs on two nodes, on one machine, and with Gymnasium."""
    return {
        title: compare(
            {
                "two nodes": functools.partial(stepping, ENVS[title], NUM_ENVS, False, vector_on_nodes),
                "one machine": our_side(ENVS[title], 4),
                "AsyncVectorEnv": functools.partial(stepping, ENVS[title], NUM_ENVS, False, async_vector),
            },
            rounds,
        )
        for title in (NOTHING, LONG_WORK)
    }


def show_nodes(measured: Any) -> str:
    """Return the table of two nodes against one machine."""
    rows = []
    for title, (far, near, peer) in ((title, found.values()) for title, found in measured.items()):
        rows.append([title.partition(",")[0], per_second(far), times(far, peer), times(far, near)])
    head = ["8 envs, 4 per process", "steps/s on two nodes", "relative to `AsyncVectorEnv`", "relative to one machine"]
    return table(head, rows)


# Observing -------------------------------------------------------------------------------------------------------

# Asks a program for a snapshot whenever it gets a line.
CLIENT = """
import sys
from envactors.observe.programs import ask
for line in sys.stdin:
    ask(int(line), {"get": "snapshot"})
"""
# The sides take short turns, since the speed of a shared machine changes within seconds.
TURNS_PER_ROUND = 6


class Switches:
    """Turns of one vector, with nothing switched on, after a `stats()`, and with everything switched on.

    All use the same workers, since two sets of workers may differ by more than the difference that is measured.

    Args:
        envs: The vector.
        turn: Steps it.
        ask: Lets another process ask for a snapshot.
    """

    def __init__(self, envs: ea.VectorEnv, turn: Turn, ask: Callable[[], None]) -> None:
        self._envs, self._turn, self._ask = envs, turn, ask

    def off(self, seconds: float) -> float:
        """Step with nothing switched on."""
        self._envs._statistics.is_timing = False  # noqa: SLF001 # users cannot switch it off
        for actor in self._envs.actors:
            actor._actor.page.counters[TIMED] = 0  # noqa: SLF001
        return self._turn(seconds)

    def after_stats(self, seconds: float) -> float:
        """Step after a `stats()`."""
        self._envs.stats()
        return self._turn(seconds)

    def all_on(self, seconds: float) -> float:
        """Step with a trace, `stats()` ten times a second, and a snapshot for another process, twice a second."""
        ended = threading.Event()

        def read_stats() -> None:
            while not ended.wait(0.1):
                self._envs.stats()

        self.after_stats(WARM_UP)
        with ea.trace(os.devnull):
            reader = threading.Thread(target=read_stats)
            reader.start()
            self._ask()  # once per turn of half a second
            steps_per_second = self._turn(seconds)
            ended.set()
            reader.join()
        return steps_per_second


def measure_inside(rounds: int) -> Any:
    """Measure what it costs to see inside."""
    measured = {}
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, text=True)  # noqa: S603

    def ask() -> None:
        print(os.getpid(), file=client.stdin, flush=True)

    for title in (NOTHING, WORK):
        for packing in (4, 1):
            with our_vector([ENVS[title]] * NUM_ENVS, packing) as envs:
                choose = RandomActions(ENVS[title], NUM_ENVS)
                obs, _ = envs.reset(seed=0)
                turn = functools.partial(rate, functools.partial(step, envs, choose, obs))
                switches = Switches(envs, turn, ask)
                turns = {"off": switches.off, "after stats()": switches.after_stats, "all on": switches.all_on}
                measured[f"{title}; {packing} per process"] = alternate(turns, rounds * TURNS_PER_ROUND)
    client.communicate()
    return measured


def step(envs: ea.VectorEnv, choose: Callable[[Any], Any], obs: Any) -> int:
    """Step a vector, and return the number of steps."""
    envs.step(choose(obs))
    return envs.num_envs


def show_inside(measured: Any) -> str:
    """Return the table of what it costs to see inside."""
    rows = []
    for name, (off, counted, on) in ((name, found.values()) for name, found in measured.items()):
        rows.append([name, per_second(off), times(counted, off), times(on, off)])
    return table(["8 envs", "steps/s with nothing on", "after `stats()`", "all of it on"], rows)


# The portable system ---------------------------------------------------------------------------------------------

SYSTEMS = {
    "Linux": ("linux", "forkserver"),
    "portable": ("portable", "loky"),
    "Linux, loky": ("linux", "loky"),
}


@contextlib.contextmanager
def on_system(system: str, side: Side) -> Iterator[Turn]:
    """Run a side in a further process, which chooses this system when it imports the library."""
    os.environ["ENVACTORS_SYSTEM"] = system
    with in_process(side) as turn:
        yield turn


def vector_started_by(method: Any, packing: int, factories: Any) -> ea.VectorEnv:
    """Return a vector whose processes are started with a method."""
    return our_vector(factories, packing, backend=ea.ProcessBackend(method))


def measure_platforms(rounds: int) -> Any:
    """Step envs on Linux, on the portable system, and on Linux with the start method of the portable system."""
    measured = {}
    for title, packing in ((NOTHING, 1), (NOTHING, 4), (WORK, 4)):
        sides: dict[str, Side] = {}
        for name, (system, method) in SYSTEMS.items():
            vectorize = functools.partial(vector_started_by, method, packing)
            side = functools.partial(stepping, ENVS[title], NUM_ENVS, False, vectorize)
            sides[name] = functools.partial(on_system, system, side)
        measured[f"{title}; {packing} per process"] = compare(sides, rounds)
    return measured


def show_platforms(measured: Any) -> str:
    """Return the table of the portable system."""
    rows = []
    for name, (linux, portable, same_start) in ((name, found.values()) for name, found in measured.items()):
        rows.append([name, times(portable, linux), times(portable, same_start)])
    return table(["8 envs", "portable / Linux", 'portable / Linux with `"loky"`'], rows)


# Seeded episodes -------------------------------------------------------------------------------------------------


def limited(make: Factory, length: int) -> Any:
    """Return an env with episodes of this length."""
    return gymnasium.wrappers.TimeLimit(make(), length)


SEEDED: dict[str, Factory] = {
    "100 us of fixed work, episodes of 20 steps": functools.partial(limited, workloads.busy_100us, 20),
    "100 us of fixed work, episodes of 200 steps": functools.partial(limited, workloads.busy_100us, 200),
    "does nothing, episodes of 200 steps": functools.partial(limited, workloads.nothing, 200),
    "CartPole-v1": ENVS["CartPole-v1"],
}
SEED_OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "on": {"seed_episodes": True},
    "replay, off": {"on_failure": "replay"},
    "replay, on": {"on_failure": "replay", "seed_episodes": True},
}


def measure_seeds(rounds: int) -> Any:
    """Measure what it costs to seed episodes."""
    measured = {}
    for title, make in SEEDED.items():
        sides = {name: our_side(make, 4, **options) for name, options in SEED_OPTIONS.items()}
        # More and shorter turns than elsewhere, since the differences are small.
        measured[title] = compare(sides, 5 * rounds, 0.3 * SECONDS)
    return measured


def show_seeds(measured: Any) -> str:
    """Return the table of what it costs to seed episodes."""
    rows = []
    for name, (off, on, replays, both) in ((name, found.values()) for name, found in measured.items()):
        rows.append([name, times(on, off), times(both, replays)])
    head = ["8 envs, 4 per process", "`seed_episodes` / without"]
    return table([*head, '`seed_episodes` / without, under `"replay"`'], rows)


# Snapshots -------------------------------------------------------------------------------------------------------

PONG = "ALE/Pong-v5, 4 frames"
SNAPSHOT_ENVS = ("CartPole-v1", "MuJoCo Hopper-v5", "MuJoCo Humanoid-v5", PONG)
SNAPSHOT_SIDES = {"none": None, "every 1,000": 1000, "every 100": 100}


def pong_without_sticky_actions() -> Any:
    """Return Pong as snapshots accept it."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


def vector_with_snapshots(every: int | None, factories: Any) -> ea.VectorEnv:
    """Return a vector that takes a snapshot after so many steps; None for none."""
    snapshot = None if every is None else gymnasium_snapshot(every=every)
    return our_vector(factories, 4, on_failure="replay", snapshot=snapshot, max_journal=10_000)


def measure_snapshots(rounds: int) -> Any:
    """Measure the calls that take and restore snapshots, and vectors with and without them."""
    envs = installed_envs()
    measured = {}
    for title in SNAPSHOT_ENVS:
        if title in envs:
            make = pong_without_sticky_actions if title == PONG else envs[title]
            sides: dict[str, Side] = {}
            for name, every in SNAPSHOT_SIDES.items():
                vectorize = functools.partial(vector_with_snapshots, every)
                sides[name] = functools.partial(stepping, make, NUM_ENVS, False, vectorize)
            measured[title] = {"calls": time_snapshots(make), "rates": compare(sides, rounds)}
    return measured


def time_snapshots(make: Factory) -> dict[str, float]:
    """Return how many milliseconds a snapshot, its restoration, and a step take: medians of 200."""
    env, snapshot = make(), gymnasium_snapshot()
    env.reset(seed=0)
    env.action_space.seed(0)
    seconds: dict[str, list[float]] = {"step": [], "snapshot": [], "restore": []}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[name].append(time.perf_counter() - begun)

    for _ in range(200):
        action = env.action_space.sample()
        with timed("step"):
            _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        with timed("snapshot"):
            state = snapshot.get(env)
        with timed("restore"):
            snapshot.set(env, state)
    env.close()
    return {name: 1000 * statistics.median(each) for name, each in seconds.items()}


def show_snapshots(measured: Any) -> str:
    """Return the table of snapshots."""
    rows = []
    for name, found in measured.items():
        none, seldom, often = found["rates"].values()
        calls = [f"{found['calls'][call]:.2f}" for call in ("snapshot", "restore", "step")]
        rows.append([name, *calls, times(seldom, none), times(often, none)])
    head = ["", "snapshot (ms)", "restore (ms)", "step (ms)", "every 1,000 steps / none"]
    return table([*head, "every 100 steps / none"], rows)
