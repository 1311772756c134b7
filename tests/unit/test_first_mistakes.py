"""What a beginner writes by mistake is refused at the call, with a sentence that says how to write it."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from helpers import Counter, Echo

import envactors as ea
from envactors.options import as_timeout, deadline_after

NO_SECONDS = [math.nan, 10**400, "1", True, [1.0]]


class Takes:
    """Takes any action."""

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 1.0, False, False, {}


def spawned(**options):
    return ea.spawn(Counter, **{"backend": "inline", **options})


def vectored(**options):
    return ea.VectorEnv([Echo], **{"backend": "inline", **options})


def pooled(**options):
    return ea.ActorPool(Counter, 1, **{"backend": "inline", **options})


@pytest.mark.parametrize("make", [spawned, vectored, pooled])
def test_deadlines_that_are_not_seconds_are_rejected(make):
    for deadlines in (0, -1, None, {}, *NO_SECONDS):
        with pytest.raises(ValueError, match=r"^deadlines is .*expected Deadlines, or a number of seconds > 0, where"):
            make(deadlines=deadlines)


@pytest.mark.filterwarnings("ignore:.*deadlines are not enforced")
@pytest.mark.parametrize("make", [spawned, vectored, pooled])
def test_a_number_as_deadlines_is_accepted(make):
    for deadlines in (10, 10.0, 1e300, math.inf):
        make(deadlines=deadlines).close()


def test_env_fns_that_are_not_a_list_raise_with_an_example():
    examples = [
        ("CartPole-v1", "[lambda: gymnasium.make('CartPole-v1')] * 8, or call envactors.make_vec('CartPole-v1', 8)"),
        (
            "ale_py:ALE/Pong-v5",
            "[lambda: gymnasium.make('ale_py:ALE/Pong-v5')] * 8, or call envactors.make_vec('ale_py:ALE/Pong-v5', 8)",
        ),
        ("helpers:Echo", "['helpers:Echo'] * 8, or call envactors.make_vec('helpers:Echo', 8)"),
        (Echo, "[make] * 8"),
        (spawned, "[make] * 8"),
        (8, "[make] * 8"),
        (None, "[make] * 8"),
    ]
    for factories, example in examples:
        with pytest.raises(TypeError, match=r"^factories is .*: expected a list with one callable \(or str") as caught:
            ea.VectorEnv(factories)
        assert str(caught.value).endswith(f"write {example}")


def test_an_env_id_as_a_factory_is_rejected_with_the_way_to_write_it():
    for make in (lambda: ea.VectorEnv(["CartPole-v1"]), lambda: ea.spawn("CartPole-v1")):
        with pytest.raises(ValueError, match=r"write lambda: gymnasium\.make\('CartPole-v1'\)$"):
            make()


def test_env_vars_that_no_environment_can_have_are_rejected_at_the_call():
    mistakes = [
        ({"A\0B": "x"}, ValueError, "no NUL in the name or the value"),
        ({"A": "x\0"}, ValueError, "no NUL in the name or the value"),
        ({"A=B": "x"}, ValueError, "a name without '='"),
        ({"": "x"}, ValueError, "a name without '='"),
        ({"A": "\ud800"}, ValueError, "that the system can encode"),
        ({"A": 3}, TypeError, "expected strings"),
        ({3: "x"}, TypeError, "expected strings"),
        ("A=x", TypeError, "expected a mapping"),
        (3, TypeError, "expected a mapping"),
    ]
    for env_vars, kind, text in mistakes:
        for make in (ea.spawn, lambda factory, **options: ea.VectorEnv([factory], **options)):
            with pytest.raises(kind, match=rf"^env_vars .*{text}"):
                make(Echo, env_vars=env_vars)


def test_a_timeout_that_is_not_a_number_is_rejected_at_the_call():
    with spawned() as actor, vectored() as envs, pooled() as pool:
        envs.reset()
        future = actor.add()
        calls = {
            "options": lambda seconds: actor.options(deadline=seconds),
            "result": future.result,
            "exception": future.exception,
            "stacks": actor.stacks,
            "step": lambda seconds: envs.step([0], timeout=seconds),
            "reset": lambda seconds: envs.reset(timeout=seconds),
            "recv": lambda seconds: envs.recv(timeout=seconds),
            "close": envs.close,
            "close ": actor.close,
            "map": lambda seconds: pool.map("add", [1], seconds),
            "map_unordered": lambda seconds: pool.map_unordered("add", [1], seconds),
            "Deadlines": lambda seconds: ea.Deadlines(step=seconds),
            "RestartPolicy": lambda seconds: ea.RestartPolicy(window=seconds),
        }
        for seconds in NO_SECONDS:
            for name, call in calls.items():
                with pytest.raises(ValueError, match=rf"^{name.strip()}\(.*expected "):
                    call(seconds)
        assert future.result() == 1
        assert envs.step([0])[1] == [1.0]  # nothing of this has closed or stepped it


def test_infinite_and_negative_timeouts_are_accepted():
    with spawned() as actor, vectored() as envs:
        future = actor.add()
        assert [future.result(timeout) for timeout in (math.inf, 1e300, 0, -1)] == [1] * 4
        envs.reset(timeout=math.inf)
        envs.step([0], timeout=1e300)


@pytest.mark.parametrize("seconds", [np.float16(0.25), np.float32(0.25), np.float64(0.25), np.int8(1), Fraction(1, 4)])
def test_a_timeout_becomes_a_number_of_python(seconds):
    """The sum of a clock and a narrow number is as narrow: off by seconds, and refused by system calls."""
    assert isinstance(as_timeout(seconds, "result(timeout=...)"), (int, float))
    assert isinstance(deadline_after(seconds, "step(timeout=...)"), float)
    for value in vars(ea.Deadlines(*[seconds] * 7)).values():
        assert isinstance(value, (int, float))
        assert value == seconds


def test_timeouts_and_deadlines_may_be_numbers_of_numpy():
    with ea.spawn(Counter, backend="thread", deadlines=ea.Deadlines(slow=np.float32(0.01))) as actor:
        future = actor.sleep(0.1)
        with pytest.raises(TimeoutError):
            future.result(np.float32(0.01))
        assert future.result(np.float16(10)) == 0.1
    with ea.VectorEnv([Echo], backend="thread") as envs:
        envs.reset(timeout=np.float32(10))
        assert envs.step([0], timeout=np.float16(10))[1] == [1.0]
        envs.close(np.float32(10))


def test_an_option_of_another_class_is_rejected_at_the_call():
    for make in (spawned, vectored, pooled):
        with pytest.raises(TypeError, match=r"^restart is 3: expected RestartPolicy"):
            make(restart=3)
        for backend in (None, 3, [], ea.ThreadBackend):
            with pytest.raises(ValueError, match=r"^backend .*expected one of \('process', .*, or a backend"):
                make(backend=backend)
    with pytest.raises(TypeError, match=r"^name is 3: expected str"):
        spawned(name=3)
    with pytest.raises(TypeError, match=r"^recycle is 3: expected RecyclePolicy"):
        ea.Executor(1, recycle=3)
    for option, kind in (("recycle", "RecyclePolicy"), ("snapshot", "SnapshotPolicy")):
        with pytest.raises(ea.VectorInputError, match=rf"^{option} is 3: expected a {kind}, or None"):
            vectored(**{option: 3})
    for modules in ("numpy", [3], 3):
        with pytest.raises(TypeError, match=r"^preload is .*expected a list of names of modules"):
            ea.ProcessBackend(preload=modules)


def test_stacks_need_a_limit():
    with spawned() as actor, pytest.raises(ValueError, match=r"stacks\(timeout=...\) is None: expected seconds >= 0"):
        actor.stacks(None)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_options_and_actions_that_cannot_be_copied_are_rejected_at_the_call(backend):
    unpicklable = {"lock": threading.Lock()}
    with ea.VectorEnv([Echo], backend=backend) as envs:
        with pytest.raises(ea.SerializationError, match=r"^the arguments of reset for actor 'env-0'"):
            envs.reset(options=unpicklable)
        envs.reset()
    with ea.VectorEnv([Takes], backend=backend) as envs:
        envs.reset()
        with pytest.raises(ea.SerializationError, match=r"^the arguments of step for actor 'env-0'"):
            envs.step([unpicklable])
        assert envs.step([{"a": 1}])[1] == [1.0]


def test_counts_may_be_ints_of_numpy():
    with ea.ActorPool(Counter, np.int64(2), backend="inline") as pool:
        assert len(pool) == 2
    assert ea.RecyclePolicy(max_steps=np.int32(3)).max_steps == 3
    for value in (np.True_, True, np.float64(3.0), np.int64(0)):
        with pytest.raises(ValueError, match="expected an int > 0"):
            ea.RecyclePolicy(max_steps=value)
