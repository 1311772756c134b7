"""Each option of a vector has an effect in each drop-in, or is refused with the reason."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import pickle
import signal
import warnings

import numpy as np
import pytest
from helpers import FORK_SERVER, wait_until
from optionenvs import Alf, Counting, Managed, Parallel, events

import envactors as ea
from envactors.vector.options import OPTIONS

KEPT = ea.RestartPolicy(max_restarts=math.inf, backoff=0.0)


class Driver:
    """Uses a drop-in as its library does.

    Attributes:
        cls: The class of the drop-in.
        env: The class of its envs.
        own: The options that the library has as arguments of its own, with its own meaning.
    """

    own = ()

    def __init__(self, log, n=2, length=50, **options):
        self.n = n
        self.envs = self.make([functools.partial(self.env, log, length)] * n, options)

    def make(self, factories, options):
        return self.cls(factories, **options)

    def reset(self):
        self.envs.reset()

    def seeded_reset(self):
        self.envs.reset(seed=7)

    def step(self):
        return self.envs.step(np.zeros(self.n, np.int64))

    def close(self):
        self.envs.close()


class Gymnasium(Driver):
    env = Counting
    own = ("copy",)

    def __init__(self, *args, **options):
        pytest.importorskip("gymnasium")
        from envactors.integrations.gymnasium import ActorVectorEnv

        self.cls = ActorVectorEnv
        super().__init__(*args, **options)


class PettingZoo(Driver):
    env = Parallel
    own = ("copy",)

    def __init__(self, *args, **options):
        pytest.importorskip("pettingzoo")
        from envactors.integrations.pettingzoo import ActorParallelEnv

        self.cls = ActorParallelEnv
        super().__init__(*args, **options)

    def step(self):
        return self.envs.step({"a": np.zeros(self.n, np.int64)})


class StableBaselines(Driver):
    env = Counting

    def __init__(self, *args, **options):
        pytest.importorskip("stable_baselines3")
        from envactors.integrations.sb3 import ActorVecEnv

        self.cls = ActorVecEnv
        super().__init__(*args, **options)

    def seeded_reset(self):
        self.envs.seed(7)
        self.envs.reset()


class Tianshou(Driver):
    env = Counting

    def __init__(self, *args, **options):
        pytest.importorskip("tianshou")
        from envactors.integrations.tianshou import ActorVectorEnv

        self.cls = ActorVectorEnv
        super().__init__(*args, **options)

    def step(self):
        _, _, terminated, truncated, _ = super().step()
        if (ended := np.flatnonzero(terminated | truncated)).size:  # as tianshou's collectors do
            self.envs.reset(ended)


class TorchRL(Driver):
    env = Counting

    def __init__(self, *args, **options):
        pytest.importorskip("torchrl")
        from envactors.integrations.torchrl import ActorEnv

        self.cls = functools.partial(ActorEnv, categorical_action_encoding=True)
        super().__init__(*args, **options)

    def reset(self):
        self.state = self.envs.reset()

    def seeded_reset(self):
        self.envs.set_seed(7)
        self.state = self.envs.reset()

    def step(self):
        self.state = self.envs.step(self.envs.rand_action(self.state))["next"]
        if self.state["done"].any():
            self.reset()


class DIEngine(Driver):
    env = Managed

    def make(self, factories, options):
        from envactors.integrations.ding import SyncActorEnvManager

        manager = SyncActorEnvManager(factories, **{"backend": FORK_SERVER, **options})
        self.is_reset = False
        manager.launch()  # which also resets
        return manager

    def reset(self):
        pass

    def step(self):
        return self.envs.step({env_id: np.int64(0) for env_id in self.envs.ready_obs})


class ALF(Driver):
    env = Alf

    def make(self, factories, options):
        from envactors.integrations.alf import ActorParallelEnvironment

        options = {"backend": FORK_SERVER, **options}
        return ActorParallelEnvironment(factories, False, torch_num_threads_per_env=None, **options)

    def seeded_reset(self):
        self.envs.seed([7 + i for i in range(self.n)])
        self.envs.reset()

    def close(self):
        self.envs.close()


class MLAgents(Driver):
    def make(self, factories, options):
        pytest.importorskip("mlagents_envs")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what protobuf says of its messages
            from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig
            from unityenvs import Unity

            from envactors.integrations.mlagents import ActorEnvManager
        log, _ = factories[0].args
        return ActorEnvManager(functools.partial(Unity, log), EngineConfig.default_config(), len(factories), **options)

    env = Counting  # in the place of which `make` has another

    def step(self):
        return self.envs.get_steps()


DRIVERS = {kind.__name__: kind for kind in Driver.__subclasses__()}


@pytest.fixture
def make(request, tmp_path):
    """Returns a function that makes the driver under test, and closes it at the end."""
    with contextlib.ExitStack() as stack:

        def make_one(kind, **options):
            driver = kind(str(tmp_path / "log"), **options)
            stack.callback(driver.close)
            return driver

        yield make_one


def lose(actor):
    os.kill(actor.pid, signal.SIGKILL)


# The effects ----------------------------------------------------------------------------------------------


def envs_per_actor(make, kind, log, tmp_path):
    driver = make(kind, n=4, envs_per_actor=2)
    assert len(driver.envs.actors) == 2


def autoreset(make, kind, log, tmp_path):
    driver = make(kind, length=2, autoreset="same_step")
    driver.reset()
    driver.step()
    driver.step()
    assert sum(event.what == "reset" for event in events(log)) == 4


def on_failure(make, kind, log, tmp_path):
    driver = make(kind, on_failure="renew")
    driver.reset()
    lose(driver.envs.actors[0])
    driver.step()
    wait_until(lambda: driver.envs.actors[0].incarnation == 1)


def max_journal(make, kind, log, tmp_path):
    driver = make(kind, max_journal=1, on_failure="replay", restart=KEPT)
    driver.seeded_reset()
    for _ in range(3):
        driver.step()
    lose(driver.envs.actors[0])
    for _ in range(2):
        driver.step()
    # A replay would repeat three steps beside those that are new.
    again = [event for event in events(log) if event.incarnation == 1]
    assert sum(event.what == "step" for event in again) <= 2
    assert sum(event.what == "reset" for event in again) == 1


def deadlines(make, kind, log, tmp_path):
    driver = make(kind, deadlines=ea.Deadlines(step=0.5))
    driver.reset()
    driver.envs.actors[0].call("start_to_hang").result()
    with contextlib.suppress(Exception):
        for _ in range(1000):  # ML-Agents returns the other env's steps
            driver.step()
            if driver.envs.actors[0].stats().last_failure is not None:
                break
    assert isinstance(driver.envs.actors[0].stats().last_failure, ea.ActorTimeoutError)


def restart(make, kind, log, tmp_path):
    # Where failures are raised, the libraries of the others replace no process.
    also = {} if kind in (Tianshou, MLAgents) else {"on_failure": "renew"}
    driver = make(kind, restart=ea.RestartPolicy(max_restarts=0), **also)
    driver.reset()
    lose(driver.envs.actors[0])
    wait_until(lambda: driver.envs.actors[0].state is ea.ActorState.DEAD)


def recycle(make, kind, log, tmp_path):
    driver = make(kind, length=2, recycle=ea.RecyclePolicy(max_steps=1))
    driver.reset()
    for _ in range(9):
        driver.step()
    assert any(event.incarnation > 0 for event in events(log) if event.what == "step")
    assert driver.envs.actors[0].stats().restarts == 0


def standbys(make, kind, log, tmp_path):
    make(kind, standbys=1)
    wait_until(lambda: any(event.actor == "standby-0" for event in events(log)))


def env_vars(make, kind, log, tmp_path):
    driver = make(kind, env_vars={"OF_THE_TEST": "here"})
    assert driver.envs.actors[1].call("variable", "OF_THE_TEST").result() == "here"


def backend(make, kind, log, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DI-engine has a deadline, which no thread keeps
        driver = make(kind, backend="thread")
    assert driver.envs.actors[0].call("where").result() == os.getpid()


def copy(make, kind, log, tmp_path):
    driver = make(kind, copy=False)
    driver.reset()
    obs = driver.step()[0]
    before = obs.copy()
    driver.step()
    driver.step()
    assert not np.array_equal(obs, before)


def max_running(make, kind, log, tmp_path):
    driver = make(kind, n=3, max_running=1)
    driver.reset()
    driver.step()
    spans = sorted((event.begin, event.end) for event in events(log) if event.what != "made")
    assert len(spans) >= 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def seed_episodes(make, kind, log, tmp_path):
    driver = make(kind, length=2, seed_episodes=True)
    driver.reset()
    for _ in range(5):
        driver.step()
    seeds = [event.seed for event in events(log) if event.what == "reset"]
    assert len(seeds) >= 4
    assert None not in seeds
    assert len(set(seeds)) == len(seeds)


def snapshot(make, kind, log, tmp_path):
    driver = make(kind, snapshot=ea.SnapshotPolicy(lambda env: type(env).__name__, lambda env, state: None))
    driver.reset()
    taken = driver.envs.vector.snapshot()
    assert [pickle.loads(one.state) for one in taken] == [kind.env.__name__] * 2


def name(make, kind, log, tmp_path):
    driver = make(kind, name="mine")
    assert driver.envs.actors[1].name.startswith("mine-")


def crash_dir(make, kind, log, tmp_path):
    driver = make(kind, crash_dir=tmp_path / "crashes", restart=KEPT)
    driver.reset()
    os.kill(driver.envs.actors[1].pid, signal.SIGKILL)
    wait_until(lambda: list((tmp_path / "crashes").glob("*/report.json")))


EFFECTS = {option: globals()[option] for option in OPTIONS}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("library", DRIVERS)
def test_an_option_has_an_effect_or_is_rejected_with_the_reason(library, name, make, tmp_path):
    kind = DRIVERS[library]
    if name in kind.own:
        return  # it means what it means in the library
    try:
        EFFECTS[name](make, kind, tmp_path / "log", tmp_path)
    except ea.VectorInputError as error:
        said, _, reason = str(error).partition(": ")
        assert f"does not take {name}=" in said
        assert len(reason.split()) >= 5
        assert not (tmp_path / "log").exists()  # nothing was started


@pytest.mark.parametrize("library", DRIVERS)
def test_an_unknown_option_names_the_nearest_one(library, make):
    with pytest.raises(TypeError, match="got the unknown option 'max_runing': did you mean 'max_running'"):
        make(DRIVERS[library], max_runing=1)


@pytest.mark.parametrize("library", [name for name in DRIVERS if name != "mlagents"])
def test_a_snapshot_policy_of_another_class_is_refused(library, make):
    with pytest.raises(ea.VectorInputError, match=r"snapshot is 5: expected a SnapshotPolicy, or None|does not take"):
        make(DRIVERS[library], snapshot=5)


@pytest.mark.parametrize("library", DRIVERS)
def test_actors_are_the_handles_of_processes(library, make):
    driver = make(DRIVERS[library])
    assert [type(actor) for actor in driver.envs.actors] == [ea.ActorHandle] * 2
    if library != "MLAgents":  # without a vector
        assert isinstance(driver.envs.vector, ea.VectorEnv)
        assert list(driver.envs.vector.actors) == list(driver.envs.actors)
