"""Measures what the docs say of speed: ``python docs/figures/measure.py QUESTION ...``.

Each question writes a file beside this one and its tables into the page. All sides of a question are measured in one
run, in turns. Needs the extra ``test``; envs whose packages are missing are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import dropins
import readme
import rollouts
import sessions
import suites

HERE = Path(__file__).parent
MIGRATE = (
    *("gymnasium", "stable-baselines3", "tianshou", "torchrl", "di-engine", "pettingzoo"),
    *("jax", "lerobot", "rllib"),
)
PAGES = (
    "../README.md",
    "guides/performance.md",
    "guides/many-machines.md",
    "guides/seeing-inside.md",
    "guides/platforms.md",
    *(f"migrate/{name}.md" for name in MIGRATE),
)
WORKLOADS = "workloads:"
ENVS = {
    "does nothing, 4 float32": WORKLOADS + "nothing",
    "does nothing, 4x84x84 uint8": WORKLOADS + "image",
    "CartPole-v1": "CartPole-v1",
    "100 us of fixed work": WORKLOADS + "busy_100us",
    "MuJoCo Hopper-v5": "Hopper-v5",
    "ALE/Pong-v5, 4 frames": WORKLOADS + "pong",
    "MuJoCo Humanoid-v5": WORKLOADS + "humanoid",
    "1 ms of fixed work": WORKLOADS + "busy_1ms",
    "sleeps 2 ms on average": WORKLOADS + "sleeping",
}
START_METHODS = ("forkserver", "loky")
PEER = "AsyncVectorEnv, forkserver"

# Steps per second of a vector of eight envs, for the scripts that begin with it.
RATE = textwrap.dedent("""
    import time
    import numpy as np

    def rate(envs, actions=np.ones((1, 8), np.int64), seconds=0.7, clock=time.perf_counter):
        batches, begun = 0, clock()
        while clock() - begun < seconds:
            envs.step(actions[batches % len(actions)])
            batches += 1
        return 8 * batches / (clock() - begun)
""")


# Runs in a fresh process; prints the seconds and the bytes it was asked for.
ONE_START = textwrap.dedent("""
    import json, os, sys, time
    import gymnasium, psutil
    if __name__ == "__main__":
        method, count = sys.argv[1], int(sys.argv[2])
        factories = [lambda: gymnasium.make("CartPole-v1")] * count
        if method.startswith("AsyncVectorEnv"):
            begun = time.perf_counter()
            envs = gymnasium.vector.AsyncVectorEnv(factories, context="forkserver")
        else:
            import envactors as ea
            from envactors.integrations.gymnasium import ActorVectorEnv
            begun = time.perf_counter()
            envs = ActorVectorEnv(factories, context=method)
        envs.reset(seed=0)
        measured = {"first reset (s)": time.perf_counter() - begun}
        workers = envs.processes if method.startswith("AsyncVectorEnv") else envs.actors
        memory = [psutil.Process(worker.pid).memory_full_info().uss for worker in workers]
        measured["private memory of a worker (MB)"] = max(memory) / 1e6
        if not method.startswith("AsyncVectorEnv"):
            times = []
            for _ in range(5):
                again = time.perf_counter()
                workers[0].renew().result()
                times.append(time.perf_counter() - again)
            measured["a renewal (ms)"] = 1000 * sorted(times)[2]
            before = len(os.listdir("/proc/self/fd"))
            more = [ea.spawn(factories[0], backend=ea.ProcessBackend(method)) for _ in range(8)]
            for actor in more:
                actor.reset().result()
            measured["descriptors of an actor"] = (len(os.listdir("/proc/self/fd")) - before) / 8
            for actor in more:
                actor.close()
        again = time.perf_counter()
        envs.close()
        measured["closing (s)"] = time.perf_counter() - again
        print(json.dumps(measured))
