"""OpenEnv servers whose sessions have processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from helpers import SOON, wait_until
from interrupting import interrupt

import envactors as ea

pytest.importorskip("openenv")
websockets = pytest.importorskip("websockets")
uvicorn = pytest.importorskip("uvicorn")

from openenv.core.env_server.http_server import create_app  # noqa: E402
from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # noqa: E402
from openenvs import Order, PatientRobot, Report, Robot, Toolbox, make_robot  # noqa: E402

from envactors.integrations.openenv import on_actors  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def used_libraries(helper_processes):
    """Keeps the fork server that has imported OpenEnv; uses once what opens a descriptor at its first use."""
    with ea.spawn(dict, backend=ea.ProcessBackend(preload=["openenvs"])) as actor:
        assert actor.copy().result(SOON) == {}
        with serving(on_actors(Robot, 1)) as address:
            asyncio.run(reset_once(address))
        yield


async def reset_once(address):
    async with session(address) as client:
        assert text_of(await client.ask("reset")) == "ready"


@contextlib.contextmanager
def serving(kind, size=2, action=Order, observation=Report):
    """Serves an environment on a free port; yields the address of its sessions."""
    app = create_app(kind, action, observation, max_concurrent_envs=size)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{port}/ws"
    finally:
        server.should_exit = True
        thread.join(SOON)
        kind.shared.close()


class Client:
    """One session with the server."""

    def __init__(self, socket):
        self._socket = socket

    async def ask(self, type_, **data):
        message = {"type": type_} if type_ == "state" else {"type": type_, "data": data}
        await self._socket.send(json.dumps(message))
        return json.loads(await asyncio.wait_for(self._socket.recv(), SOON))

    async def step(self, text):
        return await self.ask("step", text=text)


@contextlib.asynccontextmanager
async def session(address):
    async with websockets.connect(address) as socket:
        yield Client(socket)


def text_of(answer):
    assert answer["type"] == "observation", answer
    return answer["data"]["observation"]["text"]


@pytest.mark.parametrize("kind", [Robot, PatientRobot])
def test_each_session_has_a_process_and_state_of_its_own(kind):
    async def main(address):
        async with session(address) as one, session(address) as two:
            first = await one.ask("reset", seed=3, unknown="left out")
            second = await two.ask("reset", episode_id="two")
            pids = {answer["data"]["observation"]["pid"] for answer in (first, second)}
            assert len(pids) == 2
            assert os.getpid() not in pids
            assert text_of(await one.step("go")) == "go"
            assert (await one.ask("state"))["data"] == {"episode_id": "seed 3", "step_count": 1}
            assert (await two.ask("state"))["data"] == {"episode_id": "two", "step_count": 0}

    actors = on_actors(kind, 2)
    with serving(actors) as address:
        asyncio.run(main(address))
        wait_until(lambda: actors.shared.get().stats().outcomes["completed"] == 2)


@pytest.mark.parametrize(
    ("order", "message"), [("crash", "SIGSEGV"), ("hang", "deadline of 3.0 s"), ("fail", "the robot refuses")]
)
def test_a_failure_is_a_protocol_error_of_one_session_and_a_reset_continues(order, message):
    async def main(address):
        async with session(address) as failing, session(address) as other:
            await failing.ask("reset")
            await other.ask("reset")
            answers = await asyncio.gather(failing.step(order), other.step("go"))
            assert answers[0]["type"] == "error"
            assert message in answers[0]["data"]["message"]
            assert text_of(answers[1]) == "go"
            assert text_of(await failing.ask("reset")) == "ready"
            assert text_of(await failing.step("go on")) == "go on"
            assert text_of(await other.step("go on")) == "go on"

    with serving(on_actors(Robot, 2, standbys=1, deadlines=3.0)) as address:
        asyncio.run(main(address))


def test_a_client_that_disconnects_in_a_call_gives_its_actor_back():
    async def leave(address):
        async with session(address) as client:
            await client.ask("reset")
            await client._socket.send(json.dumps({"type": "step", "data": {"text": "hang"}}))

    async def main(address):
        await leave(address)
        async with session(address) as client:
            assert text_of(await client.ask("reset")) == "ready"

    with serving(on_actors(Robot, 1, standbys=1, deadlines=3.0), size=2) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize("kind", [Robot, Toolbox])
def test_an_environment_that_nobody_closes_gives_its_actor_back(kind):
    # The server does not close the environment of a session if the task that serves it is cancelled.
    actors = on_actors(kind, 1)
    actors.shared.start_timeout = SOON
    with contextlib.closing(actors.shared) as shared:
        for _ in range(2):
            env = actors()
            env.reset()
            assert getattr(env, "mcp_client", env) is not None
            del env
        wait_until(lambda: shared.get().stats().outcomes["cancelled"] == 2)


def test_a_second_close_gives_the_actor_back_if_the_first_was_interrupted():
    actors = on_actors(Robot, 1)
    try:
        for number in itertools.count():
            env = actors()
            env.reset()
            was_interrupted = interrupt(env.close, number, only={"_give_back"})
            env.close()
            wait_until(lambda: actors.shared.get().stats().leased == 0)
            if was_interrupted is None:
                break
        assert number > 3
    finally:
        actors.shared.close()


def test_a_session_without_a_free_actor_gets_a_protocol_error():
    async def main(address):
        async with session(address) as first, session(address) as second:
            assert text_of(await first.ask("reset")) == "ready"
            actors.shared.start_timeout = 0.2
            answer = await second.ask("reset")
            assert answer["type"] == "error"
            assert "did not start within" in answer["data"]["message"]

    actors = on_actors(Robot, 1)
    with serving(actors) as address:
        asyncio.run(main(address))


def test_a_question_without_a_session_waits_for_no_actor():
    """The server asks in its event loop, so all sessions used to stand still until an actor was free."""

    async def main(address):
        url = address.replace("ws://", "http://").removesuffix("ws")
        async with session(address) as client:
            await client.ask("reset", seed=3)
            for question, expected in (("state", ("episode_id", "none")), ("metadata", ("name", "Robot"))):
                with await asyncio.to_thread(urllib.request.urlopen, url + question, timeout=SOON) as answer:
                    assert expected in json.load(answer).items()
            assert text_of(await client.step("go")) == "go"
            assert (await client.ask("state"))["data"] == {"episode_id": "seed 3", "step_count": 1}

    with serving(on_actors(Robot, 1, start_timeout=None)) as address:
        asyncio.run(main(address))


def test_tools_keep_the_state_of_their_session():
    async def call(client, n):
        params = {"name": "add", "arguments": {"n": n}}
        answer = await client.ask("mcp", jsonrpc="2.0", id=1, method="tools/call", params=params)
        return answer["data"]["result"]["data"]

    async def main(address):
        async with session(address) as one, session(address) as two:
            await one.ask("reset")
            listed = await one.ask("mcp", jsonrpc="2.0", id=1, method="tools/list")
            assert [tool["name"] for tool in listed["data"]["result"]["tools"]] == ["add"]
            assert [await call(one, 2), await call(one, 3), await call(two, 4)] == [2, 5, 4]
            assert (await one.ask("state"))["data"]["step_count"] == 5
            answer = await one.ask("step", type="call_tool", tool_name="add", arguments={"n": 1})
            assert answer["data"]["observation"]["result"]["data"] == 6

    with serving(on_actors(Toolbox, 2), action=CallToolAction, observation=CallToolObservation) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize("factory", [Robot, functools.partial(Robot), make_robot])
def test_the_class_has_the_signatures_of_the_environment(factory):
    actors = on_actors(factory, 1)
    try:
        assert issubclass(actors, Environment)
        assert actors.SUPPORTS_CONCURRENT_SESSIONS
        assert actors.__name__ == "Robot"
        for method in (actors().reset, actors().reset_async):
            assert list(inspect.signature(method).parameters) == ["seed", "episode_id"]
    finally:
        actors.shared.close()


def test_an_instance_that_is_only_inspected_starts_nothing():
    actors = on_actors(Robot, 1)
    actors().close()
    assert actors.shared._pools == {}


def test_a_factory_that_is_not_a_callable_is_rejected():
    with pytest.raises(TypeError, match="expected the class of an environment"):
        on_actors("Robot", 1)


def test_environments_work_without_a_server():
    actors = on_actors(Robot, 1)
    env = actors()
    try:
        assert env.reset(seed=1).text == "ready"
        assert env.step(Order(text="go")).text == "go"
        assert env.state.step_count == 1
        assert env.get_metadata().name == "Robot"
        with pytest.raises(ea.ActorDiedError):
            env.step(Order(text="crash"))
        with pytest.raises(ea.ActorDiedError):
            env.step(Order(text="go"))
        assert env.reset().text == "ready"
        env.close()
        # Each of these used to lease another actor, which nobody gave back.
        for use in (env.reset, lambda: env.step(Order(text="go")), lambda: env.state, env.get_metadata):
            with pytest.raises(ea.ActorClosedError, match="this Robot is closed: make another"):
                use()
        assert actors.shared.get().stats().leased == 0
    finally:
        env.close()
        actors.shared.close()


@pytest.mark.timeout(300)
def test_the_server_of_the_guide_survives_and_its_clients_train_on():
    script = Path(__file__).parents[2] / "docs/openenv/server.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the best arm is" in done.stdout
