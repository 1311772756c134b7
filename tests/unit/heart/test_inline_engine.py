"""In-process vectors, several envs per actor: no process is started."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from interrupting import interrupt

import envactors as ea
from envactors.integrations.access import VectorAccess

ALWAYS = ea.RestartPolicy(max_restarts=100, backoff=0)


class Env:
    """Counts its steps; fails at an action, and in its factory from some incarnation on."""

    observation_space = gymnasium.spaces.Box(-9, 99, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self, fails_at=-1, most_incarnations=99):
        if ea.current_actor().incarnation >= most_incarnations:
            raise OSError("no more")
        self.fails_at = fails_at
        self.steps = None

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1), {"seed": seed}

    def step(self, action):
        if action == self.fails_at:
            raise ValueError("failed")
        self.steps += 1  # raises unless it was reset
        return np.full(1, float(self.steps)), 1.0, False, self.steps >= 6, {}


def make(*factories, on_failure="renew", backend="inline", **options):
    options.setdefault("envs_per_actor", len(factories))
    return ea.VectorEnv(factories, on_failure=on_failure, backend=backend, restart=ALWAYS, **options)


def step(envs, *actions):
    obs, _, _, truncated, infos = envs.step(list(actions))
    return obs[:, 0].tolist(), truncated.tolist(), ["failure" in info for info in infos]


def test_neighbors_of_an_env_that_raised_finish_their_step_and_lose_their_episodes_in_the_next():
    with make(functools.partial(Env, 3), Env, Env) as envs:
        envs.reset(seed=0)
        step(envs, 1, 1, 1)
        assert step(envs, 3, 1, 1) == ([1, 2, 2], [True, False, False], [True, False, False])
        assert step(envs, 1, 1, 1) == ([0, 2, 2], [False, True, True], [False, True, True])
        assert step(envs, 1, 1, 1) == ([1, 0, 0], [False] * 3, [False] * 3)


def test_two_envs_that_raise_in_one_step_are_replaced_once():
    with make(functools.partial(Env, 3), functools.partial(Env, 3), autoreset="same_step") as envs:
        envs.reset(seed=0)
        assert step(envs, 3, 3) == ([0, 0], [True, True], [True, True])
        assert envs.actors[0].incarnation == 1


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
@pytest.mark.parametrize("end", [lambda actor: actor.renew().result(), lambda actor: actor.kill(restart=True)])
def test_a_step_after_the_user_has_replaced_the_envs_says_that_the_episode_is_lost(end, on_failure):
    with make(Env, Env, on_failure=on_failure) as envs:
        envs.reset(seed=0)
        step(envs, 1, 1)
        end(envs.actors[0])
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as raised:
                envs.step([1, 1])
            assert {type(error) for error in raised.value.failures.values()} == {ea.ActorDiedError}
            envs.reset()
        else:
            assert step(envs, 1, 1) == ([1, 1], [True, True], [True, True])
            assert step(envs, 1, 1)[0] == [0, 0]
        assert step(envs, 1, 1)[0] == [1, 1]
        envs.send([1, 1])
        assert envs.recv().incarnations.tolist() == [1, 1]


def test_a_step_of_a_closed_actor_is_refused_before_any_env_runs():
    with make(Env, Env, envs_per_actor=1) as envs:
        envs.reset(seed=0)
        envs.actors[1].kill()
        with pytest.raises(ea.ActorClosedError):
            envs.step([1, 1])
        assert envs.step([1], env_ids=[0])[0].tolist() == [[1]]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_an_env_that_cannot_be_made_again_fails_alone(envs_per_actor):
    first = functools.partial(Env, 3, most_incarnations=1)
    with make(first, Env, functools.partial(Env, 5), Env, envs_per_actor=envs_per_actor) as envs:
        envs.reset(seed=0)
        assert step(envs, 3, 1, 1, 1) == ([0, 1, 1, 1], [True] + [False] * 3, [True] + [False] * 3)
        gone = list(range(envs_per_actor))
        for action in (1, 2):
            with pytest.raises(ea.VectorStepError) as raised:
                envs.step([action] * 4) if action == 1 else envs.reset()
            assert list(raised.value.failures) == gone
            assert isinstance(raised.value.failures[0], ea.ActorStartError)
            others = raised.value.batch
            assert others.env_ids.tolist() == list(range(envs_per_actor, 4))
            assert set(others.obs[:, 0].tolist()) == {2.0 if action == 1 else 0.0}


def test_errors_name_the_actor_of_the_env():
    with make(functools.partial(Env, 3), on_failure="raise") as envs:
        envs.reset()
        with pytest.raises(ea.VectorStepError, match=r"env 0 \(actor 'env-0', pid .*, incarnation 0\): ValueError"):
            envs.step([3])


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_rows_give_the_same_results(autoreset, on_failure):
    """Compare with workers, whose engine is another one."""
    actions = list(itertools.chain(*[[(1, 1, 1), (3, 1, 1), (1, 1, 1), (1, 5, 1)]] * 3))
    factories = [functools.partial(Env, 3), functools.partial(Env, 5), Env]

    def run(backend):
        seen = []
        options = {"autoreset": autoreset, "on_failure": on_failure, "restart": ALWAYS, "backend": backend}
        with ea.VectorEnv(factories, envs_per_actor=3, **options) as envs:
            envs.reset(seed=3)
            for each in actions:
                try:
                    obs, rewards, terminated, truncated, infos = envs.step(list(each))
                except ea.VectorStepError as error:
                    seen.append((list(error.failures), error.batch.obs.tolist()))
                else:
                    facts = [sorted(info) for info in infos], [info.get("seed") for info in infos]
                    seen.append((obs.tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist(), facts))
            return seen

    assert run("inline") == run("thread")


class Faults:
    """What envs do next; the test sets it once the vector is made. Factories are pickled by reference."""

    in_factory: ClassVar[list[BaseException]] = []
    in_step: ClassVar[list[BaseException]] = []


class Faulty(Env):
    """Raises the errors of `Faults`, each once."""

    reward_space = gymnasium.spaces.Box(-9, 9, (2,), np.float64)

    def __init__(self):
        super().__init__()
        self.is_broken = False
        if Faults.in_factory:
            raise Faults.in_factory.pop()

    def step(self, action):
        if Faults.in_step:
            self.is_broken = True
            raise Faults.in_step.pop()
        return (*super().step(action)[:1], np.ones(2), False, False, {})

    def get_state(self):
        return self.steps

    def set_state(self, state):
        self.steps = state


@pytest.fixture(autouse=True)
def no_faults():
    yield
    for faults in (Faults.in_factory, Faults.in_step):
        faults.clear()


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_state_is_restored_after_an_interrupted_step(interrupted):
    states = ea.SnapshotPolicy(Faulty.get_state, Faulty.set_state)
    with make(Faulty, Faulty, on_failure="raise", snapshot=states) as envs:
        envs.reset()
        step(envs, 1, 1)
        snapshots = envs.snapshot()
        Faults.in_step.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            envs.step([1, 1], env_ids=[interrupted, 1 - interrupted])
        with pytest.raises(ea.AlreadyPendingError, match="reset after an interrupt"):
            envs.restore(snapshots)
        envs.reset()
        envs.restore(snapshots)
        assert step(envs, 1, 1) == ([2, 2], [False, False], [False, False])


def reset_within_the_last_step(envs):
    envs.reset(seed=0)
    for _ in range(6):
        envs.step([1, 1])


def test_an_interrupt_in_a_step_of_no_envs_ends_no_episode():
    with make(Env, Env, on_failure="raise", autoreset="same_step") as envs:
        for number in itertools.count():
            reset_within_the_last_step(envs)
            where = interrupt(lambda: envs.step([], env_ids=[]), number, only={"start_steps", "_begin", "_complete"})
            assert envs.step([1, 1])[0].tolist() == [[1], [1]]
            if where is None:
                break


def test_an_interrupt_before_a_step_does_not_end_the_episode_that_the_last_step_began():
    with make(Env, Env, on_failure="raise", autoreset="same_step") as envs:
        for number in itertools.count():
            reset_within_the_last_step(envs)
            where = interrupt(lambda: envs.step([1, 1]), number, only={"start_steps", "_begin", "_run_steps"})
            if where is None:
                break
            VectorAccess(envs).discard()
            assert not any(envs._engine.episodes.awaits_autoreset), where


def test_an_interrupt_while_results_are_copied_leaves_them_to_the_next_attempt():
    with make(Env, Env) as envs:
        envs.reset(seed=0)
        for number in itertools.count():
            envs.send([1, 1])
            if interrupt(envs.recv, number, only={"read_results", "_read_column"}) is None:
                break
            assert envs.recv().env_ids.tolist() == [0, 1]
        assert number > 4


@pytest.mark.parametrize("interrupted", [0, 1])
def test_the_envs_of_an_interrupted_step_are_busy_before_anything_settles_it(interrupted):
    with make(Faulty, Faulty, on_failure="raise") as envs:
        engine = envs._engine
        envs.reset()
        Faults.in_step.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            envs.step([1, 1], env_ids=[interrupted, 1 - interrupted])
        for _ in range(2):
            assert (sorted(engine.busy()), engine.receivable()) == ([0, 1], [])
        envs.reset(env_ids=[0])
        assert (engine.busy(), engine.receivable()) == ([1], [])


def test_a_closed_actor_stays_closed_when_it_is_killed():
    with make(Env) as envs:
        pass
    with ea.spawn(Env, backend="inline") as actor:
        pass
    for closed in (envs.actors[0], actor):
        closed.kill()
        closed.kill(restart=True)
        assert closed.state is ea.ActorState.CLOSED
        assert closed.incarnation == 0


def test_killing_an_actor_waits_for_a_thread_that_closes_it():
    with ea.spawn(Env, backend="inline") as handle:
        actor = handle._actor
        killer = threading.Thread(target=handle.kill)
        with actor.config.lock:
            killer.start()
            killer.join(0.05)
            assert not actor.closed.is_set
            handle.close()
        killer.join()


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_an_interrupt_while_envs_are_replaced_leaves_no_env_that_has_raised(envs_per_actor):
    with make(Faulty, Faulty, envs_per_actor=envs_per_actor) as envs:
        envs.reset()
        Faults.in_step.append(ValueError("broken"))
        Faults.in_factory.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            envs.step([1, 1])
        with pytest.raises(ea.AlreadyPendingError, match="reset after an interrupt"):
            envs.step([1, 1])
        envs.reset()
        assert envs.get_attr("is_broken") == [False, False]
        assert envs.actors[0].incarnation == 1
        assert step(envs, 1, 1) == ([1, 1], [False, False], [False, False])


class FaultyReset(Env):
    """Raises the errors of `Faults` in its resets."""

    def reset(self, **options):
        if Faults.in_step:
            raise Faults.in_step.pop()
        return super().reset(**options)


def test_a_reset_has_all_its_retries_after_one_whose_retry_was_interrupted():
    with ea.VectorEnv([FaultyReset], on_failure="renew", backend="inline", restart=ea.RestartPolicy(1)) as envs:
        Faults.in_step.extend([KeyboardInterrupt(), ValueError("first")])
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=3)
        Faults.in_step.append(ValueError("second"))
        _, infos = envs.reset(seed=4)
        assert (infos[0]["seed"], repr(infos[0]["failure"])) == (4, "ValueError('second')")


def test_all_envs_have_all_their_retries_after_a_reset_whose_retries_were_interrupted():
    once = ea.RestartPolicy(1)
    with ea.VectorEnv([FaultyReset] * 2, envs_per_actor=2, on_failure="renew", backend="inline", restart=once) as envs:
        Faults.in_step.extend([KeyboardInterrupt(), *[ValueError("first")] * 3])
        with pytest.raises(KeyboardInterrupt):
            envs.reset(seed=3)
        Faults.in_step.append(ValueError("second"))
        _, infos = envs.reset(seed=4)
        assert repr(infos[0]["failure"]) == "ValueError('second')"


def test_a_call_after_an_interrupted_replacement_runs_in_new_envs():
    with ea.spawn(Faulty, backend="inline") as actor:
        Faults.in_factory.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            actor.renew()
        assert actor.get("steps").result() is None
        assert actor.incarnation == 1


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_rewards_of_resets_and_failures_have_the_shape_of_the_spec(backend, autoreset):
    options = {"on_failure": "renew", "autoreset": autoreset, "restart": ALWAYS, "backend": backend}
    with ea.VectorEnv([Faulty], **options) as envs:
        reset = VectorAccess(envs).submit_reset(0, None, None)
        results = [reset.result(), envs.submit([1])[0].result()]
        Faults.in_step.append(ValueError("failed"))
        results.append(envs.submit([1])[0].result())
        results.append(envs.submit([1])[0].result())
        assert [np.shape(result.reward) for result in results] == [(2,)] * 4
        assert [np.sum(result.reward) for result in results] == [0, 2, 0, 0 if autoreset == "next_step" else 2]
        assert envs.last_batch().rewards.shape == (1, 2)


class Twofold(Env):
    """Has a reward with two parts."""

    reward_space = gymnasium.spaces.Dict(
        {name: gymnasium.spaces.Box(-9, 9, (), np.float64) for name in ("speed", "cost")}
    )

    def step(self, action):
        obs, reward, *others = super().step(action)
        return obs, {"speed": reward, "cost": -reward}, *others


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_failed_step_has_zeros_in_all_parts_of_its_reward(backend):
    options = {"on_failure": "renew", "restart": ALWAYS, "backend": backend}
    with ea.VectorEnv([functools.partial(Twofold, 3), Twofold], **options) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        _, rewards, _, truncated, _ = envs.step([3, 1])
        assert truncated.tolist() == [True, False]
        assert {name: column.tolist() for name, column in rewards.items()} == {"speed": [0, 1], "cost": [0, -1]}
        assert envs.last_batch().rewards["speed"].tolist() == [0, 1]


class Uncopyable(Env):
    """Has infos that cannot be copied at some actions and in some resets."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, {"lock": threading.Lock()} if options else info

    def step(self, action):
        *others, info = super().step(action)
        return *others, {"lock": threading.Lock()} if action == 5 else info


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_an_info_that_cannot_be_copied_fails_only_its_env(backend, on_failure):
    with ea.VectorEnv([Uncopyable, Env], backend=backend, on_failure=on_failure, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        if on_failure == "renew":
            assert step(envs, 5, 1) == ([0, 1], [True, False], [True, False])
            assert step(envs, 1, 1)[0] == [0, 2]
            return
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([5, 1])
        assert list(caught.value.failures) == [0]
        assert caught.value.batch.obs.tolist() == [[1]]
        assert step(envs, 1, 1)[0] == [2, 2]
        with pytest.raises(ea.VectorStepError, match="in reset"):
            envs.reset(options=[{"o": 1}, None])
        with pytest.raises(ea.VectorInputError, match="env 0 needs a reset first"):
            envs.step([1, 1])


class Scribe(Env):
    """Has observations with a number and objects, one of which cannot be copied at action 5, nor the reward at 6."""

    observation_space = gymnasium.spaces.Dict(
        count=Env.observation_space,
        page=gymnasium.spaces.Dict(line=gymnasium.spaces.Text(9), number=gymnasium.spaces.Box(0, 9, (), np.int64)),
        title=gymnasium.spaces.Text(9),
    )
    reward_space = gymnasium.spaces.Text(9)

    def observe(self, obs, title):
        number = np.int64(obs[0])
        return {"count": obs, "page": {"line": f"line {number}", "number": number}, "title": title or f"title {number}"}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return self.observe(obs, None), info

    def step(self, action):
        obs, reward, *others = super().step(action)
        lock = threading.Lock()
        return self.observe(obs, lock if action == 5 else None), lock if action == 6 else f"{reward}", *others


@pytest.mark.parametrize("action", [5, 6], ids=["observation", "reward"])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_result_that_cannot_be_copied_leaves_nothing_in_the_row(backend, action):
    with ea.VectorEnv([Scribe, Scribe], backend=backend, on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        obs, _, _, truncated, infos = envs.step([action, 1])
        assert (truncated.tolist(), "failure" in infos[0]) == ([True, False], True)
        assert [obs["count"].tolist(), obs["page"]["number"].tolist()] == [[[1], [2]], [1, 2]]
        assert [obs["page"]["line"], obs["title"]] == [["line 1", "line 2"], ["title 1", "title 2"]]


class Stateful(Env):
    """Has a state of another size."""

    def __init__(self, size=1):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-9, 99, (size,), np.float64)
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.size), {}


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_snapshot_of_other_spaces_is_refused(backend):
    options = {"snapshot": ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: None), "backend": backend}
    with ea.VectorEnv([Stateful], **options) as envs, ea.VectorEnv([lambda: Stateful(2)], **options) as others:
        envs.reset()
        others.reset()
        with pytest.raises(ea.SpaceMismatchError, match="the last observation of the snapshot for env 0"):
            envs.restore(others.snapshot())