""")

# Runs in a fresh process; prints calls per second of each side.
CALLS = textwrap.dedent("""
    import json, multiprocessing, sys, time
    import loky
    import envactors as ea

    class Echo:
        def echo(self, value):
            return value

    def serve(pipe):
        while (value := pipe.recv()) is not None:
            pipe.send(value)

    def rate(function, calls):
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        return calls / (time.perf_counter() - begun)

    if __name__ == "__main__":
        rounds = int(sys.argv[1])
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        executor = loky.ProcessPoolExecutor(max_workers=1)

        def through_a_pipe():
            ours.send(1)
            ours.recv()

        with ea.spawn(Echo) as actor:
            sides = {
                "`actor.echo(1).result()`": (lambda: actor.echo(1).result(), 2000),
                "a bare `multiprocessing.Pipe`": (through_a_pipe, 2000),
                "`loky` executor, `submit(...).result()`": (lambda: executor.submit(abs, 1).result(), 200),
            }
            for call, count in sides.values():
                rate(call, count // 10)
            measured = {name: [] for name in sides}
            for _ in range(rounds):
                for name, (call, count) in sides.items():
                    measured[name].append(rate(call, count))
        ours.send(None)
        process.join()
        executor.shutdown()
        print(json.dumps(measured))
""")


# Runs in a fresh process; prints env-steps per second on two nodes, on one machine, and with Gymnasium.
NODES = RATE + textwrap.dedent("""
    import json, sys
    import gymnasium
    import envactors as ea
    from envactors.remote import LocalNodes
    import workloads

    if __name__ == "__main__":
        rounds, measured = int(sys.argv[1]), {}
        for name in ("nothing", "busy_1ms"):
            factories = [getattr(workloads, name)] * 8
            sides = {
                "two nodes": ea.VectorEnv(factories, envs_per_actor=4, backend=ea.RemoteBackend(LocalNodes(2))),
                "one machine": ea.VectorEnv(factories, envs_per_actor=4),
                "AsyncVectorEnv": gymnasium.vector.AsyncVectorEnv(factories, shared_memory=True),
            }
            for envs in sides.values():
                envs.reset(seed=0)
                rate(envs)
            measured[name] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, envs in sides.items():
                    measured[name][side].append(rate(envs))
            for envs in sides.values():
                envs.close()
        print(json.dumps(measured))
""")


# Runs in a fresh process; prints env-steps per second with nothing switched on, after a `stats()`, and with a trace,
# `stats()` ten times a second, and a monitor that another process asks twice a second. All sides use the same workers,
# since two sets of the same processes may differ by more than what is measured. The sides take turns every half second,
# since the speed of a shared machine changes within seconds. In-process, the rate is per second of CPU time.
INSIDE = RATE + textwrap.dedent("""
    import contextlib, json, os, subprocess, sys, threading
    import envactors as ea
    import workloads
    from envactors.mailbox.control_page import TIMED

    ROWS = {
        "nothing, 4 per process": ("nothing", {"envs_per_actor": 4}),
        "nothing, 1 per process": ("nothing", {}),
        "busy_100us, 4 per process": ("busy_100us", {"envs_per_actor": 4}),
        "busy_100us, 1 per process": ("busy_100us", {}),
        "busy_100us, in-process, per second of CPU time": ("busy_100us", {"backend": "inline"}),
    }
    TURNS_PER_ROUND, SECONDS, WARM_UP = 6, 0.5, 0.05
    CLIENT = '''
    import sys
    from envactors.observe.programs import ask
    for line in sys.stdin:
        ask(int(line), {"get": "snapshot"}, 5)
    '''

    def switch_off(envs):
        envs._statistics.clock = None
        for actor in envs.actors:
            actor._supervisor.core.process.page.counters[TIMED] = 0
        return contextlib.nullcontext()

    def switch_stats_on(envs):
        envs.stats()
        for actor in envs.actors:
            actor._supervisor.core.begin_timing()  # it was switched off in a way that users have not
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def switch_all_on(envs):
        ended = threading.Event()
        def read_stats():
            while not ended.wait(0.1):
                envs.stats()
        with ea.trace(os.devnull):
            reader = threading.Thread(target=read_stats)
            reader.start()
            print(os.getpid(), file=client.stdin, flush=True)  # once per turn: twice a second
            yield
            ended.set()
            reader.join()

    if __name__ == "__main__":
        rounds, measured = int(sys.argv[1]), {}
        client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, text=True)
        sides = {"off": switch_off, "after stats()": switch_stats_on, "all on": switch_all_on}
        for row, (workload, options) in ROWS.items():
            results = measured[row] = {name: [] for name in sides}
            clock = time.process_time if "backend" in options else time.perf_counter
            with ea.VectorEnv([getattr(workloads, workload)] * 8, **options) as envs:
                envs.reset(seed=0)
                rate(envs)
                for turn in range(rounds * TURNS_PER_ROUND):
                    for name, switch_on in list(sides.items())[:: 1 - turn % 2 * 2]:
                        with switch_on(envs):
                            rate(envs, seconds=WARM_UP)
                            results[name].append(rate(envs, seconds=SECONDS, clock=clock))
                        switch_off(envs)
        client.stdin.close()
        client.wait()
        print(json.dumps(measured))
