"""The conformance suite: the tests that every backend must pass.

Subclass it in a test module; pytest collects the inherited tests::

    class TestMyBackend(BackendConformance):
        def make_backend(self):
            return MyBackend()
"""

from __future__ import annotations

import concurrent.futures
import functools
import pickle
from typing import Any

import numpy as np

import envactors as ea
from envactors.backends.base import Backend
from envactors.testing import EchoEnv, FaultyEnv, expected_checksum

_SOON = 30.0  # a timeout in seconds that even a busy machine does not reach


def _make_faulty_echo(env_id: int) -> FaultyEnv:
    return FaultyEnv(EchoEnv(env_id, 5))


def _fail_to_make() -> None:
    raise LookupError("no such env")


class _Policy:
    """Chooses actions that depend on the parameters, the observations, and random numbers."""

    def __init__(self) -> None:
        self._offset = 0

    def load(self, parameters: dict[str, Any]) -> None:
        self._offset = int(parameters["offset"][0])

    def __call__(self, obs: Any, context: ea.PolicyContext) -> Any:
        noise = context.rng.integers(100, size=len(obs))
        return obs[:, 1] + noise + self._offset, {"noise": noise}


class _Introspective(EchoEnv):
    """Echo env that reports which actor runs it."""

    def who(self) -> Any:
        return ea.current_actor()


