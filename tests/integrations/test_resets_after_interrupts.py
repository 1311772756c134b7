"""After an interrupt at any line of a drop-in, or in an env, its `reset` and its `step` work, and mix up no result."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from alfenvs import AlfEnv
from helpers import FORK_SERVER, SOON
from interrupting import UNCOVERED, interrupt
from pettingzoo import ParallelEnv

import envactors as ea

DROPINS = str(Path(ea.__file__).parent / "integrations")
ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0)


class Counter(gymnasium.Env):
    """Its observations are its seed and the count of its steps."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.array([seed or 0, 0], np.float32)
        return self.at.copy(), {}

    def step(self, action):
        self.at[1] += 1
        return self.at.copy(), 1.0, False, False, {}


class Interrupter(Counter):
    """Has the caller interrupted as by Ctrl-C, before or after it counts a step, once a file asks for it."""

    def __init__(self, folder, caller):
        self.folder, self.caller = folder, caller

    def step(self, action):
        self.interrupt("before")
        result = super().step(action)
        self.interrupt("after")
        return result

    def interrupt(self, moment):
        if (self.folder / moment).exists():
            (self.folder / moment).unlink()
            if os.getpid() == self.caller:
                signal.raise_signal(signal.SIGINT)
            (self.folder / "begun").touch()
            while not (self.folder / "caught").exists():
                time.sleep(0.001)


def interrupt_wait(begun):
    """Interrupt the main thread as Ctrl-C does, once an env has begun its step and the thread sleeps until it ends."""
    while not begun.exists() or not is_waiting(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def is_waiting(frame):
    """Return whether the main thread, in this frame, waits for an env, and the system has put it to sleep."""
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_stack(frame)}
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")
    return (
        not functions.isdisjoint(("wait", "wait_for_reply")) and stat.read_text().rpartition(")")[2].split()[0] == "S"
    )


class Hit(BaseException):
    """Comes at a line of a drop-in, as `KeyboardInterrupt` does."""


