"""Checkpoints: a vector on disk, from which another caller continues."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from envactors.state.checkpoint_file import read_file, write_file
from gymenvs import put_state, stacked_cartpole, whole_state
from helpers import FORK_SERVER, SOON
from test_snapshots import RESTART, run

import envactors as ea

OPTIONS = {"backend": FORK_SERVER, "restart": RESTART}


def make(n=3, make_env=stacked_cartpole, **options):
    return ea.VectorEnv([make_env] * n, **{**OPTIONS, "on_failure": "replay", **options})


def resume(path, n=3, make_env=stacked_cartpole, **options):
    return ea.VectorEnv.resume(path, [make_env] * n, **{**OPTIONS, **options})


# Statistics that continue over episodes make an episode depend on those before it.
stack_alone = functools.partial(stacked_cartpole, normalized=False)
WAYS = {
    "seeded once": {},
    "seeded episodes": {"make_env": stack_alone, "seed_episodes": True},
    "same step": {"make_env": stack_alone, "seed_episodes": True, "autoreset": "same_step"},
    "snapshots": {"snapshot": ea.SnapshotPolicy(whole_state, put_state, every=40)},
}


@pytest.mark.parametrize(("way", "packing"), [*((way, 1) for way in WAYS), ("seeded episodes", 3), ("snapshots", 3)])
def test_a_resumed_vector_continues_like_the_original(way, packing, tmp_path):
    options, path = WAYS[way], tmp_path / "envs"
    with make(**options) as envs:
        envs.reset(seed=5)
        run(envs, 150, np.random.default_rng(0))
        envs.set_attr("length", [0.5, 0.6, 0.7])
        envs.checkpoint(path)
        last, steps = envs.last_batch(), envs.stats().steps
        expected = run(envs, 200, np.random.default_rng(1))
    extra = {name: options[name] for name in ("snapshot", "make_env") if name in options}
    with resume(path, envs_per_actor=packing, **extra) as envs:
        assert envs.stats().steps == steps
        again = envs.last_batch()
        assert np.array_equal(again.obs, last.obs)
        assert np.array_equal(again.rewards, last.rewards)
        assert run(envs, 100, np.random.default_rng(1)) == expected[:100]
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        envs.checkpoint(path)
        rng = np.random.default_rng(1)
        rng.integers(0, 2, (100, 3))
        assert run(envs, 100, rng) == expected[100:]
    with resume(path, **extra) as envs:
        rng = np.random.default_rng(1)
        rng.integers(0, 2, (100, 3))
        assert run(envs, 100, rng) == expected[100:]


def test_the_ends_of_episodes_are_where_they_were(tmp_path):
    path = tmp_path / "envs"
    with make(1, autoreset="disabled", snapshot=ea.SnapshotPolicy(whole_state, put_state)) as envs:
        envs.reset(seed=0)
        over = False
        while not over:
            _, _, terminated, truncated, _ = envs.step([1])
            over = terminated[0] or truncated[0]
        envs.checkpoint(path)
        expected = envs.reset()[0]
    with resume(path, 1, snapshot=ea.SnapshotPolicy(whole_state, put_state)) as envs:
        with pytest.raises(ea.VectorInputError, match="needs a reset first"):
            envs.step([1])
        assert np.array_equal(envs.reset()[0], expected)
        assert envs.stats().episodes == [1]


CALLER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import envactors as ea
from gymenvs import stacked_cartpole

def make_env():
    return stacked_cartpole(normalized=False)

path, every = sys.argv[2], 7
if os.path.exists(path):
    envs = ea.VectorEnv.resume(path, [make_env] * 3, checkpoint_every=every)
else:
    envs = ea.VectorEnv([make_env] * 3, on_failure="replay", seed_episodes=True, checkpoint_every=every)
    envs.reset(seed=5)
    envs.checkpoint(path)
print("from", *envs.stats().steps, flush=True)
while True:
    steps = envs.stats().steps
    actions = [int(np.random.default_rng((env, count)).integers(0, 2)) for env, count in enumerate(steps)]
    obs, rewards, terminated, truncated, infos = envs.step(actions)
    for env, count in enumerate(steps):
        print(env, count, obs[env].tobytes().hex(), terminated[env], truncated[env], flush=True)
"""


def run_and_kill(path, lines):
    """Runs the caller until it has printed this many lines; what it has printed."""
    command = [sys.executable, "-c", textwrap.dedent(CALLER), str(Path(__file__).parents[1]), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        try:
            return [caller.stdout.readline().split() for _ in range(lines + 1)]
        finally:
            caller.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_a_caller_that_is_killed_at_any_moment_is_resumed(kills, tmp_path):
    path, seed = tmp_path / "envs", random.randrange(1 << 30)
    chance = random.Random(seed)
    (_, *expected) = run_and_kill(tmp_path / "undisturbed", 3 * 100 * kills)
    # An env's observation after a number of steps; that of a reset, which is no step, comes with the same number.
    known = {}
    for env, count, *rest in expected:
        known.setdefault((env, count), []).append(rest)
    reached = [0, 0, 0]
    for _ in range(kills):
        (first, *start), *told = run_and_kill(path, 3 * chance.randrange(10, 70))
        assert first == "from"
        # It may have made more steps than it has printed.
        assert all(before - int(now) <= 7 for before, now in zip(reached, start, strict=True)), seed
        for env, count, *rest in told:
            assert rest in known[env, count], f"seed {seed}: env {env} after {count} steps"
            reached[int(env)] = int(count)


def test_a_file_is_whole_or_none(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"before")
    write_file(path, b"payload")
    assert read_file(path) == b"payload"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ea.VectorEnvError, match=r"is not a checkpoint|was truncated"):
            read_file(path)
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(ea.VectorEnvError, match="was truncated or changed"):
        read_file(path)
    later = content[:21] + bytes([9]) + content[22:]
    path.write_bytes(later)
    with pytest.raises(ea.VectorEnvError, match="has format 9: expected 3"):
        read_file(path)
    with pytest.raises(OSError, match="missing"):
        write_file(tmp_path / "missing" / "file", b"")


def test_invalid_checkpoint_calls_raise(tmp_path):
    path = tmp_path / "envs"
    with (
        make(on_failure="renew") as envs,
        pytest.raises(ea.VectorEnvError, match="expected one with on_failure='replay'"),
    ):
        envs.reset(seed=0)
        envs.checkpoint(path)
    with make(1) as envs:
        with pytest.raises(ea.NothingPendingError, match="reset them first"):
            envs.last_batch()
        envs.reset()
        with pytest.raises(ea.VectorEnvError, match=r"a checkpoint of envs \[0\], which cannot be restored"):
            envs.checkpoint(path)
        envs.reset(seed=0)
        envs.send([0])
        with pytest.raises(ea.AlreadyPendingError):
            envs.checkpoint(path)
        envs.recv(timeout=SOON)
        envs.checkpoint(path)
    with pytest.raises(ea.VectorEnvError, match="has 1 envs: expected as many factories, not 2"):
        resume(path, 2)
    with pytest.raises(ea.VectorEnvError, match=r"was written by a vector with {'autoreset': 'next_step'}"):
        resume(path, 1, autoreset="same_step")
    with pytest.raises(ea.VectorEnvError, match="env 0 returned other observations than before"):
        ea.VectorEnv.resume(path, [lambda: stacked_cartpole().env], **OPTIONS)
    with pytest.raises(ea.VectorInputError, match="checkpoint_every is 0: expected an int >= 1"):
        make(1, checkpoint_every=0)
