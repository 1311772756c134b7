"""Snapshots: states of envs that are taken, put back, and from which lost envs are restored."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import signal

import gymnasium
import numpy as np
import pytest
from gymenvs import put_state, stacked_cartpole, whole_state
from helpers import FORK_SERVER, SOON, journals, wait_for_path, wait_until, wait_while
from storms import checksum_of_run

import envactors as ea
from envactors.state import gymnasium_snapshot
from envactors.testing import EchoEnv

RESTART = ea.RestartPolicy(max_restarts=1000, backoff=0.0)


def make(n=4, *, every=50, **options):
    given = {
        "backend": FORK_SERVER,
        "restart": RESTART,
        "snapshot": ea.SnapshotPolicy(whole_state, put_state, every=every),
        **options,
    }
    return ea.VectorEnv([stacked_cartpole] * n, **given)


def run(envs, steps, rng, disturb=lambda step: None):
    """Everything that steps return, by step."""
    results = []
    for step in range(steps):
        disturb(step)
        obs, rewards, terminated, truncated, infos = envs.step(rng.integers(0, 2, envs.num_envs))
        assert not any("failure" in info for info in infos)
        results.append((obs.tobytes(), rewards.tobytes(), terminated.tobytes(), truncated.tobytes()))
    return results


@pytest.mark.parametrize("options", [{}, {"autoreset": "same_step"}, {"envs_per_actor": 2}])
@pytest.mark.parametrize("on_failure", ["raise", pytest.param("renew", marks=pytest.mark.soak), "replay"])
def test_the_steps_after_a_snapshot_come_again(options, on_failure):
    with make(on_failure=on_failure, **options) as envs:
        envs.reset(seed=3)
        run(envs, 100, np.random.default_rng(0))
        snapshots = envs.snapshot()
        first = run(envs, 200, np.random.default_rng(1))
        envs.restore(pickle.loads(pickle.dumps(snapshots)))
        assert run(envs, 200, np.random.default_rng(1)) == first
        assert envs.stats().steps[0] > 300


def test_a_snapshot_goes_into_another_env_of_another_vector():
    with make() as envs, make(backend="thread") as others:
        envs.reset(seed=3)
        others.reset(seed=9)
        run(envs, 70, np.random.default_rng(0))
        others.restore(envs.snapshot([2]) * 3, env_ids=[3, 0, 1])
        results = others.step([1, 1, 1, 1], env_ids=[0, 1, 2, 3])[0]
        expected = envs.step([1], env_ids=[2])[0][0]
        assert [np.array_equal(row, expected) for row in results] == [True, True, False, True]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_the_ends_and_seeds_of_episodes_come_again(autoreset):
    def play(envs):
        rng, seen = np.random.default_rng(1), []
        for _ in range(150):
            _, _, terminated, truncated, infos = envs.step(rng.integers(0, 2, 2))
            seen.append([*terminated, *truncated, *(info.get("episode_seed") for info in infos)])
        return seen

    options = {"autoreset": autoreset, "seed_episodes": True}
    with make(2, **options) as envs, make(2, **options) as others:
        envs.reset(seed=3)
        while not envs.step([1, 1])[2].any():
            pass
        snapshots = envs.snapshot()  # between the end of an episode and the autoreset of the next step
        expected = play(envs)
        assert sum(seed is not None for step in expected for seed in step[4:]) > 4
        for one in (envs, others):
            one.restore(snapshots)
            assert play(one) == expected


@pytest.mark.parametrize("options", [{}, {"envs_per_actor": 2}, {"autoreset": "same_step"}])
def test_crashed_envs_are_restored_from_their_last_snapshot(options):
    def kill(step):
        if step % 37 == 20:
            pid = envs.actors[step % len(envs.actors)].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    results = []
    for disturb in (lambda step: None, kill):
        with make(on_failure="replay", every=50, max_journal=60, **options) as envs:
            envs.reset(seed=3)
            results.append(run(envs, 250, np.random.default_rng(0), disturb))
            assert all(one.can_replay and one.age <= 60 for actor in envs.actors for one in journals(actor))
            stats = envs.stats().actors
    assert results[0] == results[1]
    assert sum(one.replays for one in stats) >= 6
    assert all(0 < one.longest_replay < SOON for one in stats)


def test_an_env_that_was_never_seeded_is_restored():
    results = []
    with make(1, on_failure="replay", every=10) as envs:
        envs.reset()
        run(envs, 30, np.random.default_rng(0))
        (snapshot,) = envs.snapshot()
        results.append(run(envs, 100, np.random.default_rng(1)))
        envs.restore([snapshot])
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        results.append(run(envs, 100, np.random.default_rng(1)))
        assert envs.stats().actors[0].restarts == 1
    assert results[0] == results[1]


def test_an_env_that_was_never_seeded_is_saved_after_so_many_steps():
    with make(2, on_failure="replay", every=10) as envs:
        envs.reset()
        run(envs, 25, np.random.default_rng(0))
        envs.get_attr("spec")  # behind what was asked of the workers for the journal
        assert all(one.can_replay and one.age < 10 for actor in envs.actors for one in journals(actor))
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        run(envs, 25, np.random.default_rng(0))
        assert envs.stats().actors[0].replays == 1


def test_a_state_whose_process_ends_while_it_is_saved_is_saved_by_the_next(tmp_path):
    def get_slowly(env):
        (tmp_path / "saving").touch()
        wait_while(tmp_path / "held")
        return whole_state(env)

    (tmp_path / "held").touch()
    with make(1, on_failure="replay", snapshot=ea.SnapshotPolicy(get_slowly, put_state, every=10)) as envs:
        envs.reset(seed=0)
        run(envs, 10, np.random.default_rng(0))
        envs.send([0])
        wait_for_path(tmp_path / "saving")
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        (tmp_path / "held").unlink()
        assert "failure" not in envs.recv(timeout=SOON).infos[0]
        assert [(one.can_replay, one.age) for one in journals(envs.actors[0])] == [(True, 1)]


def test_a_state_that_cannot_be_saved_is_logged_and_fails_no_step(caplog):
    snapshot = ea.SnapshotPolicy(lambda env: 1 / 0, put_state, every=10)
    with make(2, on_failure="replay", snapshot=snapshot) as envs:
        envs.reset(seed=0)
        run(envs, 25, np.random.default_rng(0))
        wait_until(lambda: sum("cannot be saved" in record.message for record in caplog.records) == 4)
        with pytest.raises(ZeroDivisionError):
            envs.snapshot()
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        run(envs, 25, np.random.default_rng(0))


def test_an_env_that_could_not_be_restored_needs_a_reset():
    def fail(env, state):
        raise RuntimeError("no")

    with make(2, snapshot=ea.SnapshotPolicy(whole_state, fail)) as envs:
        envs.reset(seed=0)
        snapshots = envs.snapshot()
        with pytest.raises(RuntimeError, match="no"):
            envs.restore(snapshots[:1])
        with pytest.raises(ea.VectorInputError, match="env 0 needs a reset first"):
            envs.step([0, 0])
        envs.reset()
        envs.step([0, 0])


def test_invalid_snapshot_calls_raise():
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorEnvError, match="was made without snapshot: expected VectorEnv"):
            envs.snapshot()
    with make(2, backend="inline") as envs:
        with pytest.raises(ea.VectorInputError, match="env 0 needs a reset"):
            envs.snapshot()
        envs.reset(seed=0)
        snapshots = envs.snapshot()
        with pytest.raises(ea.VectorInputError, match="1 env_ids for 2 snapshots: expected one each"):
            envs.restore(snapshots, env_ids=[1])
        with pytest.raises(ea.VectorInputError):
            envs.restore(snapshots, env_ids=[0, 5])
        envs.restore(iter(snapshots))
        with pytest.raises(TypeError, match=r"^a snapshot is 3: expected EnvSnapshot"):
            envs.restore([*snapshots, 3])
        envs.send([0, 0])
        with pytest.raises(ea.AlreadyPendingError):
            envs.snapshot()
        envs.recv()
    with pytest.raises(ValueError, match=r"SnapshotPolicy\(every=0\): expected an int > 0"):
        ea.SnapshotPolicy(whole_state, put_state, every=0)
    with pytest.raises(TypeError, match=r"SnapshotPolicy\(set=3\): expected a function"):
        ea.SnapshotPolicy(whole_state, 3)


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_a_state_that_cannot_be_pickled_raises_an_error_that_says_so(backend):
    with make(2, backend=backend, snapshot=ea.SnapshotPolicy(lambda env: (i for i in ()), put_state)) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.SerializationError, match=r"^env 0's state cannot be pickled: TypeError"):
            envs.snapshot()
        assert envs.step([0, 0])[2].tolist() == [False, False]


def test_the_state_is_a_copy():
    """What an env does after a snapshot does not change it, in whatever process it is."""
    with make(1, backend="inline") as envs:
        envs.reset(seed=0)
        (snapshot,) = envs.snapshot()
        before = copy.deepcopy(snapshot.state)
        run(envs, 30, np.random.default_rng(0))
        assert snapshot.state == before


class RandomPolicy:
    def __call__(self, obs, context):
        return context.rng.integers(0, 2, len(obs))


@pytest.mark.parametrize(
    "options",
    [{}, {"backend": "inline"}, {"on_failure": "replay"}, {"envs_per_actor": 2, "autoreset": "same_step"}],
)
def test_rollouts_begin_at_the_restored_observations(options):
    with make(2, **options) as envs:
        envs.reset(seed=3)
        obs = envs.step([0, 1])[0]
        snapshots = envs.snapshot()
        run(envs, 5, np.random.default_rng(0))
        rollouts = []
        for _ in range(2):
            envs.restore(snapshots)
            envs.set_policy(RandomPolicy, seed=1)
            rollouts.append(envs.rollout(30))
        np.testing.assert_array_equal(rollouts[0].obs[0], obs)
        for name in ("obs", "rewards", "starts", "terminated"):
            np.testing.assert_array_equal(getattr(rollouts[0], name), getattr(rollouts[1], name))


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
def test_the_last_batch_after_a_restore_is_that_of_the_snapshots(backend):
    with make(2, backend=backend, on_failure="renew") as envs:
        with pytest.raises(ea.NothingPendingError):
            envs.last_batch()
        obs, _ = envs.reset(seed=1)
        last = envs.last_batch()
        np.testing.assert_array_equal(last.obs, obs)
        assert last.rewards.tolist() == [0, 0]
        obs, rewards, *_ = envs.step([0, 1])
        snapshots = envs.snapshot()
        envs.step([1, 1])
        envs.restore(snapshots)
        last = envs.last_batch()
        np.testing.assert_array_equal(last.obs, obs)
        assert last.rewards.tolist() == rewards.tolist()
        envs.restore(snapshots[:1], env_ids=[1])
        np.testing.assert_array_equal(envs.last_batch().obs[1], obs[0])


@pytest.mark.parametrize("backend", [FORK_SERVER, "inline"])
def test_an_env_that_has_lost_its_episode_gives_no_snapshot_and_can_be_restored(backend):
    with make(2, backend=backend) as envs:
        envs.reset(seed=1)
        snapshots = envs.snapshot()
        expected = envs.step([0, 1])[0]
        envs.actors[0].kill(restart=True)
        with pytest.raises(ea.ActorDiedError):
            envs.snapshot()
        envs.restore(snapshots)
        np.testing.assert_array_equal(envs.step([0, 1])[0], expected)


# Long runs ------------------------------------------------------------------------------------------------


def pong():
    gymnasium.register_envs(importlib.import_module("ale_py"))
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "steps"), [("hopper", 1_000_000), ("pong", 1_000_000)])
def test_many_steps_of_engines_with_kills_give_the_observations_of_an_undisturbed_run(name, steps):
    """Seeded once: what brings them back is their snapshots."""
    pytest.importorskip({"hopper": "mujoco", "pong": "ale_py"}[name])
    dice = np.random.default_rng(2)
    if name == "hopper":
        make, actions = functools.partial(gymnasium.make, "Hopper-v5"), dice.uniform(-1, 1, (997, 8, 3)).astype("f4")
    else:
        make, actions = pong, dice.integers(0, 6, (997, 8))
    every = {"hopper": 500, "pong": 50}[name]
    options = {"snapshot": gymnasium_snapshot(every=every), "max_journal": 600}
    if name == "pong":  # four envs take longer to make, and for 500 steps, than there is between two kills
        options |= {"standbys": 2, "backend": ea.ProcessBackend(preload=("gymnasium", "ale_py", "cv2"))}
    undisturbed, _, restarts = checksum_of_run(make, actions, steps, **options)
    assert restarts == 0
    disturbed, longest, restarts = checksum_of_run(make, actions, steps, 0.5, **options)
    assert disturbed == undisturbed
    assert restarts >= 10
    assert longest <= every + 100
