"""Interrupts between what in-line workers are asked and what they run."""

from __future__ import annotations

import itertools
import signal
import sys
from typing import ClassVar

import pytest
from interrupting import interrupt

import envactors as ea
from envactors.actor.supervisor import Supervisor
from envactors.backends import local
from envactors.backends.local import InlineLoop
from envactors.testing import EchoEnv

# What runs a step in process.
STEPPING = {"step", "write_rows", "prepare", "post", "run", "run_all", "begin", "gather", "arrive"}
OFTEN = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)


@pytest.fixture
def interrupt_once(monkeypatch):
    """Returns a function after which the next run of an in-line worker is interrupted before it begins."""
    due = []

    def interrupt(run):
        def interrupted(*args):
            if due:
                due.clear()
                raise KeyboardInterrupt
            run(*args)

        return interrupted

    monkeypatch.setattr(Supervisor, "_run_inline", interrupt(Supervisor._run_inline))
    monkeypatch.setattr(InlineLoop, "run", interrupt(InlineLoop.run))
    return lambda: due.append(True)


def test_recv_runs_a_step_that_an_interrupt_delayed(interrupt_once):
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.send([3], env_ids=[1])
        assert envs.recv(timeout=1).obs[:, 2].tolist() == [3]


def test_results_of_an_interrupted_step_are_not_taken_for_the_next_ones(interrupt_once):
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.step([3, 4])
        for env_id in (0, 1):
            with pytest.raises(ea.AlreadyPendingError):
                envs.step([5], env_ids=[env_id])
        batch = envs.recv(min_envs=2, timeout=1)
        assert dict(zip(batch.env_ids.tolist(), batch.obs[:, 2].tolist(), strict=True)) == {0: 3, 1: 4}
        assert envs.step([6], env_ids=[1])[0][:, 2].tolist() == [6]


class Recording(EchoEnv):
    """Writes down that it has stepped."""

    STEPS: ClassVar[list[object]] = []

    def step(self, action):
        self.STEPS.append(action)
        return super().step(action)