class BackendConformance:
    """Tests that every backend must pass. Subclasses return their backend from `make_backend`.

    Except in the test of factories that are pickled by value, workers can import everything that is sent to them.
    """

    def make_backend(self) -> Backend | str:
        """Return the backend or its name."""
        raise NotImplementedError

    def spawn(self, factory: Any = EchoEnv, **options: Any) -> Any:
        """Start an actor in the backend."""
        return ea.spawn(factory, backend=self.make_backend(), **options)

    def make_envs(self, count: int = 4, **options: Any) -> ea.VectorEnv:
        """Return a vector env of echo envs that fail on command, in the backend."""
        factories = [functools.partial(_make_faulty_echo, i) for i in range(count)]
        return ea.VectorEnv(factories, backend=self.make_backend(), **options)

    def _kills(self) -> bool:
        from envactors.backends import resolve

        return resolve(self.make_backend()).traits.can_kill

    def test_calls_run_in_order(self) -> None:
        with self.spawn() as actor:
            futures = [actor.step(i) for i in range(20)]
            assert [future.result(_SOON)[0][1] for future in futures] == list(range(1, 21))
            assert actor.get("last_action").result(_SOON) == 19
            actor.set("env_id", 7).result(_SOON)
            assert actor.get("env_id").result(_SOON) == 7

    def test_values_are_copied(self) -> None:
        value = [1, 2]
        with self.spawn() as actor:
            future = actor.echo(value)
            value.append(3)
            assert future.result(_SOON) == [1, 2]
            assert actor.echo(value).result(_SOON) is not value

    def test_an_exception_arrives_and_the_actor_continues(self) -> None:
        with self.spawn(FaultyEnv) as actor:
            actor.reset().result(_SOON)
            actor.arm("raise").result(_SOON)
            error = actor.step(1).exception(_SOON)
            assert type(error) is RuntimeError
            assert isinstance(error.__cause__, ea.RemoteTraceback)
            assert actor.step(2).result(_SOON)[0][2] == 2

    def test_values_that_do_not_pickle_fail_only_their_call(self) -> None:
        with self.spawn(FaultyEnv) as actor:
            actor.arm("unpicklable").result(_SOON)
            assert isinstance(actor.step(1).exception(_SOON), ea.SerializationError)
            assert actor.step(2).result(_SOON)[0][2] == 2

    def test_a_factory_that_raises(self) -> None:
        with self.spawn(_fail_to_make) as actor:
            error = actor.echo(1).exception(_SOON)
            assert isinstance(error, ea.ActorStartError)
            assert isinstance(error.__cause__, LookupError)

    def test_a_factory_by_name(self) -> None:
        with self.spawn("envactors.testing:EchoEnv") as actor:
            assert actor.step(7).result(_SOON)[0].tolist()[:3] == [0, 1, 7]
        for name in ("envactors.testing:NoEnv", "envactors.no_module:Env", "envactors.testing:FAULTS"):
            with self.spawn(name) as actor:
                assert isinstance(actor.echo(1).exception(_SOON), ea.ActorStartError)

    def test_a_factory_by_value_runs_or_is_rejected(self) -> None:
        class Env(EchoEnv):
            def triple(self, value: int) -> int:
                return 3 * value

        from envactors.backends import resolve

        if resolve(self.make_backend()).loads_code({}):
            with self.spawn(lambda: Env(4)) as actor:
                assert actor.triple(2).result(_SOON) == 6
                assert actor.get("env_id").result(_SOON) == 4
        else:
            refused = False
            try:
                self.spawn(lambda: Env(4))
            except ea.SerializationError as error:
                refused = "'module:callable'" in str(error)
            assert refused

    def test_renewal(self) -> None:
        with self.spawn() as actor:
            actor.step(1)
            assert actor.renew().result(_SOON) == 1
            assert actor.step(1).result(_SOON)[0][1] == 1
            assert (actor.incarnation, actor.stats().restarts) == (1, 0)

    def test_who_is_running(self) -> None:
        with self.spawn(_Introspective, name="me") as actor:
            assert actor.who().result(_SOON) == ea.ActorContext("me", 0, 0)
        assert ea.current_actor() is None

    def test_close_lets_the_env_close(self) -> None:
        actor = self.spawn()
        future = actor.echo(3)
        actor.close()
        assert future.result(0) == 3
        assert actor.state is ea.ActorState.CLOSED
        actor.close()

    def test_futures_work_with_the_library_functions(self) -> None:
        with self.spawn() as one, self.spawn() as two:
            futures = [actor.echo(i) for i in range(5) for actor in (one, two)]
            assert sorted(f.result() for f in ea.as_completed(futures, _SOON)) == sorted([*range(5)] * 2)
            done: list[Any] = []
            future = one.echo("called")
            future.add_done_callback(lambda f: done.append(f.result()))
            concurrent.futures.wait([future, two.echo(0)], _SOON)

    def test_every_result_belongs_to_its_action(self) -> None:
        for envs_per_actor in (1, 3):
            for autoreset in ("next_step", "same_step"):
                with self.make_envs(4, envs_per_actor=envs_per_actor, autoreset=autoreset) as envs:
                    self._check_echo(envs, autoreset)

    def _check_echo(self, envs: ea.VectorEnv, autoreset: str) -> None:
        obs, infos = envs.reset(seed=5)
        histories: list[list[int]] = [[] for _ in range(4)]
        seeds = [info["seed"] for info in infos]
        assert seeds == [5, 6, 7, 8]
        ended = np.zeros(4, bool)
        for turn in range(14):
            actions = np.arange(4) + 10 * turn
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for i in range(4):
                if ended[i] and autoreset == "next_step":
                    histories[i] = []
                    seeds[i] = infos[i]["seed"]
                else:
                    histories[i].append(int(actions[i]))
                    assert rewards[i] == actions[i]
                seen = infos[i].get("final_obs", obs[i]) if autoreset == "same_step" else obs[i]
                last = histories[i][-1] if histories[i] else -1
                assert seen.tolist() == [i, len(histories[i]), last, expected_checksum(seeds[i], histories[i])]
                if terminated[i] and autoreset == "same_step":
                    histories[i] = []
                    seeds[i] = infos[i]["seed"]
            assert not truncated.any()
            ended = terminated

    def test_a_renewed_env_continues(self) -> None:
        restart = ea.RestartPolicy(max_restarts=20, backoff=0.0)
        with self.make_envs(3, on_failure="renew", restart=restart) as envs:
            envs.reset(seed=1)
            envs.step([1, 1, 1])
            envs[1].arm("raise").result(_SOON)
            obs, rewards, _, truncated, infos = envs.step([2, 2, 2])
            assert truncated.tolist() == [False, True, False]
            assert rewards.tolist() == [2.0, 0.0, 2.0]
            assert obs[1].tolist()[:3] == [1, 1, 1]
            assert type(infos[1]["failure"]) is RuntimeError
            obs, *_, infos = envs.step([3, 3, 3])
            assert obs[:, 1].tolist() == [3, 0, 3]
            assert infos[1]["seed"] not in (None, 2)
            assert envs.step([4, 4, 4])[0][:, 1].tolist() == [4, 1, 4]

    def test_a_rollout_equals_the_loop_of_steps(self) -> None:
        with self.make_envs(3) as envs, self.make_envs(3) as stepped:
            envs.reset(seed=3)
            envs.set_policy(_Policy, seed=9)
            obs, _ = stepped.reset(seed=3)
            policies = [_Policy() for _ in range(3)]
            for number, parameters in enumerate(({"offset": np.array([1000])}, None)):
                rollout = envs.rollout(8, parameters)
                assert rollout.policy_version.tolist() == [1] * 3
                for step in range(8):
                    actions = []
                    for index, policy in enumerate(policies):
                        if parameters is not None:
                            policy.load(parameters)
                        rng = np.random.Generator(np.random.Philox(key=9, counter=[0, step, number, index]))
                        env_ids = np.array([index])
                        starts = rollout.starts[step, [index]]
                        chosen, extras = policy(obs[[index]], ea.PolicyContext(env_ids, starts, step, rng))
                        assert rollout.extras["noise"][step, index] == extras["noise"][0]
                        actions.append(int(chosen[0]))
                    assert rollout.actions[step].tolist() == actions
                    _assert_equal(rollout.obs[step], obs)
                    obs, rewards, terminated, truncated, _ = stepped.step(actions)
                    _assert_equal(rollout.rewards[step], rewards)
                    _assert_equal(rollout.terminated[step], terminated)
                    _assert_equal(rollout.truncated[step], truncated)
                _assert_equal(rollout.last_obs, obs)
            assert not rollout.failures
            assert not rollout.valid.all(), "after five steps, an episode ends and the env resets"

    def test_crashes_and_deadlines_where_workers_can_be_killed(self) -> None:
        if not self._kills():
            return
        restart = ea.RestartPolicy(max_restarts=20, backoff=0.0)
        with self.spawn(FaultyEnv, restart=restart, deadlines=ea.Deadlines(call=1.0)) as actor:
            for fault, kind in (
                ("crash", ea.ActorDiedError),
                ("exit", ea.ActorDiedError),
                ("hang_in_c", ea.ActorTimeoutError),
                ("stop", ea.ActorTimeoutError),
            ):
                actor.arm(fault).result(_SOON)
                error = actor.step(1).exception(_SOON)
                assert isinstance(error, kind), (fault, error)
                assert pickle.loads(pickle.dumps(error)).pid == error.pid
                assert actor.step(2).result(_SOON)[0][1] == 1

    def test_a_backend_that_cannot_kill_warns_about_deadlines(self) -> None:
        if self._kills():
            return
        import warnings

        with self.spawn() as actor:
            actor.echo(0).result(_SOON)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    actor.options(deadline=5.0).echo(1).result(_SOON)
            assert len([one for one in caught if "deadlines are not enforced" in str(one.message)]) == 1


def _assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_equal(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            _assert_equal(first, second)
    else:
        assert np.array_equal(one, other), (one, other)
