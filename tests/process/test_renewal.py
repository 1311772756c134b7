"""`on_failure="renew"`: a failed env continues in a new process (promises `fresh` and `told`)."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, MuteError, promised, wait_until

import envactors as ea
from envactors.testing import EchoEnv, FaultyEnv, expected_checksum

FAST = ea.RestartPolicy(max_restarts=50, backoff=0.0)
DEADLINES = ea.Deadlines(step=1.0, reset=1.0)
KINDS = {
    "crash": ea.ActorDiedError,
    "exit": ea.ActorDiedError,
    "hang_in_c": ea.ActorTimeoutError,
    "raise": RuntimeError,
    "unpicklable": ea.SerializationError,
}


def make(count=3, **options):
    length = options.pop("length", 1000)
    options = {"on_failure": "renew", "restart": FAST, "deadlines": DEADLINES, "backend": FORK_SERVER, **options}
    return ea.VectorEnv([lambda i=i: FaultyEnv(EchoEnv(i, length)) for i in range(count)], **options)


def derived(root, incarnation):
    return int(np.random.SeedSequence(root, spawn_key=(incarnation,)).generate_state(1)[0])


@pytest.mark.parametrize("fault", KINDS)
def test_a_failure_in_a_step_under_next_step(fault):
    with make() as envs:
        envs.reset(seed=10)
        envs.step([1, 2, 3])
        envs[1].arm(fault).result(SOON)
        obs, rewards, terminated, truncated, infos = envs.step([4, 5, 6])
        assert obs[:, :3].tolist() == [[0, 2, 4], [1, 1, 2], [2, 2, 6]], "the last complete observation"
        assert rewards.tolist() == [4.0, 0.0, 6.0]
        assert truncated.tolist() == [False, True, False]
        assert not terminated.any()
        assert isinstance(infos[1]["failure"], KINDS[fault])
        assert ["failure" in info for info in infos] == [False, True, False]
        envs.send([7, 8, 9])
        batch = envs.recv()
        row = batch.env_ids.tolist().index(1)
        assert batch.obs[row, :3].tolist() == [1, 0, -1], "the next step waits for the new process and resets"
        assert (batch.rewards[row], batch.truncated[row]) == (0.0, False)
        assert batch.incarnations[row] == 1
        assert batch.infos[row] == {"seed": derived(11, 1), "options": None}
        obs, *_ = envs.step([1, 2, 3])
        assert obs[1].tolist() == [1, 1, 2, expected_checksum(derived(11, 1), [2])]
        assert obs[0, 1] == 4


@pytest.mark.parametrize("fault", KINDS)
def test_a_failure_in_a_step_under_same_step(fault):
    with make(autoreset="same_step") as envs:
        envs.reset(seed=10)
        envs.step([1, 2, 3])
        envs[1].arm(fault).result(SOON)
        envs.send([4, 5, 6])
        batch = envs.recv()
        row = batch.env_ids.tolist().index(1)
        info = batch.infos[row]
        assert batch.obs[row, :3].tolist() == [1, 0, -1], "the result comes after the new reset"
        assert (batch.rewards[row], batch.truncated[row], batch.incarnations[row]) == (0.0, True, 1)
        assert isinstance(info["failure"], KINDS[fault])
        assert info["final_obs"][:3].tolist() == [1, 1, 2], "the last observation"
        assert info["seed"] == derived(11, 1)
        assert envs.step([1, 2, 3])[0][1].tolist() == [1, 1, 2, expected_checksum(derived(11, 1), [2])]


class StuckError(Exception):
    def __reduce__(self):
        raise ValueError("no reduction")


@pytest.mark.parametrize(("kind", "arrives_as"), [(MuteError, MuteError), (StuckError, ea.SerializationError)])
def test_an_exception_whose_methods_raise_is_told_of(kind, arrives_as):
    class Hostile(EchoEnv):
        def step(self, action):
            if action == 7:
                raise kind
            return super().step(action)

    with ea.VectorEnv([Hostile] * 2, on_failure="renew", restart=FAST, backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        *_, truncated, infos = envs.step([1, 7])
        assert truncated.tolist() == [False, True]
        assert type(infos[1]["failure"]) is arrives_as
        envs.step([1, 1])
        assert envs.last_batch().incarnations.tolist() == [0, 1]


def test_disabled_autoreset_waits_for_a_reset_by_hand():
    with make(autoreset="disabled") as envs:
        envs.reset(seed=0)
        envs[1].arm("crash").result(SOON)
        assert envs.step([1, 2, 3])[3].tolist() == [False, True, False]
        with pytest.raises(ea.VectorEnvError, match="needs a reset"):
            envs.step([1, 2, 3])
        envs.reset(env_ids=[1])
        assert envs.step([1, 2, 3])[0][:, 1].tolist() == [2, 1, 2]


@pytest.mark.parametrize("fault", ["crash", "hang_in_c", "raise"])
def test_a_failure_in_a_reset_is_done_again_on_the_new_process(fault):
    for envs_per_actor in (1, 3):
        with make(envs_per_actor=envs_per_actor) as envs:
            envs[1].arm(fault, "reset").result(SOON)  # in the first step there is no last observation yet
            obs, infos = envs.reset(seed=20)
            assert obs[1, :3].tolist() == [1, 0, -1]
            assert type(infos[1]["failure"]).__name__ in ("ActorDiedError", "ActorTimeoutError", "RuntimeError")
            assert infos[1]["seed"] == 21
            assert envs.step([1, 2, 3])[0][1, :3].tolist() == [1, 1, 2]
            envs[1].arm(fault, "reset").result(SOON)
            assert "failure" in envs.reset(env_ids=[1])[1][0]


def test_a_failed_reset_is_repeated_once_with_the_same_arguments():
    class Picky(EchoEnv):
        def reset(self, *, seed=None, options=None):
            if ea.current_actor().incarnation < self.bad_until or seed == 66:
                raise LookupError("no such level")
            return super().reset(seed=seed, options=options)

        bad_until = 1

    with ea.VectorEnv([Picky], on_failure="renew", restart=FAST) as envs:
        _, infos = envs.reset(seed=7, options={"level": 3})
        assert (infos[0]["seed"], infos[0]["options"]) == (7, {"level": 3})
        assert isinstance(infos[0]["failure"], LookupError)
        incarnation = envs[0].incarnation
        _, infos = envs.reset(seed=66, options={"level": 4})
        assert infos[0]["seed"] == derived(66, incarnation + 2)
        assert infos[0]["options"] == {"level": 4}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("fault", ["crash", "hang_in_c", "raise"])
def test_a_failure_in_an_autoreset(autoreset, fault):
    with make(length=2, autoreset=autoreset) as envs:
        envs.reset(seed=0)
        envs.step([1] * 3)
        envs[1].arm(fault, "reset").result(SOON)
        seen = [envs.step([2] * 3) for _ in range(4)]
        failures = [turn for turn, (*_, infos) in enumerate(seen) if "failure" in infos[1]]
        assert failures == [1 if autoreset == "next_step" else 0]
        obs, rewards, terminated, truncated, infos = seen[failures[0]]
        assert (rewards[1], terminated[1], truncated[1]) == (0.0, False, True)
        if autoreset == "next_step":
            assert obs[1, :3].tolist() == [1, 2, 2], "the last of the finished episode"
            assert seen[2][0][1, :3].tolist() == [1, 0, -1]
        else:
            assert obs[1, :3].tolist() == [1, 0, -1]
            assert infos[1]["final_obs"][1] == 1
        assert not any("failure" in infos[i] for *_, infos in seen for i in (0, 2))


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_crash_while_idle_is_reported_by_the_next_step_whose_action_is_not_executed(autoreset):
    for noticed in (True, False):
        with make(autoreset=autoreset) as envs:
            envs.reset(seed=0)
            envs.step([1] * 3)
            os.kill(envs[1].pid, signal.SIGKILL)
            if noticed:
                wait_until(lambda: envs[1].incarnation == 1)
            obs, rewards, _, truncated, infos = envs.step([5] * 3)
            assert isinstance(infos[1]["failure"], ea.ActorDiedError)
            assert (rewards[1], truncated[1]) == (0.0, True)
            if autoreset == "next_step":
                assert obs[1, :3].tolist() == [1, 1, 1]
                obs = envs.step([6] * 3)[0]
            assert obs[1, :3].tolist() == [1, 0, -1]
            assert envs.step([7] * 3)[0][1, :3].tolist() == [1, 1, 7]


def test_a_crash_between_sending_and_receiving():
    with make() as envs:
        envs.reset(seed=0)
        envs.send([1] * 3)
        # The actor takes its calls in order: the step is done.
        assert envs[1].get("steps").result(SOON) == 1
        os.kill(envs[1].pid, signal.SIGKILL)
        batch = envs.recv()
        assert sorted(batch.obs[:, 2].tolist()) == [1, 1, 1], "results that had come are handed out"
        infos = envs.step([2] * 3)[4]
        assert [type(info.get("failure")) for info in infos] == [type(None), ea.ActorDiedError, type(None)]


def test_a_failure_through_submit():
    with make() as envs:
        envs.reset(seed=0)
        envs.step([1] * 3)
        envs[2].arm("crash").result(SOON)
        futures = envs.submit([2] * 3)
        ea.wait(futures, SOON)
        step = futures[2].result()
        assert (step.obs[:3].tolist(), step.reward, step.truncated) == ([2, 1, 1], 0.0, True)
        assert isinstance(step.info["failure"], ea.ActorDiedError)
        assert [future.result(SOON).obs[1] for future in envs.submit([3] * 3)] == [3, 3, 0]


class FailsTwice(EchoEnv):
    """Its first process fails in a step, the second in the reset that follows."""

    def step(self, action):
        if ea.current_actor().incarnation == 0:
            raise RuntimeError("the step has failed")
        return super().step(action)

    def reset(self, **given):
        if ea.current_actor().incarnation == 1:
            raise RuntimeError("the reset has failed")
        return super().reset(**given)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "looks later"])
def test_a_future_whose_env_fails_again_in_its_next_process(waits):
    options = {"on_failure": "renew", "autoreset": "same_step", "restart": FAST, "deadlines": DEADLINES}
    with ea.VectorEnv([FailsTwice], backend=FORK_SERVER, **options) as envs:
        envs.reset(seed=1)
        (future,) = envs.submit([5])
        if not waits:
            wait_until(future.done)
        assert future.result(SOON).info["failure"].args == ("the reset has failed",), "the last failure"
        assert envs.actors[0].incarnation == 2


class EndsTwice(EchoEnv):
    """Its first process ends in a step, the second in the reset that follows."""

    def step(self, action):
        if ea.current_actor().incarnation == 0:
            os._exit(1)
        return super().step(action)

    def reset(self, **given):
        if ea.current_actor().incarnation == 1:
            os._exit(1)
        return super().reset(**given)


def test_what_has_run_cannot_be_cancelled_while_its_env_waits_for_another_process():
    restart = ea.RestartPolicy(max_restarts=50, backoff=1.0)
    with ea.VectorEnv(
        [EndsTwice], backend=FORK_SERVER, on_failure="renew", autoreset="same_step", restart=restart
    ) as envs:
        envs.reset(seed=1)
        (future,) = envs.submit([5])
        wait_until(lambda: getattr(envs.actors[0].stats().last_failure, "incarnation", None) == 1)
        wait_until(lambda: envs.actors[0].stats().queued == 1)
        assert not future.cancel()
        assert isinstance(future.result(SOON).info["failure"], ea.ActorDiedError)


def test_a_future_whose_env_fails_while_the_vector_closes():
    with make(1, autoreset="same_step") as envs:
        envs.reset(seed=1)
        envs[0].arm("raise").result(SOON)
        (future,) = envs.submit([5])
        envs.close()
        assert isinstance(future.exception(SOON), (ea.ActorClosedError, RuntimeError))


def test_failures_come_at_once_while_the_others_continue():
    class SlowToBuild(FaultyEnv):
        def __init__(self, index, mark):
            if index == 1 and os.path.exists(mark):  # noqa: PTH110
                time.sleep(1.5)
            super().__init__(EchoEnv(index))

    mark = f"/tmp/envactors-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        with ea.VectorEnv(
            [lambda i=i: SlowToBuild(i, mark) for i in range(3)], on_failure="renew", restart=FAST
        ) as envs:
            envs.reset(seed=0)
            envs.step([0] * 3)
            open(mark, "w").close()  # noqa: PTH123
            envs[1].arm("crash").result(SOON)
            begun = time.monotonic()
            assert envs.step([1] * 3)[3].tolist() == [False, True, False]
            assert time.monotonic() - begun < promised(1.0), "the failure's result does not wait for the new process"
            envs.send([2] * 3)
            for turn in range(20):
                batch = envs.recv(min_envs=2)
                assert 1 not in batch.env_ids
                envs.send([turn] * 2, env_ids=batch.env_ids)
            assert time.monotonic() - begun < promised(1.4)
            while 1 not in (batch := envs.recv(min_envs=1)).env_ids:
                pass
            assert time.monotonic() - begun > 1.2
    finally:
        if os.path.exists(mark):  # noqa: PTH110
            os.unlink(mark)  # noqa: PTH108


@pytest.mark.parametrize("fault", ["crash", "hang_in_c", "raise"])
def test_with_three_envs_per_actor_errors_name_the_env_that_failed(fault):
    for on_failure in ("renew", "raise"):
        with make(4, envs_per_actor=3, on_failure=on_failure) as envs:
            envs.reset(seed=0)
            envs.step([1] * 4)
            envs[1].arm(fault).result(SOON)
            if on_failure == "renew":
                *_, infos = envs.step([2] * 4)
                failures = {i: info["failure"] for i, info in enumerate(infos) if "failure" in info}
            else:
                with pytest.raises(ea.VectorStepError) as caught:
                    envs.step([2] * 4)
                failures = caught.value.failures
            assert isinstance(failures[1], KINDS[fault])
            if fault == "raise" and on_failure == "raise":
                assert failures.keys() == {1}, "nothing died"
                continue
            # Env 0 had done its step; it reports its loss with the next one. Env 2 was waiting behind env 1, and an
            # exception in shared memory has not kept it from doing its own step.
            done = {0, 2} if fault == "raise" and envs._engine is not None else {0}
            assert failures.keys() == {1, 2} - done
            obs, *_, infos = envs.step([3] * 4) if on_failure == "renew" else (None, [{}] * 4)
            failures |= {i: info["failure"] for i, info in enumerate(infos) if "failure" in info}
            assert isinstance(failures[2], ea.ActorDiedError)
            assert failures[2].index == 2
            assert "step of env 1" in str(failures[2]) or "while idle" in str(failures[2])
            if on_failure == "renew":
                assert failures.keys() == {0, 1, 2}
                assert obs[:, 1].tolist() == [2, 0, 2 if 2 in done else 0, 3]
                obs, *_, infos = envs.step([4] * 4)
                assert obs[:, 1].tolist() == [0, 1, 0 if 2 in done else 1, 4]
                assert not any("failure" in info for info in infos)


def test_deadlines_are_each_envs_own_with_three_envs_an_actor():
    class Slow(EchoEnv):
        def step(self, action):
            time.sleep(0.4)
            return super().step(action)

    with ea.VectorEnv([lambda i=i: Slow(i) for i in range(3)], envs_per_actor=3, deadlines=DEADLINES) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            assert envs.step([1] * 3)[1].tolist() == [1.0] * 3, "1.2 s for all, 0.4 s for each, 1 s allowed"


def test_handles_of_packed_envs_refuse_calls_that_concern_the_process():
    with make(4, envs_per_actor=2) as envs:
        envs.reset(seed=0)
        assert len(envs.actors) == 2
        assert [envs[i].get("env_id").result(SOON) for i in range(4)] == [0, 1, 2, 3]
        assert envs[2].pid == envs.actors[1].pid != envs[0].pid
        for refused in (
            envs[1].renew,
            envs[1].kill,
            lambda: envs[1].kill(restart=True),
            envs[1].close,
            lambda: envs[1].step(1),
            lambda: envs[1].call("reset"),
            lambda: envs[1].options(deadline=1.0).step(1),
        ):
            with pytest.raises(ea.VectorEnvError, match="use envs"):
                refused()
        envs.actors[0].renew().result(SOON)
        *_, infos = envs.step([1] * 4)
        assert ["failure" in info for info in infos] == [True, True, False, False]


def test_the_allowance_is_respected_and_its_end_is_raised():
    with make(2, restart=ea.RestartPolicy(max_restarts=2, backoff=0.0)) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs[0].arm("crash").result(SOON)
            assert "failure" in envs.step([1, 1])[4][0]
            envs.step([2, 2])
        envs[0].arm("raise").result(SOON)
        assert "failure" in envs.step([1, 1])[4][0]
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([2, 2])
        error = caught.value.failures[0]
        assert isinstance(error, ea.RestartsExhaustedError)
        assert len(error.causes) == 3
        assert isinstance(error.causes[2].__cause__, RuntimeError)
        assert caught.value.batch.env_ids.tolist() == [1]


def test_backoff_is_respected():
    with make(1, restart=ea.RestartPolicy(max_restarts=5, backoff=0.5)) as envs:
        envs.reset(seed=0)
        envs[0].arm("crash").result(SOON)
        begun = time.monotonic()
        envs.step([1])
        assert time.monotonic() - begun < promised(0.5)
        envs.step([1])
        assert 0.5 <= time.monotonic() - begun < promised(2.0)


def test_seeds_of_renewed_envs_are_distinct_and_reproducible():
    runs = []
    for _ in range(2):
        with make(2, deadlines=ea.Deadlines()) as envs:
            envs.reset(seed=100)
            seeds = []
            for _ in range(3):
                for i in range(2):
                    envs[i].arm("exit").result(SOON)
                envs.step([1, 1])
                seeds += [info["seed"] for info in envs.step([1, 1])[4]]
            runs.append(seeds)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6
    assert runs[0] == [derived(100 + i, k) for k in (1, 2, 3) for i in (0, 1)]


def test_a_denied_restart_does_not_count_as_a_restart():
    """The supervisor counts the loss that was refused: after a renewal it bars a restart the window has room for."""

    class Env:
        def die(self):
            import os

            os._exit(1)

        def ok(self):
            return 1

    window = 3.0
    with ea.spawn(Env, restart=ea.RestartPolicy(max_restarts=1, window=window, backoff=0.0)) as actor:
        actor.ok().result()
        begin = time.monotonic()
        actor.die().exception()  # granted
        actor.ok().result()
        time.sleep(max(0.0, begin + 2.0 - time.monotonic()))
        actor.die().exception()  # refused: two within the window
        assert actor.ok().exception() is not None
        actor.renew().result()
        time.sleep(max(0.0, begin + window + 0.3 - time.monotonic()))
        actor.die().exception()  # the only restart granted is older than the window
        assert actor.ok().result() == 1


class ObjectEcho(EchoEnv):
    """Has observations of a kind that only objects can hold, of which the vector keeps copies."""

    observation_space = None

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return {"at": str(obs)}, info

    def step(self, action):
        obs, *rest = super().step(action)
        return {"at": str(obs)}, *rest


def constant_policy():
    return lambda obs, context: np.zeros(len(obs), np.int64)


@pytest.mark.parametrize("kind", [EchoEnv, ObjectEcho])
def test_the_last_batch_says_which_process_returned_each_result(kind):
    with ea.VectorEnv([kind] * 3, on_failure="replay", backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        assert envs.last_batch().incarnations.tolist() == [0, 0, 0]
        os.kill(envs.actors[1].pid, signal.SIGKILL)
        wait_until(lambda: envs.actors[1].incarnation == 1)
        assert envs.last_batch().incarnations.tolist() == [0, 0, 0]
        envs.step([1, 1, 1])
        assert envs.last_batch().incarnations.tolist() == [0, 1, 0]
        os.kill(envs.actors[2].pid, signal.SIGKILL)
        envs.send([1, 1], env_ids=[0, 2])
        batch = envs.recv(min_envs=2, timeout=SOON)
        assert dict(zip(batch.env_ids.tolist(), batch.incarnations.tolist(), strict=True)) == {0: 0, 2: 1}
        assert envs.last_batch().incarnations.tolist() == [0, 1, 1]
        if kind is ObjectEcho:  # without a space, it takes no part in rollouts
            return
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        envs.set_policy(constant_policy)
        envs.rollout(2)
        assert envs.last_batch().incarnations.tolist() == [1, 1, 1]
