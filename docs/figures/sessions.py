"""Measures what sessions cost; see `measure.py`.

pool      the start of a session from standbys, and a call of a session against a plain actor call
openenv   OpenEnv's echo env, which must be on the path as ``echo_env``, at concurrent WebSocket sessions: its plain
          server against one with ``on_actors``, and the latency of the others while one session blocks in C code

All sides of a question take turns in one run; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from costs import Echo, calling
from turns import alternate, ratio, table

import envactors as ea

SESSIONS = 64


# The pool -----------------------------------------------------------------------------------------------------


def measure_pool(rounds: int) -> dict[str, Any]:
    """Return what sessions cost."""
    starts = []
    with ea.SessionPool(Echo, 2, standbys=4) as pool, ea.spawn(Echo) as actor:
        for _ in range(20 * rounds):
            while pool.stats().idle < 6:
                time.sleep(0.005)
            begun = time.perf_counter()
            with pool.session() as env:
                starts.append(time.perf_counter() - begun)
                env.echo(1).result()
        with pool.session() as env:
            turns = {"plain": calling(lambda: actor.echo(1).result()), "session": calling(lambda: env.echo(1).result())}
            rates = alternate(turns, rounds, 0.1)
    return {"start p50, ms": 1000 * statistics.median(starts), "call / plain call": ratio(*rates.values())}


# OpenEnv ------------------------------------------------------------------------------------------------------


def blocking_echo() -> Any:
    """Return the class of the echo env, with a tool that blocks in C code."""
    from echo_env.server.echo_environment import EchoEnvironment

    class BlockingEcho(EchoEnvironment):  # type: ignore[misc] # not checked here
        """The echo env, and a tool that never returns."""

        def __init__(self) -> None:
            super().__init__()

            @self.mcp_server.tool
            def block() -> str:
                """Block in C code that holds the GIL."""
                collections.deque(itertools.repeat(0), maxlen=0)
                return ""

    return BlockingEcho


def serve(kind: str, size: int) -> None:
    """Serve the echo env; print the port."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    from envactors.integrations.openenv import on_actors

    factory = blocking_echo()
    if kind == "actors":
        backend = ea.ProcessBackend(preload=["echo_env.server.echo_environment"])
        factory = on_actors(factory, size, deadlines=20.0, backend=backend)
    app = create_app(factory, CallToolAction, CallToolObservation, max_concurrent_envs=size)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws_ping_interval=None))

    async def main() -> None:
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    asyncio.run(main())


@contextlib.contextmanager
def server(kind: str, size: int) -> Iterator[str]:
    """Run a server in a process of its own; yield the address of its sessions."""
    command = [sys.executable, __file__, "--serve", kind, "--sessions", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 # this file
        assert process.stdout is not None
        yield f"ws://127.0.0.1:{process.stdout.readline().strip()}/ws"
        process.terminate()


async def ask(socket: Any, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send a message of OpenEnv's protocol; return the answer."""
    await socket.send(json.dumps({"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(await socket.recv())
    return answer


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the action that calls a tool."""
    return {"type": "call_tool", "tool_name": tool, "arguments": arguments}


@contextlib.asynccontextmanager
async def sessions(address: str, count: int) -> AsyncIterator[list[Any]]:
    """Begin sessions and reset their envs."""
    import websockets

    async with contextlib.AsyncExitStack() as stack:
        connect = [
            stack.enter_async_context(websockets.connect(address, open_timeout=120, ping_interval=None))
            for _ in range(count)
        ]
        sockets = await asyncio.gather(*connect)
        for answer in await asyncio.gather(*(ask(socket, "reset", {}) for socket in sockets)):
            assert answer["type"] == "observation", answer
        yield sockets


async def play(sockets: list[Any], steps: int) -> list[float]:
    """Step all sessions side by side; return how long each step has taken, in seconds."""

    async def step(socket: Any) -> list[float]:
        latencies = []
        for number in range(steps):
            begun = time.perf_counter()
            answer = await ask(socket, "step", call("echo_message", message=str(number)))
            latencies.append(time.perf_counter() - begun)
            assert answer["type"] == "observation", answer
        return latencies

    return [latency for latencies in await asyncio.gather(*map(step, sockets)) for latency in latencies]


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


async def compare_servers(rounds: int, size: int) -> dict[str, Any]:
    """Return the throughput of the server on actors over the plain one's, and what a session that blocks costs."""
    rates: dict[str, list[float]] = {"plain": [], "actors": []}
    ratios = []
    with server("plain", size) as plain, server("actors", size) as actors:
        async with sessions(plain, size) as on_plain, sessions(actors, size) as on_actors:
            sides = {"plain": on_plain, "actors": on_actors}
            for sockets in sides.values():
                await play(sockets, 3)
            for _ in range(rounds):
                for side, sockets in sides.items():
                    begun = time.perf_counter()
                    latencies = await play(sockets, 10)
                    rates[side].append(len(latencies) / (time.perf_counter() - begun))
            for _ in range(rounds):
                alone = await play(on_actors[1:], 10)
                blocked = asyncio.ensure_future(ask(on_actors[0], "step", call("block")))
                await asyncio.sleep(0.2)
                beside = await play(on_actors[1:], 10)
                assert not blocked.done(), "the others were too slow for the deadline"
                ratios.append(p99(beside) / p99(alone))
                assert "deadline" in str(await blocked)
                await ask(on_actors[0], "reset", {})
    return {
        "sessions": size,
        "steps/s, plain": statistics.median(rates["plain"]),
        "steps/s, on actors": statistics.median(rates["actors"]),
        "on actors / plain": statistics.median(a / b for a, b in zip(rates["actors"], rates["plain"], strict=True)),
        "p99 of the others while one blocks / without": statistics.median(ratios),
    }


def measure(rounds: int, known: dict[str, Any]) -> dict[str, Any]:
    """Measure the pool, and the servers of OpenEnv if they can be imported; else what is known of them stays."""
    measured = known | {"pool": measure_pool(rounds)}
    if all(importlib.util.find_spec(package) for package in ("echo_env", "openenv", "uvicorn")):
        measured["openenv"] = asyncio.run(compare_servers(rounds, SESSIONS))
    return measured


def show(measured: Any) -> str:
    """Return the table of sessions."""
    pool, servers = measured["pool"], measured["openenv"]
    rows = [
        ["start of a session from a standby, median", f"{pool['start p50, ms']:.2f} ms"],
        ["time of a call in a session / of a plain call", f"{pool['call / plain call']:.2f}"],
        ["steps/s of an OpenEnv server on actors / without actors", f"{servers['on actors / plain']:.2f}"],
        [
            "OpenEnv server on actors: p99 latency of the other sessions while one blocks / while none does",
            f"{servers['p99 of the others while one blocks / without']:.2f}",
        ],
    ]
    return table(["question", "figure"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the echo env.")
    parser.add_argument("--serve", choices=["plain", "actors"], required=True)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    options = parser.parse_args()
    serve(options.serve, options.sessions)