@pytest.mark.parametrize("checks_resets", [True, False])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_ended_episode_is_restored_in_a_vector_without_autoreset(backend, checks_resets):
    policy = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    options = {"snapshot": policy, "backend": backend}
    with ea.VectorEnv([Env], **options) as envs, ea.VectorEnv([Env], autoreset="disabled", **options) as others:
        envs.reset()
        for _ in range(6):
            step(envs, 1)
        if not checks_resets:
            VectorAccess(others).disable_reset_checks()
        others.restore(envs.snapshot())
        if checks_resets:
            with pytest.raises(ea.VectorInputError, match="needs a reset first"):
                step(others, 1)
            others.reset()
        assert step(others, 1)[0] == [1 if checks_resets else 7]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_ended_episode_of_a_vector_without_reset_checks_is_restored_with_autoreset(backend):
    policy = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    options = {"snapshot": policy, "backend": backend}
    with ea.VectorEnv([Env], autoreset="disabled", **options) as envs, ea.VectorEnv([Env], **options) as others:
        VectorAccess(envs).disable_reset_checks()
        envs.reset()
        for _ in range(6):
            step(envs, 1)
        others.restore(envs.snapshot())
        assert step(others, 1)[0] == [0]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_env_that_is_restored_without_a_result_has_none_of_the_episode_before(backend):
    policy = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    with make(functools.partial(Unreset, 3), backend=backend, snapshot=policy) as envs:
        VectorAccess(envs).disable_reset_checks()
        snapshots = envs.snapshot()
        envs.reset()
        step(envs, 1)
        envs.restore(snapshots)
        with pytest.raises(ea.NothingPendingError):
            envs.last_batch()
        assert step(envs, 3) == ([0], [True], [True])


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_last_batch_is_not_kept_under_raise(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset()
        with pytest.raises(ea.VectorEnvError, match="on_failure='raise'") as caught:
            envs.last_batch()
        assert not isinstance(caught.value, ea.NothingPendingError)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_closed_actor_names_the_request_that_it_refuses(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset()
        envs.actors[0].kill()
        with pytest.raises(ea.ActorClosedError, match="cannot run reset"):
            envs.reset()
        with pytest.raises(ea.ActorClosedError, match="cannot run step"):
            envs.step([1])


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_reset_that_a_closed_actor_refuses_drops_no_results(backend):
    with ea.VectorEnv([Env, Env], backend=backend) as envs:
        envs.reset()
        envs.send([1, 1])
        envs.actors[0].close()
        with pytest.raises(ea.ActorClosedError, match="cannot run reset"):
            envs.reset()
        assert envs.recv().obs.tolist() == [[1], [1]]


def test_a_single_number_is_no_list_of_env_ids():
    with make(Env, Env) as envs, pytest.raises(ea.VectorInputError, match="expected an iterable of ints"):
        envs.reset(env_ids=np.array(1))


class Unreset(Env):
    """Steps without a reset."""

    def step(self, action):
        self.steps = self.steps or 0
        return super().step(action)


class FaultyStart(Unreset):
    """Raises the errors of `Faults` in its factory."""

    def __init__(self):
        super().__init__()
        if Faults.in_factory:
            raise Faults.in_factory.pop()


def test_a_step_after_an_interrupted_replacement_runs_in_new_envs():
    with make(FaultyStart, FaultyStart) as envs:
        VectorAccess(envs).disable_reset_checks()
        Faults.in_factory.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            envs.actors[0].renew()
        assert step(envs, 1, 1) == ([1, 1], [False, False], [False, False])


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_steps_without_a_reset_begin_an_episode_if_only_envs_check_that(backend):
    with ea.VectorEnv([Unreset, Unreset], on_failure="renew", restart=ALWAYS, backend=backend) as envs:
        VectorAccess(envs).disable_reset_checks()
        step(envs, 1, 1)
        assert envs.last_batch().truncated.tolist() == [False, False]
        envs.actors[0].renew().result()
        assert step(envs, 1, 1) == ([1, 2], [True, False], [True, False])


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_first_step_after_a_restored_env_without_a_result_is_its_last_one(backend):
    policy = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    with ea.VectorEnv([Unreset], on_failure="renew", restart=ALWAYS, backend=backend, snapshot=policy) as envs:
        VectorAccess(envs).disable_reset_checks()
        envs.restore(envs.snapshot())
        envs.step([1])
        assert envs.last_batch().obs.tolist() == [[1]]


def test_the_first_statistics_after_the_vector_was_closed_count_its_steps():
    with make(Env, Env) as envs:
        envs.reset()
        step(envs, 1, 1)
    assert envs.stats().steps == [1, 1]


class Closing(Env):
    closed: ClassVar[list[int]] = []

    def close(self):
        self.closed.append(ea.current_actor().index)


def test_envs_are_closed_if_a_later_factory_raises():
    Closing.closed.clear()
    broken = functools.partial(Closing, most_incarnations=0)
    with pytest.raises(ea.ActorStartError):
        ea.VectorEnv([Closing, Closing, broken], backend="inline", envs_per_actor=3)
    assert Closing.closed == [0, 1]


def test_a_snapshot_of_a_closed_env_is_refused():
    policy = ea.SnapshotPolicy(get=lambda env: env.steps, set=lambda env, steps: setattr(env, "steps", steps))
    with ea.VectorEnv([Env, Env], backend="inline", snapshot=policy) as envs:
        envs.reset(seed=0)
        envs[0].close()
        with pytest.raises(ea.ActorClosedError):
            envs.snapshot()


def test_a_snapshot_of_a_lost_episode_speaks_of_the_snapshot():
    policy = ea.SnapshotPolicy(get=lambda env: env.steps, set=lambda env, steps: setattr(env, "steps", steps))
    with ea.VectorEnv([Env], backend="inline", snapshot=policy) as envs:
        envs.reset(seed=0)
        envs.actors[0].renew().result(10)
        with pytest.raises(ea.ActorError, match="snapshot"):
            envs.snapshot([0])


def test_an_interrupt_at_the_end_of_a_step_leaves_no_current_actor_behind():
    with ea.VectorEnv([Env], backend="inline") as envs:
        number, where = 0, ""
        while where is not None:
            envs.reset(seed=0)
            where = interrupt(lambda: envs.step([1]), number, only={"__enter__", "__exit__"})
            assert ea.current_actor() is None, where
            number += 1
    assert number > 3


class NeverResets(Env):
    """Raises in each reset."""

    def reset(self, *, seed=None, options=None):
        raise ValueError("never")


def test_a_reset_that_always_raises_ends_without_a_limit_of_restarts():
    endless = ea.RestartPolicy(max_restarts=float("inf"), backoff=0)
    envs = ea.VectorEnv([NeverResets], on_failure="renew", backend="inline", restart=endless)
    with envs, pytest.raises(ea.VectorStepError, match="never"):
        envs.reset(seed=0)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_resets_that_raise_in_one_process_are_repeated_together(backend):
    options = {"on_failure": "renew", "restart": ea.RestartPolicy(max_restarts=3, backoff=0)}
    with ea.VectorEnv([NeverResets] * 2, envs_per_actor=2, backend=backend, **options) as envs:
        with pytest.raises(ea.VectorStepError, match="2 of 2 envs failed"):
            envs.reset(seed=0)
        assert envs.actors[0].incarnation == 3


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_env_whose_episode_is_lost_is_reset_in_the_process_in_which_another_one_raises(backend):
    factories, options = [functools.partial(Env, 3), Env], {"autoreset": "same_step", "restart": ALWAYS}
    with ea.VectorEnv(factories, envs_per_actor=2, on_failure="renew", backend=backend, **options) as envs:
        envs.reset(seed=0)
        envs.step([3, 1])
        envs.send([3, 1])
        batch = envs.recv()
        assert dict(zip(batch.env_ids.tolist(), batch.incarnations.tolist(), strict=True)) == {0: 2, 1: 1}


def test_a_replaced_env_counts_as_a_restart_and_its_error_is_the_last_failure():
    with make(functools.partial(Env, 3)) as envs:
        envs.reset(seed=0)
        step(envs, 3)
        stats = envs.actors[0].stats()
        assert (stats.incarnation, stats.restarts) == (1, 1)
        assert "ValueError" in str(stats.last_failure)
        envs.actors[0].renew().result()
        assert envs.actors[0].stats().restarts == 1


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_step_that_never_ran_is_counted_as_with_workers(autoreset):
    """Env 0 raises, which also costs env 1 its episode: the next step of env 1 does not run."""
    completed = []
    for backend in ("inline", "thread"):
        factories = [functools.partial(Env, 3), Env]
        options = {"envs_per_actor": 2, "on_failure": "renew", "autoreset": autoreset, "restart": ALWAYS}
        with ea.VectorEnv(factories, backend=backend, **options) as envs:
            before = envs.stats().actors[0].completed
            envs.reset(seed=0)
            for actions in ([3, 1], [1, 1], [1, 1]):
                envs.step(actions)
            completed.append(envs.stats().actors[0].completed - before)
    assert completed[0] == completed[1]


class Lingering(Env):
    """Records when it is closed, which takes a moment."""

    closed_at = 0.0

    def close(self):
        Lingering.closed_at = time.monotonic()
        time.sleep(0.01)


def test_the_error_of_a_factory_does_not_count_the_time_in_which_other_envs_close():
    factories = [Lingering, functools.partial(Env, most_incarnations=0)]
    began = time.monotonic()
    with pytest.raises(ea.ActorStartError, match="no more") as caught:
        ea.VectorEnv(factories, backend="inline", envs_per_actor=2)
    assert 0 < caught.value.elapsed <= Lingering.closed_at - began