def test_looking_at_an_actor_runs_nothing(interrupt_once):
    """A debugger does so at any moment, and without being asked."""
    Recording.STEPS.clear()
    with ea.VectorEnv([Recording], backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.send([3])
        for actor in (envs[0], envs.actors[0]):
            assert actor.state is ea.ActorState.BUSY
            assert "busy" in repr(actor)
        assert not Recording.STEPS
        assert envs.recv(timeout=1).obs[:, 2].tolist() == [3]
        assert envs.actors[0].state is ea.ActorState.IDLE
        assert len(Recording.STEPS) == 1


def results_after(envs, where):
    """Returns the (count of steps, action) of each env in a step that comes after an interrupted one, and in that."""
    found = {env_id: [] for env_id in range(len(envs))}
    for _ in range(10):
        try:
            batch = envs.recv(timeout=1)
        except ea.NothingPendingError:
            break
        except ea.VectorStepError as error:
            batch = error.batch
        for env_id, obs in zip(batch.env_ids.tolist(), batch.obs, strict=True):
            found[env_id].append((int(obs[1]), int(obs[2])))
    assert not any(envs._core.slots.states), where
    for env_id, obs in enumerate(envs.step([9] * len(envs))[0]):
        found[env_id].append((int(obs[1]), int(obs[2])))
    return found


@pytest.mark.parametrize("per_actor", [1, 3])
def test_a_step_that_is_interrupted_is_made_once_or_not_at_all(per_actor):
    """Its result is delivered later, or the env has failed, or the interrupt came when the step was over."""
    with ea.VectorEnv([EchoEnv] * 3, backend="inline", envs_per_actor=per_actor, restart=OFTEN) as envs:
        for line in itertools.count():
            envs.reset(seed=0)
            envs.step([1] * 3)
            where = interrupt(lambda: envs.step([5] * 3), line)
            if where is None:
                break
            try:
                found = results_after(envs, where)
            except (ea.VectorStepError, ea.VectorInputError):
                # It was interrupted while rows were posted, or in the middle of one: their processes were replaced.
                assert where.startswith(("stepper", "inline", "local", "env_rows")), where
                continue
            for results in found.values():
                count = results[-1][0]
                assert results[-1] == (count, 9), where
                assert count in (2, 3), f"{where}: it has stepped {count - 2} times"
                assert results[:-1] in ([], [(2, 5)]), where
                assert len(results) < 2 or count == 3, where
        assert line > 60


@pytest.mark.parametrize("ask", ["step", "look"])
def test_what_a_signal_handler_asks_for_runs_no_env_twice(ask):
    with ea.VectorEnv([EchoEnv] * 3, backend="inline") as envs:
        steps = []

        def handle(signum, frame):
            try:
                steps.append(envs.step([7] * 3) if ask == "step" else envs.stats())
            except ea.AlreadyPendingError:
                assert ask == "step"

        before = signal.signal(signal.SIGALRM, handle)
        for line in itertools.count():
            envs.reset(seed=0)
            steps.clear()
            where = interrupt(lambda: steps.append(envs.step([5] * 3)), line, only=STEPPING, signum=signal.SIGALRM)
            if where is None:
                break
            assert steps[-1][0][:, 2].tolist() == [5] * 3, where
            made = sum(isinstance(one, tuple) for one in steps) if ask == "step" else 1
            assert envs.get_attr("steps") == [made] * 3, where
        signal.signal(signal.SIGALRM, before)
        assert line > 60


class Named(EchoEnv):
    def whoami(self):
        return ea.current_actor().name


@pytest.mark.parametrize("ask", ["call", "send", "step"])
def test_an_interrupt_leaves_no_worker_occupied_and_no_actor_current(ask):
    """Wherever it comes: another thread would wait forever for what the worker was asked."""

    def go_on():
        if ask == "call":
            envs.actors[1].whoami().result(0)
        elif ask == "send":
            envs.send([1], env_ids=[1])
        else:
            envs.step([1, 1])

    with ea.VectorEnv([Named] * 2, backend="inline", restart=OFTEN) as envs:
        envs.reset(seed=0)
        found = set()
        for number in [*range(8)] * 2:
            where = interrupted_at(go_on, number)
            found.add(where)
            assert ea.current_actor() is None, where
            results_of_rest(envs)
            assert [actor.whoami().result(1) for actor in envs.actors] == ["env-0", "env-1"], where
        assert len(found - {None}) >= 3


def interrupted_at(function, number):
    """Interrupts a function after one of the calls of C code by what runs in-line workers, as signals do.

    Returns:
        The line of the call; None if the function has ended before.
    """
    left, where = number, None

    def profile(frame, event, _arg):
        nonlocal left, where
        is_meant = frame.f_code.co_name in ("work", "run") and frame.f_code.co_filename == local.__file__
        if event == "c_return" and is_meant:
            left -= 1
            if left < 0:
                where = f"line {frame.f_lineno}"
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    except (KeyboardInterrupt, ea.ActorError, ea.VectorStepError):
        assert where is not None
    finally:
        sys.setprofile(None)
    return where


def results_of_rest(envs):
    """Receives what is pending, and resets what an interrupt has replaced."""
    while True:
        try:
            envs.recv(timeout=1)
        except ea.NothingPendingError:
            break
        except ea.VectorStepError:
            continue
    envs.reset(seed=0)


class Raising(EchoEnv):
    """Raises in its second step."""

    def step(self, action):
        if self.steps == 1:
            raise ValueError
        return super().step(action)


def make_policy():
    return lambda obs, context: (obs[:, 1], {})


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_a_rollout_ends_although_an_interrupt_keeps_a_failure_from_being_told(on_failure):
    """That of the envs which have lost their process, since a neighbor has raised."""
    for number in itertools.count():
        envs = ea.VectorEnv(
            [EchoEnv, Raising, EchoEnv], envs_per_actor=3, backend="inline", on_failure=on_failure, restart=OFTEN
        )
        with envs:
            envs.reset(seed=0)
            envs.set_policy(make_policy)
            where = interrupt(lambda: envs.rollout_async(4), number, only={"settle"})  # noqa: B023
            if where is None:
                break
            envs.rollout(2, timeout=5)
            envs.reset(seed=1, timeout=5)
            assert envs.step([1] * 3)[0][:, 1].tolist() == [1] * 3, where
    assert number > 10
