"""Code of an env that waits for its own vector: an error where that would never end; all else is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.testing import EchoEnv

SOON = 30


class Shared:
    """What an env runs in its next step or call. Factories are pickled by reference."""

    asks = staticmethod(lambda: None)


def ask_once():
    asks, Shared.asks = Shared.asks, staticmethod(lambda: None)
    return asks()


class Asking(EchoEnv):
    """Runs a function in its next step or call."""

    def step(self, action):
        ask_once()
        return super().step(action)

    def ask(self):
        return ask_once()

    def count(self):
        return self.steps


def value_or_error(run):
    """Run a function; return its value, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def outcome_of(run):
    """Run a function in another thread; return its value, or the error that it raises."""
    outcome = Future()
    threading.Thread(target=lambda: outcome.set_result(value_or_error(run)), daemon=True).start()
    return outcome.result(SOON)


@pytest.fixture(params=["inline", "thread"])
def backend(request):
    return request.param


@pytest.fixture
def envs(backend):
    Shared.asks = staticmethod(lambda: None)
    with ea.VectorEnv([Asking] * 4, envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=0)
        yield envs


futures = []


def noted(future):
    futures.append(future)
    return future


# What the code of env 0 waits for, without a limit, and what is left to be received.
ENDLESS = {
    "step": (lambda envs: envs.step([1], env_ids=[1]), []),
    "reset": (lambda envs: envs.reset(env_ids=[1]), []),
    "recv": (lambda envs: (envs.send([1, 1], env_ids=[1, 2]), envs.recv()), [1, 2]),
    "recv of two": (lambda envs: (envs.send([1, 1], env_ids=[1, 2]), envs.recv(min_envs=3)), [1, 2]),
    "submit": (lambda envs: noted(envs.submit([1], env_ids=[1])[0]).result(), []),
    "call": (lambda envs: envs[1].call("count").result(), []),
    "call of itself": (lambda envs: envs[0].call("count").exception(), []),
    "renewal": (lambda envs: envs.actors[0].renew().result(), []),
}
RUNS = {
    "step": lambda envs: envs.step([1], env_ids=[0]),
    "call": lambda envs: envs[0].call("ask").result(),
}


@pytest.mark.parametrize("within", RUNS)
@pytest.mark.parametrize("ask", ENDLESS)
def test_waiting_for_what_can_only_run_afterwards_is_an_error(envs, backend, within, ask):
    wait, left = ENDLESS[ask]
    futures.clear()
    Shared.asks = staticmethod(lambda: wait(envs))
    error = outcome_of(lambda: RUNS[within](envs))
    error = error.failures[0] if within == "step" else error
    assert isinstance(error, RuntimeError)
    assert str(error) == (
        "code of an env of actor 'envs-0-1' waits for a request of the same actor, which can only run after that "
        "code: call the other env directly, or wait outside of the envs"
    )
    if left and backend == "thread":  # in-process, nothing was sent
        assert sorted(envs.recv(timeout=SOON).env_ids) == left
    for future in futures:
        future.exception(SOON)
    envs.reset(seed=1, timeout=SOON)
    assert envs.step([1] * 4, timeout=SOON)[0][:, 1].tolist() == [1] * 4


def test_waiting_in_a_step_of_all_envs_is_an_error(envs):
    Shared.asks = staticmethod(VectorAccess(envs).finish_step)
    error = outcome_of(lambda: envs.step([1] * 4))
    # In-process, the step has no result yet that could be waited for.
    assert isinstance(next(iter(error.failures.values())), RuntimeError | ea.NothingPendingError)
    assert len(error.batch.env_ids) == 3


@pytest.mark.parametrize("within", RUNS)
@pytest.mark.parametrize(
    "ask",
    [
        lambda envs: envs.step([1], env_ids=[2])[0][0],
        lambda envs: envs.reset(env_ids=[2])[0][0],
        lambda envs: (envs.send([1], env_ids=[2]), envs.recv(min_envs=1))[1].obs[0],
        lambda envs: envs.submit([1], env_ids=[2])[0].result().obs,
        lambda envs: envs[2].get("observation_space").result().sample(),
    ],
    ids=["step", "reset", "recv", "submit", "get"],
)
def test_an_env_may_wait_for_one_of_another_actor(envs, within, ask):
    results = []
    Shared.asks = staticmethod(lambda: results.append(ask(envs)))
    error = outcome_of(lambda: RUNS[within](envs))
    assert not isinstance(error, Exception), error
    assert results[0].shape == (4,)