""")


# Runs in a fresh process; prints env-steps per second on Linux, on the portable system, and on Linux with the
# start method of the portable system. Each side is a process that steps when it is asked to.
PLATFORMS = textwrap.dedent("""
    import json, os, subprocess, sys

    SIDE = '''
    import sys, time
    import numpy as np
    import envactors as ea
    import workloads

    workload, packing, method = sys.argv[1:]
    factories = [getattr(workloads, workload)] * 8
    with ea.VectorEnv(factories, envs_per_actor=int(packing), backend=ea.ProcessBackend(method)) as envs:
        envs.reset(seed=0)
        actions = np.ones(8, np.int64)
        for line in sys.stdin:
            steps, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < 0.7:
                envs.step(actions)
                steps += 8
            print(steps / (time.perf_counter() - begun), flush=True)
    '''
    SIDES = {
        "Linux": ("linux", "forkserver"),
        "portable": ("portable", "loky"),
        "Linux, loky": ("linux", "loky"),
    }
    ROWS = ("nothing", 1), ("nothing", 4), ("busy_100us", 4)

    def start(system, method, workload, packing):
        environment = {**os.environ, "ENVACTORS_SYSTEM": system}
        command = [sys.executable, "-c", SIDE, workload, str(packing), method]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def rate(side):
        print("go", file=side.stdin, flush=True)
        return float(side.stdout.readline())

    if __name__ == "__main__":
        rounds, measured = int(sys.argv[1]), {}
        for workload, packing in ROWS:
            sides = {name: start(*how, workload, packing) for name, how in SIDES.items()}
            results = measured[f"{workload}, {packing} per process"] = {name: [] for name in sides}
            for side in sides.values():
                rate(side)
            for _ in range(rounds):
                for name, side in sides.items():
                    results[name].append(rate(side))
            for side in sides.values():
                side.communicate()
        print(json.dumps(measured))
""")


# What `seed_episodes` costs: vectors with and without it take turns in one process.
SEEDS = RATE + textwrap.dedent("""
    import functools, json, sys, time
    import gymnasium
    import numpy as np
    import envactors as ea
    import workloads

    SIDES = {
        "off": {},
        "on": {"seed_episodes": True},
        "replay, off": {"on_failure": "replay"},
        "replay, on": {"on_failure": "replay", "seed_episodes": True},
    }

    def limited(workload, length):
        return gymnasium.wrappers.TimeLimit(getattr(workloads, workload)(), length)

    ROWS = {
        "100 us of fixed work, episodes of 20 steps": functools.partial(limited, "busy_100us", 20),
        "100 us of fixed work, episodes of 200 steps": functools.partial(limited, "busy_100us", 200),
        "does nothing, episodes of 200 steps": functools.partial(limited, "nothing", 200),
        "CartPole-v1": functools.partial(gymnasium.make, "CartPole-v1"),
    }

    ACTIONS = np.random.default_rng(0).integers(0, 2, (997, 8))

    if __name__ == "__main__":
        rounds, measured = int(sys.argv[1]), {}
        for name, factory in ROWS.items():
            results = measured[name] = {side: [] for side in SIDES}
            made = {side: ea.VectorEnv([factory] * 8, envs_per_actor=4, **more) for side, more in SIDES.items()}
            for envs in made.values():
                envs.reset(seed=0)
                rate(envs, ACTIONS)
            for round in range(5 * rounds):
                for side, envs in list(made.items())[:: 1 - round % 2 * 2]:
                    # Short turns, so that what else runs slows all sides down alike.
                    results[side].append(rate(envs, ACTIONS, seconds=0.15))
            for envs in made.values():
                envs.close()
        print(json.dumps(measured))
