"""Actors on other nodes: node agents as processes of this machine, lost, stopped, cut off."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

import numpy as np
import psutil
import pytest
from helpers import SOON, Counter, promised, run_script, wait_until
from nodes import preloading_backend, standing

import envactors as ea
from envactors.remote import LocalNodes
from envactors.remote.link import Link
from envactors.remote.records import RecordKind
from envactors.testing import EchoEnv

pytestmark = pytest.mark.timeout(120)


# No class of this module, which workers would have to import, and pytest with it.
Short = functools.partial(EchoEnv, episode_length=5)
# How many envs a node of `shared` may have beside the one of its idle actor.
ROOM = 4


@pytest.fixture(scope="module")
def shared(helper_processes):
    """A backend of two nodes that stay, for tests that leave them as they were."""
    backend = preloading_backend(LocalNodes(2), envs_per_node=1 + ROOM)
    with standing(backend):
        yield backend


@pytest.fixture
def launcher():
    return LocalNodes(2)


@pytest.fixture
def backend(launcher):
    return preloading_backend(launcher)


@pytest.fixture
def hasty(launcher):
    """A backend that gives nodes up soon, also those that are only busy."""
    return ea.RemoteBackend(launcher, lease=1.0, heartbeat=0.2)


def agents_of(launcher):
    return {name: psutil.Process(agent.pid) for name, agent in launcher.agents.items()}


def test_an_actor_reports_the_node_that_it_runs_on(backend, launcher):
    with ea.spawn(Counter, backend=backend) as actor:
        assert actor.add(3).result(SOON) == 3
        assert actor.node in ("local-0", "local-1")
        agent = agents_of(launcher)[actor.node]
        assert actor.pid in [child.pid for child in agent.children(recursive=True)]
    assert launcher.agents == {}


def test_a_forked_child_has_nodes_of_its_own(shared):
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            with ea.spawn(Counter, backend=shared) as own:
                code = 0 if own.add(5).result(SOON) == 5 else 2
            code = code or 3 * bool(shared.nodes)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with ea.spawn(Counter, backend=shared) as actor:
        assert actor.add(2).result(SOON) == 2


def test_a_local_actor_has_no_node():
    with ea.spawn(Counter) as actor:
        actor.add(1).result(SOON)
        assert actor.node is None


def test_actors_are_spread_evenly_within_the_limit(shared):
    with ea.VectorEnv([EchoEnv] * 2 * ROOM, envs_per_actor=2, backend=shared) as envs:
        envs.reset()
        assert sorted(actor.node for actor in envs.actors) == ["local-0", "local-0", "local-1", "local-1"]
        with pytest.raises(ea.ActorStartError, match=r"no node has room for 1 more envs \(local-0 has 5 of 5"):
            ea.spawn(Counter, backend=shared, deadlines=ea.Deadlines(start=0.5)).add(1).result(SOON)


def test_an_actor_that_waits_for_room_on_a_node_has_no_pid(shared):
    deadlines = ea.Deadlines(start=0.5)
    with (
        ea.VectorEnv([EchoEnv] * 2 * ROOM, envs_per_actor=ROOM, backend=shared),
        ea.spawn(Counter, backend=shared, deadlines=deadlines) as actor,
    ):
        future = actor.add(1)
        seen = set()
        while not future.done():
            seen |= {actor.pid, actor.stats().pid}  # a signal to pid 0 would kill this process and its siblings
            time.sleep(0.01)
        assert seen == {None}
        with pytest.raises(ea.ActorStartError, match="no node has room"):
            future.result()


def test_a_lost_agent_counts_as_a_lost_node_and_the_other_continues(hasty, launcher):
    policy = ea.RestartPolicy(max_restarts=3)
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(Counter, backend=hasty, restart=policy)) for _ in range(2)]
        for actor in actors:
            actor.add(1).result(SOON)
        lost, other = actors
        assert lost.node != other.node
        workers = agents_of(launcher)[lost.node].children(recursive=True)
        running, node = lost.sleep(30), lost.node
        while lost.state is not ea.ActorState.BUSY:
            time.sleep(0.01)
        begun = time.monotonic()
        launcher.agents[node].kill()
        with pytest.raises(ea.NodeLostError, match=f"was lost with its node '{node}', whose") as caught:
            running.result(SOON)
        assert time.monotonic() - begun < promised(2.0)
        assert (caught.value.node, caught.value.method) == (node, "sleep")
        assert other.add(1).result(SOON) == 2
        assert lost.add(5).result(SOON) == 5
        assert time.monotonic() - begun > 0.8, "no sooner than the lease allows"
        assert lost.node == other.node
        assert lost.incarnation == 1
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert alive == []


def test_a_stopped_agent_is_lost_after_the_lease_and_its_helper_ends_the_workers(hasty, launcher):
    with ea.spawn(Counter, backend=hasty, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        actor.add(1).result(SOON)
        agent = agents_of(launcher)[actor.node]
        workers = agent.children(recursive=True)
        running = actor.sleep(30)
        while actor.state is not ea.ActorState.BUSY:
            time.sleep(0.01)
        agent.suspend()
        begun = time.monotonic()
        with pytest.raises(ea.NodeLostError, match="was lost with its node"):
            running.result(SOON)
        assert 0.5 < time.monotonic() - begun < promised(3.0)
        assert actor.add(2).result(SOON) == 2
        _, alive = psutil.wait_procs([agent, *workers], timeout=5)
        assert alive == []


def test_deadlines_keep_their_times_on_a_silent_link(launcher):
    backend = ea.RemoteBackend(launcher, lease=10.0)
    with ea.spawn(Counter, backend=backend, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        actor.add(1).result(SOON)
        agent = agents_of(launcher)[actor.node]
        agent.suspend()
        begun = time.monotonic()
        with pytest.raises(ea.ActorTimeoutError):
            actor.options(deadline=0.5).sleep(30).result(SOON)
        assert 0.4 < time.monotonic() - begun < promised(3.0)
        waiting = actor.add(1)
        assert not waiting.done(), "the old process may still run"
        agent.resume()
        assert waiting.result(SOON) == 1
        assert time.monotonic() - begun < promised(9.0), "its end was acknowledged"


def test_closing_keeps_its_time_on_a_silent_link():
    launcher = LocalNodes(1)
    backend = ea.RemoteBackend(launcher, lease=10.0)
    actor = ea.spawn(Counter, backend=backend)
    actor.add(1).result(SOON)
    agents_of(launcher)[actor.node].suspend()
    begun = time.monotonic()
    actor.close(0.3)
    assert time.monotonic() - begun < promised(6.0)


def test_output_stacks_and_exit_codes_arrive_from_other_nodes(shared, capfd):
    class Dies(Counter):
        def die(self):
            import sys

            print("last words", file=sys.stderr, flush=True)
            os._exit(7)

    with ea.spawn(Dies, backend=shared, restart=ea.RestartPolicy(max_restarts=2), name="far") as actor:
        with pytest.raises(ea.ActorDiedError) as died:
            actor.die().result(SOON)
        assert (died.value.exitcode, died.value.stderr_tail) == (7, "last words")
        with pytest.raises(ea.ActorTimeoutError) as timed_out:
            actor.options(deadline=0.3).sleep(30).result(SOON)
        assert "in sleep" in timed_out.value.stacks
        printed = []

        def is_printed():
            printed.append(capfd.readouterr().err)
            return "[far] last words" in "".join(printed)

        wait_until(is_printed)  # in a thread that ends later than this actor


def test_a_killed_worker_does_not_count_as_a_lost_node(shared, tmp_path):
    with ea.spawn(Counter, backend=shared, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        actor.add(1).result(SOON)
        running = actor.touch_then_wait(str(tmp_path / "begun"), str(tmp_path / "never"))
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(actor.pid, signal.SIGKILL)
        with pytest.raises(ea.ActorDiedError) as died:
            running.result(SOON)
        assert (type(died.value), died.value.signal) == (ea.ActorDiedError, signal.SIGKILL)
        assert actor.add(1).result(SOON) == 1


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_envs_on_nodes_step_like_local_ones(shared, autoreset):
    def run(backend):
        with ea.VectorEnv([Short] * 4, envs_per_actor=2, autoreset=autoreset, backend=backend) as envs:
            results = [envs.reset(seed=3)]
            for turn in range(12):
                results.append(envs.step(np.full(envs.num_envs, turn % 2)))
                if autoreset == "disabled" and (ended := np.flatnonzero(results[-1][2] | results[-1][3])).size:
                    envs.reset(env_ids=ended.tolist())
            return results

    for near, far in zip(run("process"), run(shared), strict=True):
        np.testing.assert_equal(far, near)


def test_remote_results_arrive_one_by_one_with_infos_of_any_size(shared):
    class Wordy(EchoEnv):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            info = {1: {}, 2: {"text": "x" * 50_000}, 3: {"number": np.float32(3)}}.get(int(action), info)
            if action == 4:
                raise ValueError("four")
            return obs, reward, terminated, truncated, info

    with ea.VectorEnv([Wordy] * 4, envs_per_actor=2, backend=shared) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            *_, infos = envs.step(np.array([1, 2, 3, 2]))
            assert [len(str(info)) > 50_000 for info in infos] == [False, True, False, True]
            assert (infos[0], infos[2]) == ({}, {"number": np.float32(3)})
        envs.send(np.array([1, 1, 2, 3]))
        batches = [envs.recv(min_envs=1, max_envs=1) for _ in range(4)]
        assert sorted(int(batch.env_ids[0]) for batch in batches) == [0, 1, 2, 3]
        with pytest.raises(ea.VectorStepError, match="four"):
            envs.step(np.array([1, 4, 1, 1]))
        futures = envs.submit(np.array([1, 3]), env_ids=[3, 0])
        assert [future.result(SOON).env_id for future in futures] == [3, 0]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_drained_node_is_left_at_the_end_of_episodes(backend, envs_per_actor):
    policy = ea.RestartPolicy(max_restarts=0)
    with ea.VectorEnv([Short] * 4, envs_per_actor=envs_per_actor, backend=backend, restart=policy) as envs:
        envs.reset(seed=0)
        assert {actor.node for actor in envs.actors} == {"local-0", "local-1"}
        with pytest.raises(ValueError, match="node 'mars': expected one of"):
            backend.drain("mars")
        backend.drain("local-1")
        before = envs.actors[0].node, envs.actors[1].node
        envs.step(np.zeros(4, np.int64))
        assert (envs.actors[0].node, envs.actors[1].node) == before, "not in the middle of an episode"
        for _ in range(30):
            envs.step(np.zeros(4, np.int64))
        if envs_per_actor > 1:
            envs.reset()
        assert {actor.node for actor in envs.actors} == {"local-0"}
        assert sum(stats.restarts for stats in envs.stats().actors) == 0


def test_envs_stay_on_a_drained_node_until_another_one_has_room():
    """They used to be ended, to wait for room, and to use up their restarts."""
    launcher = LocalNodes(2)
    backend = preloading_backend(launcher, envs_per_node=2)
    policy, deadlines = ea.RestartPolicy(max_restarts=0), ea.Deadlines(start=20.0)
    with ea.VectorEnv([Short] * 3, backend=backend, restart=policy, deadlines=deadlines) as envs:
        envs.reset(seed=0)
        (left,) = {actor.node for actor in envs.actors if [a.node for a in envs.actors].count(actor.node) == 2}
        backend.drain(left)  # the other node has room for one of two envs
        for _ in range(20):
            envs.step(np.zeros(3, np.int64))
        assert [actor.node for actor in envs.actors].count(left) == 1
        launcher.add()
        wait_until(lambda: len(backend.nodes) == 3)
        for _ in range(10):
            envs.step(np.zeros(3, np.int64))
        assert left not in {actor.node for actor in envs.actors}
        assert sum(stats.restarts for stats in envs.stats().actors) == 0


def test_workers_of_functions_and_sessions_leave_a_drained_node(backend, launcher):
    with (
        ea.Executor(2, backend=backend) as pool,
        ea.SessionPool(EchoEnv, 2, fresh="reset", backend=backend) as sessions,
    ):

        def use_all():
            """Has each worker run something."""
            calls = [pool.submit(time.sleep, 0.3) for _ in range(2)]
            with sessions.session() as first, sessions.session() as second:
                ea.wait([first.step(1), second.step(1)], SOON)
            ea.wait(calls, SOON)

        use_all()
        agent = agents_of(launcher)["local-0"]
        assert len(agent.children(recursive=True)) == 3, "the helper and two workers"
        backend.drain("local-0")
        use_all()
        wait_until(lambda: len(agent.children(recursive=True)) == 1)
        use_all()
        assert pool.stats().restarts == 0


def test_no_deadline_is_left_over_from_a_step_whose_results_came_one_by_one(shared):
    with ea.VectorEnv([EchoEnv] * 2, backend=shared, deadlines=ea.Deadlines(step=0.3)) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.send(np.zeros(2, np.int64))
            for _ in range(2):
                envs.recv(min_envs=1, max_envs=1)
        time.sleep(0.6)  # twice the deadline
        assert [actor.incarnation for actor in envs.actors] == [0, 0]
        assert [actor.state for actor in envs.actors] == [ea.ActorState.IDLE] * 2


def test_calls_to_a_process_that_crashed_do_not_run_in_the_next_one(shared):
    class Fragile(EchoEnv):
        def step(self, action):
            if action == 9:
                os._exit(1)
            return super().step(action)

    with ea.VectorEnv([Fragile] * 2, envs_per_actor=2, backend=shared, on_failure="renew") as envs:
        envs.reset(seed=0)
        node = envs.actors[0].node
        envs.step(np.array([9, 5]))  # the second one is lost before its turn
        envs.reset(seed=0)
        envs.step(np.array([1]), env_ids=[0])
        obs, *_ = envs.step(np.array([2]), env_ids=[1])
        assert obs[0, :3].tolist() == [0, 1, 2]  # id, steps, last action
        assert envs.actors[0].node == node, "it has the same memory"


def test_a_lost_node_is_replayed(launcher):
    backend = ea.RemoteBackend(launcher, lease=2.0, heartbeat=0.2)
    with (
        ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend, on_failure="replay") as envs,
        ea.VectorEnv([EchoEnv] * 4, backend="inline") as undisturbed,
    ):
        np.testing.assert_equal(envs.reset(seed=1), undisturbed.reset(seed=1))
        for turn in range(20):
            if turn == 7:
                launcher.agents[envs.actors[0].node].kill()
            actions = np.full(4, turn % 2)
            np.testing.assert_equal(envs.step(actions), undisturbed.step(actions))


def test_without_any_node_the_error_describes_the_nodes():
    launcher = LocalNodes(1)
    backend = ea.RemoteBackend(launcher, lease=1.0, heartbeat=0.2)
    policy = ea.RestartPolicy(max_restarts=1)
    with contextlib.ExitStack() as stack:
        # The first actor waits for the agents and their servers, so that the other one starts at once.
        stack.enter_context(ea.spawn(Counter, backend=backend)).add(1).result(SOON)
        deadlines = ea.Deadlines(start=5.0)
        actor = stack.enter_context(ea.spawn(Counter, backend=backend, deadlines=deadlines, restart=policy))
        actor.add(1).result(SOON)
        launcher.agents["local-0"].kill()
        with pytest.raises(ea.RestartsExhaustedError, match="no node has room for 1 more envs"):
            while True:
                with contextlib.suppress(ea.ActorDiedError):
                    actor.add(1).result(SOON)


def test_options_may_be_numbers_of_numpy():
    numbers = {"envs_per_node": np.int64(4), "lease": np.float32(10), "heartbeat": np.float32(1)}
    with ea.spawn(Counter, backend=ea.RemoteBackend(LocalNodes(1), **numbers)) as actor:
        assert actor.add().result(SOON) == 1


def test_a_remote_backend_rejects_invalid_options():
    with pytest.raises(ValueError, match=r"lease is 1\.0 with heartbeat=1\.0: expected at least two heartbeats"):
        ea.RemoteBackend(LocalNodes(), lease=1.0)
    with pytest.raises(ValueError, match=r"lease is '10': expected seconds >= 0$"):
        ea.RemoteBackend(LocalNodes(), lease="10")
    with pytest.raises(ValueError, match="heartbeat is None: expected seconds >= 0"):
        ea.RemoteBackend(LocalNodes(), heartbeat=None)
    with pytest.raises(ValueError, match="envs_per_node is 0: expected an int >= 1, or None"):
        ea.RemoteBackend(LocalNodes(), envs_per_node=0)
    with pytest.raises(ValueError, match="start_method is 'magic'"):
        ea.RemoteBackend(LocalNodes(), start_method="magic")
    for launcher in (2, LocalNodes):
        with pytest.raises(TypeError, match=r"launcher is .*: expected a Launcher, such as LocalNodes\(2\)"):
            ea.RemoteBackend(launcher)
    with pytest.raises(ValueError, match="count is 0: expected an int from 1 to 200"):
        LocalNodes(0)


def test_local_backends_load_nothing_of_it():
    import subprocess
    import sys

    code = "import sys, envactors as ea; ea.spawn(dict).close(); print(*[m for m in sys.modules if '.remote' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_agent_that_ends_when_it_is_told_to_is_not_reported_as_lost(monkeypatch, caplog):
    send = Link.send

    def send_slowly(self, record):
        send(self, record)
        if record.kind == RecordKind.END:
            time.sleep(0.5)  # the agent ends meanwhile

    monkeypatch.setattr(Link, "send", send_slowly)
    with ea.spawn(Counter, backend=ea.RemoteBackend(LocalNodes(1))) as actor:
        assert actor.add(1).result(SOON) == 1
    assert caplog.messages == []


def test_agents_leave_nothing_open_that_python_would_warn_of():
    script = """
        import envactors as ea
        from envactors.remote import LocalNodes
        with ea.spawn(dict, backend=ea.RemoteBackend(LocalNodes(1))) as actor:
            assert actor.copy().result() == {}
    """
    ended = run_script(script, env={**os.environ, "PYTHONDEVMODE": "1"})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_vector_without_room_fails_at_its_first_start_deadline(shared):
    """It used to fail as often as its restart policy allows, each time after another start deadline."""
    policy, deadlines = ea.RestartPolicy(max_restarts=3), ea.Deadlines(start=0.5)
    with pytest.raises(ea.ActorStartError, match=rf"no node has room for {ROOM + 1} more envs"):
        ea.VectorEnv(
            [EchoEnv] * (ROOM + 1), envs_per_actor=ROOM + 1, backend=shared, deadlines=deadlines, restart=policy
        )


def test_an_actor_without_a_node_has_no_stacks(shared):
    with (
        ea.VectorEnv([EchoEnv] * 2 * ROOM, envs_per_actor=ROOM, backend=shared),
        ea.spawn(Counter, backend=shared) as actor,
    ):
        wait_until(lambda: "no node runs it yet" in actor.stacks(timeout=0.1))
        actor.kill()
