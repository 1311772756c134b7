"""Snapshots of envs with engines: MuJoCo continues bit for bit, and ALE where it reveals its whole state."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from wrapped import make, run

from envactors.state import gymnasium_snapshot

SNAPSHOT = gymnasium_snapshot()


def check(factory, before, after):
    """Checks that an env continues from a snapshot as it continued from that point: the same env, and a new one."""
    env = factory()
    env.reset(seed=1)
    run(env, before, 2)
    state = SNAPSHOT.get(env)
    expected = run(env, after, 3)
    SNAPSHOT.set(env, state)
    assert run(env, after, 3) == expected
    fresh = factory()
    SNAPSHOT.set(fresh, state)
    assert run(fresh, after, 3) == expected


# MuJoCo -----------------------------------------------------------------------------------------------


@pytest.fixture
def hopper():
    pytest.importorskip("mujoco")
    env = make("Hopper-v5")
    env.reset(seed=0)
    yield env
    env.close()


@pytest.mark.parametrize("name", ["Hopper-v5", "Ant-v5", "Humanoid-v5"])
def test_mujoco_continues_bit_for_bit(name):
    pytest.importorskip("mujoco")
    check(lambda: make(name), 55, 300)
    check(lambda: make(name, ["normal observation", "frame stack", "noise"]), 7, 60)


def test_all_that_an_env_reads_before_its_next_step_is_restored(hopper):
    data = hopper.unwrapped.data
    run(hopper, 20, 0)
    state = SNAPSHOT.get(hopper)
    names = ["time", "qpos", "qvel", "xpos", "xipos", "cinert", "cvel", "cfrc_ext", "qfrc_actuator", "qacc_warmstart"]
    before = {name: np.array(getattr(data, name)) for name in names}
    run(hopper, 20, 1)
    SNAPSHOT.set(hopper, state)
    assert all((getattr(data, name) == value).all() for name, value in before.items())


def test_parameters_of_a_mujoco_model_are_restored(hopper):
    model = hopper.unwrapped.model
    masses, timestep, gravity = model.body_mass.copy(), model.opt.timestep, model.opt.gravity.copy()
    state = SNAPSHOT.get(hopper)
    model.body_mass[:] = 1
    model.opt.timestep = 0.001
    model.opt.gravity[2] = -1
    run(hopper, 3, 0)
    SNAPSHOT.set(hopper, state)
    assert (model.body_mass == masses).all()
    assert (model.opt.timestep, model.opt.gravity.tolist()) == (timestep, gravity.tolist())


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        (lambda env: env.data.qpos, "the memory of an array belongs to a PyCapsule"),
        (lambda env: [env.data.qpos[1:]], "the memory of an array belongs to a PyCapsule"),
        (lambda env: env.data.body("torso"), "is a view of an engine"),
        (lambda env: env.model.opt, "is a view of an engine"),
        (lambda env: {"data": type(env.data)(env.model)}, "the MjData is inside another object"),
    ],
)
def test_views_of_mujoco_are_refused(hopper, attribute, reason):
    hopper.unwrapped.held = attribute(hopper.unwrapped)
    with pytest.raises(
        TypeError, match=rf"^cannot capture attribute 'held' of HopperEnv \(.*\): .*{reason}.* get and set$"
    ):
        SNAPSHOT.get(hopper)


def test_a_snapshot_of_another_model_is_refused(hopper):
    state = SNAPSHOT.get(hopper)
    walker = make("Walker2d-v5").unwrapped
    hopper.unwrapped.model, hopper.unwrapped.data = walker.model, walker.data
    with pytest.raises(ValueError, match=r"^the snapshot of the Mj\w+ has \d+ bytes: expected \d+\. Restore it into"):
        SNAPSHOT.set(hopper, state)


# ALE --------------------------------------------------------------------------------------------------


def pong(sticky, **options):
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    return gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=sticky, **options)


def test_ale_continues_bit_for_bit():
    pytest.importorskip("cv2")

    def factory():
        return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(pong(0.0)), 4)

    check(factory, 40, 1000)  # to the end of a game, and beyond


@pytest.mark.parametrize("obs_type", ["rgb", "grayscale", "ram"])
def test_observations_of_ale_are_restored(obs_type):
    check(lambda: wrappers.FrameStackObservation(pong(0.0, obs_type=obs_type), 2), 40, 60)


def test_sticky_actions_are_refused():
    env = pong(0.25)
    env.reset(seed=1)
    with pytest.raises(
        TypeError,
        match=r"^cannot capture attribute 'ale' of AtariEnv \(ALEInterface\): with sticky actions .* get and set$",
    ):
        SNAPSHOT.get(env)