""")


# What snapshots cost: the calls by themselves, and vectors with and without them, which take turns in one process. Envs
# whose packages are missing are left out.
SNAPSHOTS = RATE + textwrap.dedent("""
    import functools, json, statistics, sys, time
    import gymnasium
    import numpy as np
    import envactors as ea
    from envactors.state import gymnasium_snapshot
    import workloads

    def pong():
        import ale_py

        gymnasium.register_envs(ale_py)
        env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0)  # snapshots refuse sticky actions
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)

    ENVS = {
        "CartPole-v1": functools.partial(gymnasium.make, "CartPole-v1"),
        "MuJoCo Hopper-v5": functools.partial(gymnasium.make, "Hopper-v5"),
        "MuJoCo Humanoid-v5": functools.partial(gymnasium.make, "Humanoid-v5"),
        "ALE/Pong-v5, 4 frames": pong,
    }
    SIDES = {"none": None, "every 1,000": 1000, "every 100": 100}

    def timed(call):
        begun = time.perf_counter()
        result = call()
        return result, 1000 * (time.perf_counter() - begun)

    def calls(make):
        env, snapshot = make(), gymnasium_snapshot()
        env.reset(seed=0)
        env.action_space.seed(0)
        rows = []
        for _ in range(200):
            (_, _, terminated, truncated, _), step = timed(lambda: env.step(env.action_space.sample()))
            if terminated or truncated:
                env.reset()
            state, get = timed(lambda: snapshot.get(env))
            rows.append((len(state), get, timed(lambda: snapshot.set(env, state))[1], step))
        env.close()
        return [statistics.median(column) for column in zip(*rows)]

    if __name__ == "__main__":
        rounds, measured = int(sys.argv[1]), {}
        for name, make in ENVS.items():
            try:
                make().close()
            except Exception as error:
                print(f"{name}: left out, {error!r}", file=sys.stderr)
                continue
            vectors = {}
            for side, every in SIDES.items():
                snapshot = None if every is None else gymnasium_snapshot(every=every)
                options = {"on_failure": "replay", "snapshot": snapshot, "max_journal": 10_000}
                vectors[side] = ea.VectorEnv([make] * 8, envs_per_actor=4, **options)
                vectors[side].reset(seed=0)
                actions = np.zeros((1, 8, *vectors[side].action_spec.shape), vectors[side].action_spec.dtype)
                rate(vectors[side], actions)
            rates = {side: [] for side in vectors}
            for round in range(rounds):
                for side, envs in list(vectors.items())[:: 1 - round % 2 * 2]:
                    rates[side].append(rate(envs, actions))
            for envs in vectors.values():
                envs.close()
            measured[name] = {"calls": calls(make), "rates": rates}
        print(json.dumps(measured))
""")


def environment() -> dict[str, str]:
    """Return the variables of a process that imports `workloads`, as its workers do."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))}


def run_script(code: str, *arguments: object) -> Any:
    """Return what a script prints as JSON, run in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "script.py")
        script.write_text(code)
        command = [sys.executable, str(script), *map(str, arguments)]
        done = subprocess.run(  # noqa: S603
            command, stdout=subprocess.PIPE, text=True, check=True, cwd=directory, env=environment()
        )
    return json.loads(done.stdout)


def bench(env: str, count: int, rounds: int, *options: str) -> dict[str, Any] | None:
    """Return the record of ``envactors bench``, None if the env cannot be made here."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "record.json")
        command = [
            sys.executable,
            "-m",
            "envactors.cli",
            "bench",
            env,
            "--num-envs",
            str(count),
            "--rounds",
            str(rounds),
        ]
        command += ["--seconds", "0.4", "--against", "gymnasium", "--json", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())  # noqa: S603
        if done.returncode != 0:
            print(f"{env}: left out, {done.stderr.strip() or done.stdout.strip()[-200:]}", file=sys.stderr)
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def rates(record: dict[str, Any]) -> dict[str, list[float]]:
    """Return the env-steps per second of each round, by side."""
    return {side["name"]: [one["env_steps_per_second"] for one in side["rounds"]] for side in record["sides"]}


def ratio(ones: list[float], others: list[float]) -> str:
    """Return the median of the ratios of each round."""
    return f"{statistics.median(one / other for one, other in zip(ones, others, strict=True)):.2f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = ("| " + " | ".join(row) + " |\n" for row in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)


def readable(name: str) -> str:
    """Return the name of a row, which begins with that of a workload, as the pages write it."""
    workload, _, rest = name.partition(", ")
    names = {env.removeprefix(WORKLOADS): title for title, env in ENVS.items()}
    return f"{names[workload]}; {rest}"