class Gated(EchoEnv):
    """Steps once a gate is open."""

    gate = threading.Event()

    def step(self, action):
        assert self.gate.wait(SOON)
        return super().step(action)


def test_an_env_may_wait_for_one_that_another_thread_runs():
    """As long as that takes, and also while results of others are there, but not enough."""
    received = Future()
    Gated.gate.clear()
    with ea.VectorEnv([Asking, EchoEnv, Gated], backend="thread") as envs:
        envs.reset(seed=0)
        envs.send([1, 1], env_ids=[1, 2])

        def receive():
            Gated.gate.set()
            received.set_result(envs.recv(min_envs=2).env_ids.tolist())

        Shared.asks = staticmethod(receive)
        envs.send([1], env_ids=[0])
        assert sorted(received.result(SOON)) == [1, 2]
        assert envs.recv(timeout=SOON).env_ids.tolist() == [0]


def test_an_env_may_wait_for_a_result_that_its_own_actor_has_completed():
    """Env 0 has stepped just before, in the same request, and nobody has looked since."""
    futures, results = Future(), []
    with ea.VectorEnv([EchoEnv, Asking], envs_per_actor=2, backend="thread") as envs:
        envs.reset(seed=0)
        Shared.asks = staticmethod(lambda: results.append(futures.result(SOON)[0].result().reward))
        futures.set_result(envs.submit([1, 1]))
        assert futures.result()[1].result(SOON).reward == 1.0
    assert results == [1.0]


@pytest.mark.parametrize(
    ("ask", "refusal"),
    [
        (lambda envs: envs.reset(env_ids=[0]), ea.AlreadyPendingError),
        (lambda envs: envs.reset(), RuntimeError),
        (lambda envs: VectorAccess(envs).discard([0]), ea.AlreadyPendingError),
        (lambda envs: envs.recv(), ea.NothingPendingError),
        (lambda envs: envs.recv(min_envs=0), ea.NothingPendingError),
    ],
    ids=["reset", "reset of all", "discard", "recv", "recv of none"],
)
@pytest.mark.parametrize("send", [False, True])
def test_a_refused_request_within_a_step_leaves_the_results_of_that_step(ask, refusal, send):
    """`reset` used to drop the result of env 0 before it was refused, and `recv` to take it."""
    with ea.VectorEnv([EchoEnv, Asking], backend="inline") as envs:
        envs.reset(seed=0)
        errors = []
        Shared.asks = staticmethod(lambda: errors.append(value_or_error(lambda: ask(envs))))
        if send:
            envs.send([1, 1])
            assert envs.recv().env_ids.tolist() == [0, 1]
        else:
            assert envs.step([1, 1])[0][:, 1].tolist() == [1, 1]
        assert [type(error) for error in errors] == [refusal]
        assert envs.step([1, 1])[0][:, 1].tolist() == [2, 2]


def test_recv_within_a_step_returns_only_what_was_sent_there():
    with ea.VectorEnv([EchoEnv, Asking, EchoEnv], backend="inline") as envs:
        envs.reset(seed=0)
        received = []
        Shared.asks = staticmethod(lambda: (envs.send([1], env_ids=[2]), received.extend(envs.recv().env_ids)))
        envs.step([1, 1], env_ids=[0, 1])
        assert received == [2]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_vector_that_an_in_process_env_may_not_close_stays_open(envs_per_actor):
    with ea.VectorEnv([Asking] * 4, envs_per_actor=envs_per_actor, backend="inline") as envs:
        envs.reset(seed=0)
        Shared.asks = staticmethod(envs.close)
        assert isinstance(value_or_error(envs[3].call("ask").result), RuntimeError)
        assert envs.step([1] * 4)[0][:, 1].tolist() == [1] * 4


def test_a_pool_that_an_in_process_actor_may_not_close_stays_open():
    with ea.ActorPool(Asking, 2, backend="inline") as pool:
        Shared.asks = staticmethod(pool.close)
        assert isinstance(value_or_error(pool.submit("ask").result), RuntimeError)
        assert pool.submit("echo", 1).result() == 1


def test_an_in_process_env_cannot_close_its_own_actor():
    with ea.VectorEnv([Asking] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        Shared.asks = staticmethod(envs.actors[0].close)
        error = value_or_error(envs[0].call("ask").result)
        assert isinstance(error, RuntimeError)
        assert "which can only run after that code" in str(error)
        assert envs.step([1, 1])[0][:, 1].tolist() == [1, 1]
