"""Rollouts of verifiers whose rewards are computed in leased processes, with a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import threading

import pytest

import envactors as ea

vf = pytest.importorskip("verifiers.v1")
httpx = pytest.importorskip("httpx")

from verifiers.v1.runtimes import ProgramResult, SubprocessConfig  # noqa: E402
from verifiers_tasks import FaultyTaskset, ReverseTaskset  # noqa: E402

from envactors.integrations.verifiers import on_actors  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def used_libraries(helper_processes):
    """Keeps the fork server that has imported verifiers."""
    with ea.spawn(dict, backend=ea.ProcessBackend(preload=["verifiers_tasks"])) as actor:
        actor.copy().result(60)
        yield


class ScriptedModel(http.server.BaseHTTPRequestHandler):
    """Answers with the text reversed, except for the texts that name a fault."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][-1]["content"]
        reply = text if text in ("crash", "hang", "fail") else text[::-1].replace("w", "v")
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "scripted", "usage": usage}
        body = json.dumps({**completion, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def model(monkeypatch):
    """The address of the scripted model."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptedModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("SCRIPTED_KEY", "none")
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


class ChatOnce(vf.Harness):
    """Asks the model once."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        request = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=request)
        answer.raise_for_status()
        return ProgramResult(0, "", "")


async def rollouts(taskset, model):
    """Returns a trace per prompt."""
    client = vf.EvalClientConfig(base_url=model, api_key_var="SCRIPTED_KEY")
    config = vf.AgentConfig(model="scripted", client=client, runtime=SubprocessConfig())
    agent = vf.Agent(config)
    agent.harness = ChatOnce(vf.HarnessConfig(id="chat-once"))
    async with agent:
        traces = await asyncio.gather(*map(agent.run, taskset))
    return {trace.task.data.prompt: trace for trace in traces}


@contextlib.contextmanager
def scored_on_actors(taskset, size, **options):
    view = on_actors(taskset, size, **options)
    try:
        yield view
    finally:
        view.shared.close()


def scores_of(trace):
    return {name: reward and (reward.score, reward.weight) for name, reward in trace.rewards.items()}, trace.metrics


def test_rewards_are_the_same_in_a_process_of_their_own(model):
    harmless = ReverseTaskset(vf.TasksetConfig())
    plain = asyncio.run(rollouts(harmless, model))
    with scored_on_actors(harmless, 2) as view:
        scored = asyncio.run(rollouts(view, model))
        assert view.shared.get().stats().outcomes["completed"] == 3
    assert {trace.ok for trace in scored.values()} == {True}, [trace.errors for trace in scored.values()]
    assert {text: scores_of(trace) for text, trace in scored.items()} == {
        text: scores_of(trace) for text, trace in plain.items()
    }
    assert scores_of(scored["abc"]) == ({"correct": (1.0, 2.0), "has_workdir": (1.0, 1.0)}, {"length": 1.0})
    assert {trace.task.type for trace in scored.values()} == {"ReverseTask"}
    processes = {trace.info["scored in"] for trace in scored.values()}
    assert len(processes) == 3
    assert os.getpid() not in processes


def test_a_lost_process_is_a_failure_and_never_a_reward(model):
    taskset = FaultyTaskset(vf.TasksetConfig())
    with scored_on_actors(taskset, 6, deadlines=3.0) as view:
        traces = asyncio.run(rollouts(view, model))
        outcomes = view.shared.get().stats().outcomes
    for prompt, reason in {"crash": "SIGSEGV", "hang": "deadline", "fail": "not an answer"}.items():
        trace = traces[prompt]
        assert not trace.ok
        assert trace.last_error.type == "TaskError"
        assert reason in trace.last_error.message
        assert trace.rewards["correct"] is None
        assert trace.reward == 0
    assert all(traces[prompt].ok for prompt in ("abc", "level", "drawer"))
    assert {kind: count for kind, count in outcomes.items() if count} == {
        "completed": 3, "died": 1, "timeout": 1, "exception": 1,
    }  # fmt: skip


def test_a_task_outside_of_a_scoring_computes_here():
    with scored_on_actors(ReverseTaskset(vf.TasksetConfig()), 1) as view:
        task = next(iter(view))
        assert [function.__name__ for function in task.hooks("metric")] == ["length"]
        assert view.shared._pool is None