def interrupted(function, at):
    """Call a function and raise at its line ``at`` in a drop-in; return whether it had that many lines."""
    left = at

    def trace(frame, event, _arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith(DROPINS):
            return None
        if event == "line" and frame.f_code.co_code[frame.f_lasti] not in UNCOVERED:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Hit
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(Hit):
            function()
    finally:
        sys.settrace(None)
    assert sys.exc_info()[1] is None
    return left <= 0


class Gymnasium:
    """ActorVectorEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        module = importlib.import_module("envactors.integrations.gymnasium")
        self.envs = module.ActorVectorEnv(env_fns, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        return self.envs.reset(seed=seed)[0]

    def step(self):
        return self.envs.step(np.array([0, 1]))[0]

    def step_of_other_types(self):
        return self.envs.step([0, 1])[0]

    def call(self):
        return self.envs.get_attr("at")


class StableBaselines:
    """ActorVecEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        pytest.importorskip("stable_baselines3")
        module = importlib.import_module("envactors.integrations.sb3")
        self.envs = module.ActorVecEnv(env_fns, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        self.envs.seed(seed)
        return self.envs.reset()

    def step(self):
        return self.envs.step(np.array([0, 1]))[0]


class TorchRL:
    """ActorEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        pytest.importorskip("torchrl")
        module = importlib.import_module("envactors.integrations.torchrl")
        self.envs = module.ActorEnv(env_fns, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        self.last = self.envs.reset(seed=seed)
        return self.last["observation"].numpy()

    def step(self):
        self.last = self.envs.step(self.envs.rand_action(self.last))["next"]
        return self.last["observation"].numpy()


class CounterOfAgents(ParallelEnv):
    """A `Counter` of one agent."""

    metadata = {"name": "counter"}  # noqa: RUF012
    possible_agents = ["a"]  # noqa: RUF012

    def __init__(self, make=Counter):
        self.env, self.agents = make(), ["a"]

    def observation_space(self, agent):
        return Counter.observation_space

    def action_space(self, agent):
        return Counter.action_space

    def reset(self, seed=None, options=None):
        return {"a": self.env.reset(seed=seed)[0]}, {"a": {}}

    def step(self, actions):
        return {"a": self.env.step(actions["a"])[0]}, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {}}


class PettingZoo:
    """ActorParallelEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        module = importlib.import_module("envactors.integrations.pettingzoo")
        env_fns = [functools.partial(CounterOfAgents, env_fn) for env_fn in env_fns]
        self.envs = module.ActorParallelEnv(env_fns, backend=backend, restart=ALWAYS)

    def reset(self, seed):
        return self.envs.reset(seed=seed)[0]["a"]

    def step(self):
        return self.envs.step({"a": np.array([0, 1])})[0]["a"]


class PettingZooCopies(PettingZoo):
    """Each copy of an ActorParallelEnv."""

    def reset(self, seed):
        return np.array([copy.reset(seed=seed + i)[0]["a"] for i, copy in enumerate(self.envs.copies)])

    def step(self):
        return np.array([copy.step({"a": 0})[0]["a"] for copy in self.envs.copies])


class CounterOfDing:
    """A `Counter` for DI-engine."""

    observation_space = Counter.observation_space
    action_space = Counter.action_space
    reward_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, make=Counter):
        self.env, self.seeded = make(), 0

    def seed(self, seed, dynamic_seed=None):
        self.seeded = seed

    def reset(self):
        return self.env.reset(seed=self.seeded)[0]

    def step(self, action):
        return self.env.step(action)[0], np.ones(1, np.float32), False, {}

    def close(self):
        pass


class Ding:
    """SyncActorEnvManager."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        module = importlib.import_module("envactors.integrations.ding")
        env_fns = [functools.partial(CounterOfDing, env_fn) for env_fn in env_fns]
        timeouts = dict.fromkeys(("step_timeout", "reset_timeout", "connect_timeout"))
        self.envs = module.SyncActorEnvManager(env_fns, backend=backend, episode_num=float("inf"), **timeouts)
        self.envs.launch()

    def reset(self, seed):
        self.envs.seed(seed)
        self.envs.reset()
        return np.array(list(self.envs.ready_obs.values()))

    def step(self):
        steps = self.envs.step({0: np.int64(0), 1: np.int64(1)})
        return np.array([steps[i].obs for i in range(2)])


class CounterOfAlf(AlfEnv):
    """An env of ALF whose steps a `Counter` counts, too."""

    def __init__(self, env_id, make=Counter):
        self.counter = make()
        self.counter.reset()
        super().__init__(env_id, length=10**6)

    def step(self, action):
        self.counter.step(action)
        return super().step(action)


class Alf:
    """ActorParallelEnvironment."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        module = importlib.import_module("envactors.integrations.alf")
        factories = [functools.partial(CounterOfAlf, make=env_fn) for env_fn in env_fns]
        self.envs = module.ActorParallelEnvironment(factories, backend=backend, torch_num_threads_per_env=None)

    def reset(self, seed):
        return np.asarray(self.envs.reset().observation)[:, :3:2]

    def step(self):
        return np.asarray(self.envs.step(np.zeros(2, np.int64)).observation)[:, :3:2]


class CounterOfRay:
    """A `Counter` of one agent for RLlib."""

    possible_agents = ["a"]  # noqa: RUF012
    observation_spaces = {"a": Counter.observation_space}  # noqa: RUF012

    def __init__(self, make=Counter):
        self.env = make()

    def get_observation_space(self, agent):
        return Counter.observation_space

    def get_action_space(self, agent):
        return Counter.action_space

    def reset(self, *, seed=None, options=None):
        return {"a": self.env.reset(seed=seed)[0]}, {}

    def step(self, actions):
        return {"a": self.env.step(actions["a"])[0]}, {"a": 1.0}, {"__all__": False}, {}, {}


class RLlib:
    """ActorVectorMultiAgentEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter), make=CounterOfRay):
        pytest.importorskip("ray.rllib")
        module = importlib.import_module("envactors.integrations.rllib.multi_agent")
        env_fns = [functools.partial(make, env_fn) for env_fn in env_fns]
        self.envs = module.ActorVectorMultiAgentEnv(env_fns, {"backend": backend, "restart": ALWAYS})

    def reset(self, seed):
        return np.array([obs["a"] for obs in self.envs.reset(seed=seed)[0]])

    def step(self):
        return np.array([obs["a"] for obs in self.envs.step([{"a": 0}] * 2)[0]])


class Tianshou:
    """ActorVectorEnv."""

    def __init__(self, backend, env_fns=(Counter, Counter), **options):
        pytest.importorskip("tianshou")
        module = importlib.import_module("envactors.integrations.tianshou")
        self.envs = module.ActorVectorEnv(list(env_fns), backend=backend, restart=ALWAYS, **options)

    def reset(self, seed):
        return np.concatenate([self.envs.reset(i, seed=seed + i)[0] for i in range(2)])

    def step(self):
        return self.envs.step(np.array([0, 1]))[0]


class AsyncTianshou(Tianshou):
    """ActorVectorEnv that may wait for fewer envs than there are."""

    def __init__(self, backend, env_fns=(Counter, Counter)):
        super().__init__(backend, env_fns, wait_num=2)


ALL = [Gymnasium, StableBaselines, TorchRL, PettingZoo, PettingZooCopies, Ding, Alf, RLlib, Tianshou, AsyncTianshou]


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
@pytest.mark.parametrize("kind", [Gymnasium, StableBaselines, TorchRL])
def test_reset_works_after_an_exception_at_any_line(kind, backend):
    driver = kind(backend)
    try:
        names = [name for name in vars(kind) if not name.startswith("__")]
        driver.reset(0)
        for name in names:
            call = getattr(driver, name)
            for at in itertools.count(1):
                went_on = interrupted(lambda: call(500) if name == "reset" else call(), at)  # noqa: B023
                obs = driver.reset(at)
                assert obs.tolist() == [[at, 0], [at + 1, 0]], (name, at)
                assert driver.step()[:, 1].tolist() == [1, 1], (name, at)
                if not went_on:
                    break
            assert at > 3, name
    finally:
        driver.envs.close()


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
@pytest.mark.parametrize("kind", ALL)
def test_step_continues_after_an_exception_at_any_line_of_a_step(kind, backend):
    driver = kind(backend)
    try:
        driver.reset(0)
        before = driver.step()[:, 1]
        for at in itertools.count(1):
            went_on = interrupted(driver.step, at)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                obs = driver.step()[:, 1]
            assert set((obs - before).tolist()) <= {1, 2}, at
            assert all("interrupted" in str(one.message) for one in caught), at
            assert len(caught) <= (2 if kind is PettingZooCopies else 1), at
            before = driver.step()[:, 1]
            assert before.tolist() == (obs + 1).tolist(), at
            if not went_on:
                break
        assert at > 3
    finally:
        driver.envs.close()


@pytest.mark.parametrize("kind", [Gymnasium, StableBaselines, TorchRL, PettingZoo, Ding, Alf, RLlib, Tianshou])
def test_step_continues_after_an_exception_in_the_middle_of_a_change(kind):
    """The processes are replaced then, and the envs begin new episodes."""
    driver = kind(FORK_SERVER)
    try:
        driver.reset(0)
        for number in itertools.count(step=5):
            if interrupt(driver.step, number, only={"write_requests", "post", "deliver_rows"}) is None:
                break
            with pytest.warns(UserWarning, match="interrupted") as caught:
                assert driver.step()[:, 1].tolist() == [1, 1], number
            assert len(caught) == 1
            assert driver.step()[:, 1].tolist() == [2, 2], number
        assert number > 15
    finally:
        driver.envs.close()


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
def test_asynchronous_steps_of_ding_continue_after_an_exception_at_any_line_or_in_a_change(backend):
    """The manager used to wait for results that were delivered, or to order steps of envs that had results pending."""
    module = importlib.import_module("envactors.integrations.ding")
    timeouts = dict.fromkeys(("step_timeout", "reset_timeout", "connect_timeout"))
    manager = module.AsyncActorEnvManager([CounterOfDing] * 3, backend=backend, wait_num=3, **timeouts)

    def step():
        return {
            env_id: timestep.obs[1] for env_id, timestep in manager.step(dict.fromkeys(manager.ready_obs, 0)).items()
        }

    def interruptions():
        yield from itertools.takewhile(lambda at: interrupted(step, at), itertools.count(1))
        if backend == FORK_SERVER:
            only = {"write_requests", "post", "deliver_rows"}
            yield from itertools.takewhile(lambda number: interrupt(step, number, only=only), itertools.count(step=5))

    try:
        manager.launch()
        for at in interruptions():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                last = step() | step() | step()
            assert last.keys() == {0, 1, 2}, at
            assert step() == {env_id: count + 1 for env_id, count in last.items()}, at
        assert at > 10
    finally:
        manager.close()


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
def test_rllibs_episodes_continue_after_an_exception_at_any_line(backend):
    """An exception after the end of an episode used to leave an env that neither stepped nor was reset."""

    class Short(CounterOfRay):
        def step(self, actions):
            observations, rewards, *_ = super().step(actions)
            return observations, rewards, {"__all__": bool(observations["a"][1] >= 2)}, {}, {}

    driver = RLlib(backend, make=Short)
    try:
        driver.reset(0)
        for at in itertools.count(1):
            went_on = interrupted(driver.step, at)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counts = [driver.step()[:, 1].tolist() for _ in range(6)]
            for before, after in itertools.pairwise(counts[1:]):
                assert after == [count + 1 if count < 2 else 0 for count in before], (at, counts)
            if not went_on:
                break
        assert at > 3
    finally:
        driver.envs.close()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
@pytest.mark.parametrize("kind", ALL)
def test_step_continues_after_ctrl_c_in_an_env_with_one_warning(kind, backend, moment, tmp_path):
    driver = kind(backend, [Counter, functools.partial(Interrupter, tmp_path, os.getpid())])
    try:
        driver.reset(0)
        before = driver.step()[:, 1]
        (tmp_path / moment).touch()
        thread = threading.Thread(target=interrupt_wait, args=[tmp_path / "begun"])
        if backend != "inline":
            thread.start()
        with pytest.raises(KeyboardInterrupt):
            driver.step()
        (tmp_path / "caught").touch()
        if backend != "inline":
            thread.join(SOON)
        with pytest.warns(UserWarning, match="interrupted") as caught:
            obs = driver.step()[:, 1]
        assert len(caught) == 1
        # In-process, the interrupt ends the step of the env.
        was_counted = backend != "inline" or (moment == "after" and kind is not Alf)
        assert (obs - before).tolist() == [2, 1 + was_counted]
        assert driver.step()[:, 1].tolist() == (obs + 1).tolist()
    finally:
        driver.envs.close()


def test_step_resets_an_env_whose_reset_by_autoreset_was_interrupted_in_process():
    class Short(Counter):
        is_interrupting = False

        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, self.at[1] == 2, False, {}

        def reset(self, *, seed=None, options=None):
            if self.is_interrupting:
                Short.is_interrupting = False
                signal.raise_signal(signal.SIGINT)
            return super().reset(seed=seed, options=options)

    module = importlib.import_module("envactors.integrations.gymnasium")
    envs = module.ActorVectorEnv([Short], backend="inline", autoreset_mode="SameStep")
    try:
        envs.reset(seed=0)
        envs.step(np.array([0]))
        Short.is_interrupting = True
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0]))
        with pytest.warns(UserWarning, match="interrupted"):
            obs = envs.step(np.array([0]))[0]
        assert obs.tolist() == [[0, 0]]
        assert envs.step(np.array([0]))[0].tolist() == [[0, 1]]
    finally:
        envs.close()


def test_sb3_learns_on_after_ctrl_c():
    """As with DummyVecEnv: `learn(reset_num_timesteps=False)` continues."""
    ppo = pytest.importorskip("stable_baselines3").PPO
    module = importlib.import_module("envactors.integrations.sb3")

    class Slow(Counter):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    envs = module.ActorVecEnv([Slow] * 2, backend=FORK_SERVER)
    try:
        model = ppo("MlpPolicy", envs, n_steps=64, batch_size=64, device="cpu")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            model.learn(100_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.learn(256, reset_num_timesteps=False)
        assert len([one for one in caught if "interrupted" in str(one.message)]) <= 1
        assert model.num_timesteps >= 256
    finally:
        envs.close()