def measure_start(rounds: int) -> Any:
    """What 8 and 64 envs cost before their first step: start, memory, renewal, closing."""
    measured: dict[str, dict[str, list[dict[str, float]]]] = {}
    for count, times in ((8, rounds), (64, max(1, rounds // 3))):
        sides = measured[str(count)] = {method: [] for method in (*START_METHODS, PEER)}
        for _ in range(times):
            for method, results in sides.items():
                results.append(run_script(ONE_START, method, count))
    return measured


def show_start(measured: Any) -> str:
    """Return the tables of the start."""
    tables = []
    for count, sides in list(measured.items())[:1]:
        names = ["first reset (s)", "private memory of a worker (MB)", "a renewal (ms)"]
        rows = []
        for name in names:
            values = [[one[name] for one in results if name in one] for results in sides.values()]
            rows.append([name, *(f"{statistics.median(each):.3g}" if each else "" for each in values)])
        tables.append(table([f"{count} CartPole-v1 envs", *sides], rows))
    return "\n".join(tables)


def measure_calls(rounds: int) -> Any:
    """A call and its result."""
    return run_script(CALLS, rounds)


def show_calls(measured: Any) -> str:
    """Return the table of calls."""
    ours = next(iter(measured.values()))
    rows = [[name, f"{statistics.median(each):,.0f}", ratio(ours, each)] for name, each in measured.items()]
    return table(["one call after the other", "calls/s", "envactors / this"], rows)


def measure_steps(rounds: int) -> Any:
    """A step of 8 envs, per env."""
    records = {name: bench(env, 8, rounds) for name, env in ENVS.items()}
    return {name: rates(record) for name, record in records.items() if record is not None}


def show_steps(measured: Any) -> str:
    """Return the table of steps."""
    head = ["8 envs", "default / `AsyncVectorEnv`", "4 per process / `AsyncVectorEnv`", "4 per process / loop"]
    head += ["4 per process / independent loops", "`recv` of half / `step`"]
    rows = []
    for name, side in measured.items():
        pairs = [("envactors", "gymnasium"), ("envactors-packed", "gymnasium"), ("envactors-packed", "loop")]
        pairs += [("envactors-packed", "apart"), ("envactors-recv", "envactors")]
        rows.append([name, *(ratio(side[one], side[other]) for one, other in pairs)])
    return table(head, rows)


def show_readme(measured: Any) -> str:
    """Return the README's table, and which envs are faster in a plain loop."""
    return table(["speed, as a multiple of a plain loop", *readme.COLUMNS.values()], readme.show(measured)) + (
        f"\n{readme.summarize(measured)}\n"
    )


def show_rollouts(measured: Any) -> str:
    """Return the table of rollouts."""
    head = ["8 envs, 2 processes", "rollout / independent loops", "rollout / step"]
    return table(head, rollouts.show(measured))


def measure_counts(rounds: int) -> Any:
    """1 to 64 envs."""
    records = {
        str(n): bench("CartPole-v1", n, rounds, "--envs-per-actor", str(max(1, n // 2)))
        for n in (1, 2, 4, 8, 16, 32, 64)
    }
    return {count: rates(record) for count, record in records.items() if record is not None}


def show_counts(measured: Any) -> str:
    """Return the table of 1 to 64 envs."""
    rows = []
    for count, side in ((count, side) for count, side in measured.items() if count in ("1", "4", "16", "64")):
        packed = side.get("envactors-packed", side["envactors"])
        pairs = [(side["envactors"], side["gymnasium"]), (packed, side["gymnasium"]), (packed, side["loop"])]
        rows.append([count, *(ratio(*pair) for pair in pairs), ratio(packed, side["apart"])])
    head = [
        "CartPole-v1 envs",
        "default / `AsyncVectorEnv`",
        "two processes / `AsyncVectorEnv`",
        "two processes / loop",
    ]
    return table([*head, "two processes / independent loops"], rows)


def measure_nodes(rounds: int) -> Any:
    """Steps on two local nodes, on one, and with Gymnasium."""
    return run_script(NODES, rounds)


def show_nodes(measured: Any) -> str:
    """Return the table of two nodes against one machine."""
    rows = []
    for name, said in (("nothing", "does nothing"), ("busy_1ms", "1 ms of fixed work")):
        far, near, peer = measured[name].values()
        row = [said, f"{statistics.median(far):,.0f}", ratio(far, peer), ratio(far, near)]
        rows.append(row)
    head = ["8 envs, 4 per process", "steps/s on two nodes", "relative to `AsyncVectorEnv`", "relative to one machine"]
    return table(head, rows)


def measure_inside(rounds: int) -> Any:
    """What it costs to see inside."""
    return run_script(INSIDE, rounds)


def show_inside(measured: Any) -> str:
    """Return the table of what it costs to see inside."""
    rows = []
    for name, sides in measured.items():
        off, counted, on = sides.values()
        rows.append([readable(name), f"{statistics.median(off):,.0f}", ratio(counted, off), ratio(on, off)])
    return table(["8 envs", "steps/s with nothing on", "after `stats()`", "all of it on"], rows)


def measure_platforms(rounds: int) -> Any:
    """The speed of the portable system beside that of Linux."""
    return run_script(PLATFORMS, rounds)


def show_platforms(measured: Any) -> str:
    """Return the table of the portable system."""
    rows = []
    for name, sides in measured.items():
        linux, portable, same_start = sides.values()
        rates = [f"{statistics.median(each):,.0f}" for each in (linux, portable)]
        rows.append([readable(name), *rates, ratio(portable, linux), ratio(portable, same_start)])
    head = ["8 envs", "steps/s, Linux", "steps/s, portable", "portable / Linux", 'portable / Linux with `"loky"`']
    return table(head, rows)


def measure_seeds(rounds: int) -> Any:
    """What it costs to seed episodes."""
    return run_script(SEEDS, rounds)


def show_seeds(measured: Any) -> str:
    """Return the table of what it costs to seed episodes."""
    rows = []
    for name, (off, on, replays, both) in ((name, sides.values()) for name, sides in measured.items()):
        rows.append([name, f"{statistics.median(off):,.0f}", ratio(on, off), ratio(both, replays)])
    head = [
        "8 envs, 4 per process",
        "steps/s without",
        "`seed_episodes` / without",
        '`seed_episodes` / without, under `"replay"`',
    ]
    return table(head, rows)


def measure_snapshots(rounds: int) -> Any:
    """What snapshots cost."""
    return run_script(SNAPSHOTS, rounds)


def show_snapshots(measured: Any) -> str:
    """Return the table of snapshots."""
    rows = []
    for name, sides in measured.items():
        _, get, put, step = sides["calls"]
        none, seldom, often = sides["rates"].values()
        row = [name, f"{get:.2f}", f"{put:.2f}", f"{step:.2f}"]
        rows.append([*row, ratio(seldom, none), ratio(often, none)])
    head = ["", "snapshot (ms)", "restore (ms)", "step (ms)", "every 1,000 steps / none"]
    return table([*head, "every 100 steps / none"], rows)


# What is measured, and the tables of the page that are made of it.
QUESTIONS: dict[str, tuple[Callable[[int], Any], dict[str, Callable[[Any], str]]]] = {
    "readme": (readme.measure, {"readme": show_readme}),
    "start": (measure_start, {"start": show_start}),
    "steps": (measure_steps, {"steps": show_steps}),
    "rollouts": (rollouts.measure, {"rollouts": show_rollouts}),
    "calls": (measure_calls, {"calls": show_calls}),
    "counts": (measure_counts, {"counts": show_counts}),
    "inside": (measure_inside, {"inside": show_inside}),
    "platforms": (measure_platforms, {"platforms": show_platforms}),
    "seeds": (measure_seeds, {"seeds": show_seeds}),
    "snapshots": (measure_snapshots, {"snapshots": show_snapshots}),
    "nodes": (measure_nodes, {"nodes": show_nodes}),
    "sessions": (
        lambda rounds: sessions.measure(rounds, known("sessions")),
        {"sessions": lambda measured: table(["question", "figure"], sessions.show(measured))},
    ),
    "dropins": (
        lambda rounds: dropins.measure(rounds, known("dropins")),
        {f"dropin {name}": functools.partial(dropins.show, name) for name in dropins.LIBRARIES if name != "alf"},
    ),
    "suites": (
        lambda _: suites.measure(known("suites")),
        {f"suite {name}": functools.partial(suites.show, name) for name in suites.SUITES},
    ),
}


def known(question: str) -> dict[str, Any]:
    """Return what was measured before of a question whose sides are not all installed at once."""
    path = HERE / f"{question}.json"
    return json.loads(path.read_text())["measured"] if path.exists() else {}


def with_tables(page: str) -> str:
    """Return a page whose tables are those of the files beside this script."""
    for question, (_, tables) in QUESTIONS.items():
        measured = json.loads((HERE / f"{question}.json").read_text())["measured"]
        for name, show in tables.items():
            begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
            before, found, rest = page.partition(begin)
            if found:
                page = before + begin + show(measured) + end + rest.partition(end)[2]
    return page


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=(*QUESTIONS, "page"), help="page: the tables of all")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for question, (measure, _) in QUESTIONS.items():
        if question not in arguments.questions:
            continue
        record = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "rounds": arguments.rounds,
            "measured": measure(arguments.rounds),
        }
        (HERE / f"{question}.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in PAGES:
        page = HERE.parent / name
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
