"""The drop-in for Gymnasium's AsyncVectorEnv, one behavior per test."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import SOON, clocked, episode_seed, most_at_once

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")

from gymenvs import Teller  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError  # noqa: E402
from gymnasium.utils.env_checker import data_equivalence  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from envactors.integrations.gymnasium import ActorVectorEnv, make_vec, register  # noqa: E402
from envactors.process.starting import DEFAULT  # noqa: E402
from envactors.remote import LocalNodes  # noqa: E402


def cartpole(**kwargs):
    return functools.partial(gymnasium.make, "CartPole-v1", **kwargs)


class Probe(gymnasium.Env):
    """Counts its steps; does what its action says."""

    observation_space = spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = spaces.Discrete(100)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, length=1000, gate=None):
        self.count, self.length, self.gate, self.level = 0, length, gate, 1.5

    def _obs(self):
        return np.array([self.count, self.level], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._wait(options)
        self.count = seed or 0
        return self._obs(), {"seed": seed, "options": options} if options else {}

    def _wait(self, options):
        if options and options.get("wait"):
            self.wait()

    def wait(self):
        while not Path(self.gate).exists():
            time.sleep(0.005)
        return "waited"

    def step(self, action):
        if action == 66:
            raise LookupError("no such thing", 66)
        if action == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 88:
            self.wait()
        self.count += 1
        info = {"count": self.count} if action == 9 else {}
        return self._obs(), float(action), self.count >= self.length, False, info

    def render(self):
        return np.full((2, 2, 3), self.count, np.uint8)

    def pid(self):
        return os.getpid()


def acts(*values):
    return np.array(values, np.int64)


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


# The constructor ---------------------------------------------------------------------------------------------


def test_the_constructors_parameters_are_async_vector_envs():
    theirs = list(inspect.signature(AsyncVectorEnv.__init__).parameters.values())
    ours = list(inspect.signature(ActorVectorEnv.__init__).parameters.values())
    known = [p.name for p in theirs]
    assert [p.name for p in ours[:10]][: len(known)] == known
    assert [p.kind for p in ours[10:]] == [inspect.Parameter.VAR_KEYWORD]
    for mine, its in zip(ours[:10], theirs, strict=False):
        if mine.name != "shared_memory":  # None means "where possible"
            assert mine.default == its.default


def test_a_custom_worker_function_raises_with_the_reason():
    with pytest.raises(ValueError, match=r"pipes and the queue of Gymnasium's own.*Move its code into a"):
        ActorVectorEnv([Probe], worker=lambda *_: None)


def test_invalid_arguments_raise():
    for error, kwargs in [
        ("cannot find context for 'threads'", {"context": "threads"}),
        ("expected only one", {"context": "spawn", "backend": "thread"}),
        ("`max_concurrency` must be an integer or None, got", {"max_concurrency": 2.0}),
        ("`max_concurrency` must be a positive or None, got 0", {"max_concurrency": 0}),
        ("'other' is not a valid AutoresetMode", {"autoreset_mode": "other"}),
        ("Invalid `observation_mode`, expected: 'same' or", {"observation_mode": "all"}),
    ]:
        with pytest.raises(ValueError, match=error):
            ActorVectorEnv([Probe], **kwargs)
    with pytest.raises(TypeError, match="Expected both elements of observation_mode to be Spaces"):
        ActorVectorEnv([Probe], observation_mode=(1, 2))


@pytest.mark.fresh_processes
@pytest.mark.parametrize(("contexts", "method"), [(["loky"], "loky"), (["fork", "spawn", "forkserver"], DEFAULT)])
def test_context_is_how_processes_start(contexts, method):
    with contextlib.ExitStack() as stack:
        for context in contexts:  # open at once, so that they share a helper
            envs = ActorVectorEnv([Probe], context=context)
            stack.callback(envs.close)
            assert envs.actors[0]._actor.config.backend.start_method == method
            assert envs.reset(seed=3)[0].tolist() == [[3, 1.5]]


@pytest.mark.parametrize("limit", [1, np.int64(2), 9, None])
def test_max_concurrency_limits_how_many_run_and_each_keeps_its_process(tmp_path, limit):
    kind = clocked(Probe, tmp_path / "log")
    envs = ActorVectorEnv([lambda: kind(length=3)] * 5, max_concurrency=limit, autoreset_mode="SameStep")
    assert len(set(envs.call("pid"))) == 5
    envs.reset(seed=1)
    for _ in range(4):
        obs = envs.step(np.zeros(5, np.int64))[0]
    assert obs.shape == (5, 2)
    most = most_at_once(tmp_path / "log")
    assert most <= limit if limit is not None and limit < 5 else 2 < most <= 5
    envs.close()


# No dummy env, spaces ----------------------------------------------------------------------------------------


def test_no_env_is_made_in_the_callers_process(tmp_path):
    def make():
        (tmp_path / str(os.getpid())).touch()
        return Probe()

    envs = ActorVectorEnv([make] * 2, observation_mode="different")
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert pids == set(envs.call("pid"))
    assert os.getpid() not in pids
    envs.close()


class Custom(spaces.Space):
    def sample(self, mask=None, probability=None):
        return "a word"

    def contains(self, x):
        return isinstance(x, str)

    def __eq__(self, other):
        return type(other).__name__ == "Custom"

    __hash__ = None


class Shaped(Custom):
    """A custom space that says what its values look like; in Gymnasium it makes tuples all the same."""

    def __init__(self):
        super().__init__((2,), np.float32)

    def sample(self, mask=None, probability=None):
        return np.array([1, 2], np.float32)

    def contains(self, x):
        return np.shape(x) == (2,)

    def __eq__(self, other):
        return type(other).__name__ == "Shaped"

    __hash__ = None


BOX = spaces.Box(-1, 1, (2,), np.float32)
SPACES = [
    BOX,
    spaces.Box(0, 255, (3, 3), np.uint8),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Discrete(5, start=-1),
    spaces.MultiDiscrete([[2, 3], [3, 2]]),
    spaces.MultiBinary([2, 3]),
    spaces.Text(6),
    spaces.Graph(BOX, spaces.Discrete(3)),
    spaces.Sequence(spaces.Discrete(4)),
    spaces.Sequence(BOX, stack=True),
    spaces.OneOf([spaces.Discrete(3), BOX]),
    Custom(),
    Shaped(),
    spaces.Tuple([spaces.Discrete(3), spaces.Tuple([BOX, spaces.Text(4)])]),
    spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Graph(BOX, None), d=spaces.Discrete(2)), e=spaces.Tuple([BOX, BOX])),
]


class Shows(gymnasium.Env):
    def __init__(self, space):
        self.observation_space, self.action_space = copy.deepcopy(space), copy.deepcopy(space)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        # Of a float Gymnasium would say that it casts it.
        assert (np.asarray(action) if isinstance(action, np.floating) else action) in self.action_space, action
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.mark.parametrize("space", SPACES, ids=lambda space: str(space)[:30])
def test_all_spaces_give_gymnasiums_results_by_default(space):
    envs = ActorVectorEnv([functools.partial(Shows, space)] * 2, autoreset_mode="SameStep")
    reference = SyncVectorEnv([functools.partial(Shows, space)] * 2, autoreset_mode="SameStep")
    assert envs.single_observation_space == reference.single_observation_space
    assert envs.observation_space == reference.observation_space
    assert envs.action_space == reference.action_space
    assert data_equivalence(envs.reset(seed=4)[0], reference.reset(seed=4)[0])
    for _ in range(2):
        actions = envs.action_space.sample()
        ours, theirs = envs.step(actions), reference.step(actions)
        assert data_equivalence(ours[0], theirs[0])
        assert data_equivalence(tuple(ours[4]["final_obs"]), tuple(theirs[4]["final_obs"]))
    kept = ours[0]
    mask = {"reset_mask": np.array([False, True])}
    assert data_equivalence(envs.reset(seed=9, options=dict(mask))[0], reference.reset(seed=9, options=dict(mask))[0])
    assert data_equivalence(kept, theirs[0])
    envs.close()
    reference.close()


def test_shared_memory_true_rejects_a_custom_space():
    for space in (Custom(), spaces.Tuple([BOX, Custom()])):
        with pytest.raises(ValueError, match="omit shared_memory") as caught:
            ActorVectorEnv([functools.partial(Shows, space)] * 2, shared_memory=True)
        assert isinstance(caught.value.__cause__, gymnasium.error.CustomSpaceError)


@pytest.mark.parametrize("copies", [True, False])
def test_shared_memory_is_accepted_and_changes_no_result(copies):
    fns = [functools.partial(Probe, length) for length in (3, 4)]
    seen = []
    for shared_memory in (None, True, False):
        envs = ActorVectorEnv(fns, shared_memory=shared_memory, copy=copies)
        assert envs.shared_memory is (shared_memory is not False)
        results = [copy.deepcopy(envs.reset(seed=1))]
        for turn in range(6):
            result = envs.step(acts(turn, 2))
            assert np.shares_memory(result[0], envs.observations) is not copies
            results.append(copy.deepcopy(result))
        seen.append(results)
        envs.close()
    assert data_equivalence(seen[0], seen[1])
    assert data_equivalence(seen[0], seen[2])
    envs = ActorVectorEnv([functools.partial(Shows, Custom())] * 2, shared_memory=False)
    envs.close()


def test_observation_mode():
    boxes = [spaces.Box(0, i + 1, (2,), np.float32) for i in range(3)]
    fns = [functools.partial(Shows, box) for box in boxes]
    with pytest.raises(
        RuntimeError, match=r"not equivalent\. If this is intentional, use `observation_mode='different'"
    ):
        ActorVectorEnv(fns)
    batched = spaces.Box(0, 3, (3, 2), np.float32)
    for mode in ("different", (batched, boxes[2])):
        with pytest.raises(RuntimeError, match="action space"):
            ActorVectorEnv(fns, observation_mode=mode)
    with pytest.raises(RuntimeError, match=r"action space.*\(the action spec of env 1"):
        ActorVectorEnv([functools.partial(Watches, BOX), functools.partial(Shows, BOX)])
    fns = [functools.partial(Watches, box) for box in boxes]
    for mode, space, single in [
        ("different", gymnasium.vector.utils.batch_differing_spaces(boxes), boxes[0]),
        ((batched, boxes[2]), batched, boxes[2]),
    ]:
        envs = ActorVectorEnv(fns, observation_mode=mode)
        assert envs.observation_space == space
        assert envs.single_observation_space == single
        assert envs.reset()[0].shape == (3, 2)
        envs.close()
    fns = [functools.partial(Watches, spaces.Box(0, 1, (i + 1,))) for i in range(3)]
    for mode in ("same", "different", (batched, boxes[2])):
        with pytest.raises(RuntimeError, match=r"not equivalent|do not share"):
            ActorVectorEnv(fns, observation_mode=mode)
    fns = [functools.partial(Watches, boxes[0])] * 2
    with pytest.raises(RuntimeError, match="do not share a common shape and dtype"):
        ActorVectorEnv(fns, observation_mode=(batched, spaces.Box(0, 1, (2,), np.float64)))


class Watches(Shows):
    def __init__(self, space):
        super().__init__(space)
        self.action_space = spaces.Discrete(2)


# Reset, step, call -------------------------------------------------------------------------------------------


def test_async_and_wait_methods_are_the_halves_of_the_synchronous_ones():
    envs = ActorVectorEnv([Probe] * 2)
    assert envs.metadata == {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.NEXT_STEP}
    assert envs.render_mode == "rgb_array"
    envs.reset_async(seed=[5, None])
    obs, infos = envs.reset_wait(timeout=SOON)
    assert (obs.tolist(), infos) == ([[5, 1.5], [0, 1.5]], {})
    envs.step_async(acts(3, 9))
    obs, rewards, terminations, truncations, infos = envs.step_wait(timeout=SOON)
    assert obs.tolist() == [[6, 1.5], [1, 1.5]]
    assert (rewards.tolist(), rewards.dtype) == ([3, 9], np.float64)
    assert terminations.dtype == truncations.dtype == np.bool_
    assert data_equivalence(infos, {"count": np.array([0, 1]), "_count": np.array([False, True])})
    envs.call_async("level")
    assert envs.call_wait(timeout=SOON) == (1.5, 1.5)
    assert envs.get_attr("count") == (6, 1)
    envs.set_attr("level", [2.5, 3.5])
    assert envs.call("level") == (2.5, 3.5)
    envs.set_attr("level", 0.5)
    assert envs.get_attr("level") == (0.5, 0.5)
    frames = envs.render()
    assert [frame.max() for frame in frames] == [6, 1]
    assert isinstance(frames, tuple)
    assert envs.np_random_seed == (5, envs.np_random_seed[1])
    assert len(envs.np_random) == 2
    envs.close()
    envs.close()


def test_attributes_that_wrappers_hide_are_found():
    envs = ActorVectorEnv([cartpole()] * 2)
    assert envs.get_attr("gravity") == (9.8, 9.8)
    envs.set_attr("gravity", [1.0, 2.0])
    assert envs.call("gravity") == (1.0, 2.0)
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(AttributeError, match="nothing_like_it"):
        envs.call("nothing_like_it")
    envs.close()


def test_call_rejects_reset_step_and_close_and_set_attr_rejects_wrong_lengths():
    envs = ActorVectorEnv([Probe] * 2)
    for name in ("reset", "step", "close"):
        with pytest.raises(ValueError, match=f"Trying to call function `{name}` with `call`"):
            envs.call(name)
    with pytest.raises(ValueError, match="Got `3` values for 2 environments"):
        envs.set_attr("level", [1, 2, 3])
    assert envs.call("level") == (1.5, 1.5)
    envs.close()


def test_wrong_numbers_of_seeds_and_actions_are_rejected():
    envs = ActorVectorEnv([Probe] * 2)
    with pytest.raises(ValueError, match="length must match num_envs=2 but got length=3"):
        envs.reset(seed=[1, 2, 3])
    envs.reset()
    for actions, error in [(acts(1), ValueError), (acts(1, 2, 3), ValueError), (1, TypeError)]:
        with pytest.raises(error):
            envs.step(actions)
    assert envs.step([1, 2])[1].tolist() == [1, 2]
    envs.close()


class Plain(gymnasium.Env):
    """Shows what it was given, and needs both arguments of reset."""

    observation_space = spaces.Text(100)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed, options):
        return f"{seed} {options}", {}

    def step(self, action):
        return f"{np.asarray(action).dtype} {np.shape(action)}", 0.0, True, False, {}


def test_actions_that_do_not_fit_reach_the_envs_as_they_are():
    envs = ActorVectorEnv([Plain] * 2, autoreset_mode="Disabled")
    assert envs.reset(seed=3)[0] == ("3 None", "4 None")
    for actions, seen in [
        (np.zeros((2, 1), np.float32), "float32 (1,)"),
        (np.zeros((2, 1), np.float16), "float32 (1,)"),  # nothing is lost
        (np.zeros((2, 1), np.float64), "float64 (1,)"),
        ([0, 1], "int64 ()"),
    ]:
        assert envs.step(actions)[0] == (seen, seen)
    envs.close()


# State -------------------------------------------------------------------------------------------------------


def test_waiting_without_a_call_and_calling_twice_raise():
    envs = ActorVectorEnv([Probe] * 2)
    for what in ("reset", "step", "call"):
        with pytest.raises(NoAsyncCallError, match=f"Calling `{what}_wait` without any prior call to `{what}_async`"):
            getattr(envs, f"{what}_wait")()
    starts = {
        "reset": envs.reset_async,
        "step": lambda: envs.step_async(acts(1, 2)),
        "call": lambda: envs.call_async("pid"),
    }
    for pending, start in starts.items():
        start()
        others = {**starts, "set_attr": lambda: envs.set_attr("level", 1), "one step": lambda: envs.step(acts(1, 2))}
        for other in others.values():
            with pytest.raises(AlreadyPendingCallError, match=f"waiting for a pending call to `{pending}` to complete"):
                other()
        with pytest.raises(NoAsyncCallError):
            getattr(envs, f"{next(name for name in starts if name != pending)}_wait")()
        getattr(envs, f"{pending}_wait")()
    envs.step_async(acts(1, 2))
    with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
        envs.close()
    for call in (*starts.values(), lambda: envs.step(acts(1, 2)), envs.reset_wait, lambda: envs.set_attr("level", 1)):
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
            call()


def test_a_vector_that_is_dropped_ends_its_processes():
    envs = ActorVectorEnv([Probe] * 2)
    envs.reset()
    del envs  # the leak check waits for the processes


def test_close_kills_a_worker_that_hangs(gate):
    envs = ActorVectorEnv([functools.partial(Probe, gate=gate)] * 2)
    envs.reset()
    envs.step_async(acts(88, 0))
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.01)
    begun = time.monotonic()
    envs.close(terminate=True)
    assert time.monotonic() - begun < SOON


# Timeouts ----------------------------------------------------------------------------------------------------


def test_after_a_timeout_no_later_call_sees_an_old_result(gate):
    envs = ActorVectorEnv([functools.partial(Probe, gate=gate)] * 2)
    envs.reset()
    for later in ("step", "reset", "call"):
        envs.step_async(acts(88, 5))
        with pytest.raises(
            multiprocessing.TimeoutError, match=r"The call to `step_wait` has timed out after 0\.02 second"
        ):
            envs.step_wait(timeout=0.02)
        # The old step still runs: a later one waits its turn, and gives up when its own time is over.
        envs.step_async(acts(1, 2))
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.02)
        opener = threading.Timer(0.05, gate.touch)
        opener.start()
        if later == "step":
            assert envs.step(acts(3, 4))[1].tolist() == [3, 4]
        elif later == "reset":
            obs, infos = envs.reset(seed=100, options={"x": 1})
            assert obs[:, 0].tolist() == [100, 101]
            assert infos["seed"].tolist() == [100, 101]
        else:
            assert envs.call("wait") == ("waited", "waited")
            assert envs.step(acts(6, 7))[1].tolist() == [6, 7]
        opener.join()
        gate.unlink()
    envs.close()


def test_timeouts_of_reset_and_call(gate):
    envs = ActorVectorEnv([functools.partial(Probe, gate=gate)] * 2)
    envs.reset_async(seed=50, options={"wait": True})
    with pytest.raises(multiprocessing.TimeoutError, match=r"`reset_wait` has timed out after 0\.02"):
        envs.reset_wait(timeout=0.02)
    gate.touch()
    assert envs.reset(seed=7)[0][:, 0].tolist() == [7, 8]
    gate.unlink()
    envs.call_async("wait")
    with pytest.raises(multiprocessing.TimeoutError, match=r"`call_wait` has timed out after 0\.02"):
        envs.call_wait(timeout=0.02)
    gate.touch()
    assert envs.call("level") == (1.5, 1.5)
    assert envs.step(acts(3, 4))[1].tolist() == [3, 4]
    envs.close()


def test_a_failure_of_a_step_that_timed_out_is_only_logged(gate):
    envs = ActorVectorEnv([functools.partial(Probe, gate=gate)] * 2)
    envs.reset()
    envs.step_async(acts(88, 66))
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.02)
    gate.touch()
    with pytest.warns(UserWarning, match="Worker-1 failed in a call that had timed out: LookupError"):
        assert envs.step(acts(1, 2))[1].tolist() == [1, 2]
    envs.close()


# Autoreset ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_autoreset_is_gymnasiums(mode):
    fns = [functools.partial(Probe, length) for length in (3, 4, 9)]
    envs = ActorVectorEnv(fns, autoreset_mode=mode)
    reference = SyncVectorEnv(fns, autoreset_mode=mode)
    assert envs.metadata["autoreset_mode"] is mode
    assert data_equivalence(envs.reset(), reference.reset())
    masked = 0
    for turn in range(12):
        actions = acts(turn, 9 * (turn % 2), 2)
        ours, theirs = envs.step(actions), reference.step(actions)
        assert data_equivalence(ours[:4], theirs[:4])
        assert data_equivalence(_sorted(ours[4]), _sorted(theirs[4]))
        ended = ours[2] | ours[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            masked += 1
            ours[0][...] = -1  # what was handed out is the caller's
            options = [{"reset_mask": ended, "x": turn} for _ in range(2)]
            assert data_equivalence(
                envs.reset(seed=turn, options=options[0]), reference.reset(seed=turn, options=options[1])
            )
    assert (masked > 1) is (mode is AutoresetMode.DISABLED)
    envs.close()
    reference.close()


def _sorted(infos):
    final = infos.pop("final_obs", None)
    return [{key: infos[key] for key in sorted(infos)}, None if final is None else list(final)]


def test_invalid_reset_masks_raise():
    envs = ActorVectorEnv([Probe] * 2, autoreset_mode=AutoresetMode.DISABLED)
    for mask, error, text in [
        ([True, False], TypeError, "must be a numpy array"),
        (np.array([True]), ValueError, r"must have shape `\(2,\)`, got \(1,\)"),
        (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`, got int64"),
        (np.array([False, False]), ValueError, "at least one True value"),
    ]:
        with pytest.raises(error, match=text):
            envs.reset(options={"reset_mask": mask})
    # Those that were never reset show zeros, as there.
    assert envs.reset(options={"reset_mask": np.array([False, True])})[0].tolist() == [[0, 0], [0, 1.5]]
    envs.close()


def is_overwritten_by_later_steps(envs):
    obs = envs.step(acts(0, 0))[0]
    assert np.shares_memory(obs, envs.observations) is not envs.copy
    before = obs.copy()
    envs.step(acts(0, 0))
    envs.step(acts(0, 0))
    return not np.array_equal(obs, before)


@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_the_callers_and_views_are_not_copied(copies):
    """A result that the loop has collected, as it may on a busy machine, is a copy in any case."""
    envs = ActorVectorEnv([Probe] * 2, copy=copies)
    envs.reset()
    assert any(is_overwritten_by_later_steps(envs) for _ in range(20)) is not copies
    envs.close()


# Errors ------------------------------------------------------------------------------------------------------


def test_an_envs_exception_is_raised_unchanged_and_the_envs_continue():
    envs = ActorVectorEnv([Probe] * 3)
    envs.reset()
    with pytest.warns(UserWarning, match="ERROR") as logged, pytest.raises(LookupError) as caught:
        envs.step(acts(0, 66, 1))
    assert caught.value.args == ("no such thing", 66)
    assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
    texts = [str(one.message) for one in logged]
    assert "Worker-1 - Shutting it down\x1b[0m is what AsyncVectorEnv does then: here its process continues" in texts[0]
    assert "in step" in texts[1]
    assert "LookupError: ('no such thing', 66)" in texts[1]
    assert envs.step(acts(1, 2, 3))[0][:, 0].tolist() == [2, 1, 2]
    envs.step_async(acts(66, 0, 0))
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(LookupError):
        envs.step_wait()
    assert envs.step(acts(1, 2, 3))[1].tolist() == [1, 2, 3]
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(TypeError):
        envs.call("pid", "one too many")
    envs.close()


def test_envs_may_step_before_a_reset_and_after_the_end():
    envs = ActorVectorEnv([functools.partial(Probe, 2)] * 2, autoreset_mode="Disabled")
    for count in range(1, 5):
        obs, _, terminations, *_ = envs.step(acts(1, 2))
        assert obs[:, 0].tolist() == [count] * 2
        assert terminations.all() == (count >= 2)
    envs.close()


def test_the_exception_of_a_factory_is_raised_unchanged():
    with pytest.raises(gymnasium.error.NameNotFound, match="NoSuchEnv") as caught:
        ActorVectorEnv([functools.partial(gymnasium.make, "NoSuchEnv-v0")], restart=ea.RestartPolicy(max_restarts=0))
    assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
    with pytest.raises(FileNotFoundError):
        ActorVectorEnv([functools.partial(Path("/nowhere").read_text)], restart=ea.RestartPolicy(1, backoff=0.01))


def test_a_crashed_worker_raises_and_a_reset_continues():
    envs = ActorVectorEnv([Probe] * 2, restart=ea.RestartPolicy(backoff=0.01))
    envs.reset()
    with pytest.warns(UserWarning, match="ERROR") as logged, pytest.raises(ea.ActorDiedError) as caught:
        envs.step(acts(1, 77))
    assert "here its process has ended: the env needs a reset" in str(logged[0].message)
    assert (caught.value.index, caught.value.signal) == (1, signal.SIGKILL)
    with pytest.raises(ValueError, match="needs a reset first"):
        envs.step(acts(1, 1))
    assert envs.reset(seed=3)[0][:, 0].tolist() == [3, 4]
    assert envs.step(acts(1, 2))[1].tolist() == [1, 2]
    envs.close()


def test_the_log_says_that_a_worker_without_restarts_left_is_not_started_again():
    envs = ActorVectorEnv([Probe] * 2, restart=ea.RestartPolicy(max_restarts=1, backoff=0.0))
    for _ in range(2):
        envs.reset()
        with pytest.warns(UserWarning, match="ERROR"), pytest.raises(ea.ActorDiedError):
            envs.step(acts(1, 77))
    with pytest.warns(UserWarning, match="ERROR") as logged, pytest.raises(ea.RestartsExhaustedError):
        envs.reset()
    assert "here its process has ended and is not started again" in str(logged[0].message)
    envs.close()


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_on_failure_and_standbys(envs_per_actor):
    envs = ActorVectorEnv([Probe] * 4, on_failure="renew", standbys=1, envs_per_actor=envs_per_actor)
    envs.reset(seed=10)
    obs, rewards, _, truncations, infos = envs.step(acts(1, 77, 2, 3))
    assert truncations.tolist() == [False, True, False, False]
    assert isinstance(infos["failure"][1], ea.ActorDiedError)
    assert infos["_failure"].tolist() == truncations.tolist()
    assert obs[1, 0] == 11
    assert rewards[1] == 0
    assert envs.step(acts(1, 1, 1, 1))[1][2:].tolist() == [1, 1]
    envs.close()


def test_a_deadline_kills_a_worker_that_hangs(gate):
    envs = ActorVectorEnv([functools.partial(Probe, gate=gate)] * 2, deadlines=ea.Deadlines(step=0.2))
    envs.reset()
    with pytest.warns(UserWarning, match="ERROR"), pytest.raises(ea.ActorTimeoutError):
        envs.step(acts(1, 88))
    envs.close()


def learn_frozen_lake(envs, steps):
    """Tabular Q-learning; returns what was learnt."""
    rng, values = np.random.default_rng(5), np.zeros((16, 4))
    states, _ = envs.reset(seed=3)
    for _ in range(steps):
        explored = rng.random(len(states)) < 0.9
        actions = np.where(explored, rng.integers(4, size=len(states)), values[states].argmax(1))
        following, rewards, terminated, _, _ = envs.step(actions)
        for row, (state, action) in enumerate(zip(states, actions, strict=True)):
            target = rewards[row] + 0.95 * (~terminated[row]) * values[following[row]].max()
            values[state, action] += 0.2 * (target - values[state, action])
        states = following
    return values


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.soak), True], ids=["", "one of which is lost"])
def test_a_policy_learns_the_same_on_nodes_and_in_one_process(kill):
    make = functools.partial(gymnasium.make, "FrozenLake-v1", is_slippery=False)
    nodes = LocalNodes(2)
    options = {"backend": ea.RemoteBackend(nodes, lease=2.0, heartbeat=0.2), "on_failure": "replay"}
    envs, reference = ActorVectorEnv([make] * 4, envs_per_actor=2, **options), SyncVectorEnv([make] * 4)
    expected = learn_frozen_lake(reference, 800)
    reference.close()
    assert expected.max() > 0.5, "the goal was found"
    envs.reset()  # the nodes are there
    killer = threading.Timer(0.1, nodes.agents["local-0"].kill)
    if kill:
        killer.start()
    assert np.array_equal(learn_frozen_lake(envs, 800), expected)
    assert {actor.node for actor in envs.actors} == ({"local-1"} if kill else {"local-0", "local-1"})
    envs.close()


# make_vec, register, wrappers --------------------------------------------------------------------------------


def test_make_vec_has_gymnasiums_signature_and_takes_wrappers():
    assert list(inspect.signature(make_vec).parameters) == list(inspect.signature(gymnasium.make_vec).parameters)
    wrap = functools.partial(gymnasium.wrappers.RescaleObservation, min_obs=np.float32(0), max_obs=np.float32(1))
    envs = make_vec(
        "Pendulum-v1",
        3,
        vectorization_mode="async",
        vector_kwargs={"envs_per_actor": 3},
        wrappers=[wrap],
        g=2.0,
        max_episode_steps=7,
    )
    assert isinstance(envs, ActorVectorEnv)
    assert len(envs.actors) == 1
    assert envs.single_observation_space.high.tolist() == [1, 1, 1]
    assert envs.get_attr("g") == (2.0,) * 3
    assert repr(envs) == "ActorVectorEnv(Pendulum-v1, num_envs=3)"
    again = make_vec(envs.spec)
    assert (again.num_envs, again.get_attr("g")) == (3, (2.0,) * 3)
    assert again.single_observation_space == envs.single_observation_space
    again.reset()
    ends = [again.step(again.action_space.sample())[3].all() for _ in range(7)]
    assert ends == [False] * 6 + [True]
    again.close()
    envs.close()
    serial = make_vec("CartPole-v1", 2, vectorization_mode="sync")
    assert isinstance(serial, SyncVectorEnv)
    serial.close()


def test_register_has_gymnasiums_own_make_vec_make_it():
    gymnasium.register("Probed-v0", Probe, max_episode_steps=5)
    try:
        register("Probed-v0", envs_per_actor=2)
        envs = gymnasium.make_vec("Probed-v0", 4, length=2)
        assert isinstance(envs, ActorVectorEnv)
        assert len(envs.actors) == 2
        assert envs.reset(seed=0)[0].shape == (4, 2)
        assert envs.get_attr("length") == (2,) * 4
        assert envs.spec.id == "Probed-v0"
        envs.close()
    finally:
        del gymnasium.registry["Probed-v0"]
    with pytest.raises(gymnasium.error.Error):
        register("Probed-v0")


@pytest.fixture
def registry():
    """Gymnasium's registry, as it was when the test ends, with a namespace of its own."""
    before = dict(gymnasium.registry)
    points = entry_points()
    gymnasium.register("Probes/Short-v0", Probe, max_episode_steps=2)
    gymnasium.register("Probes/Long-v1", Probe, max_episode_steps=5, kwargs={"length": 3})
    gymnasium.register("Probes/Vector-v0", vector_entry_point=SyncVectorEnv)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    for env_id, point in points.items():
        gymnasium.registry[env_id].vector_entry_point = point


def entry_points():
    return {env_id: spec.vector_entry_point for env_id, spec in gymnasium.registry.items()}


def test_register_takes_several_ids_and_keeps_their_registered_arguments(registry):
    register(["Probes/Short-v0", "Probes/Long-v1", "CartPole-v1"], envs_per_actor=2)
    for env_id, steps in {"Probes/Short-v0": 2, "Probes/Long-v1": 5, "CartPole-v1": 500}.items():
        envs = gymnasium.make_vec(env_id, 2, vectorization_mode="vector_entry_point")
        assert isinstance(envs, ActorVectorEnv)
        assert len(envs.actors) == 1
        assert envs.call("get_wrapper_attr", "spec")[0].max_episode_steps == steps
        assert (envs.spec.id, envs.spec.kwargs["vectorization_mode"]) == (env_id, "vector_entry_point")
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        if env_id == "Probes/Long-v1":
            assert envs.get_attr("length") == (3, 3)
        again = gymnasium.make_vec(envs.spec)
        assert (type(again), again.num_envs) == (ActorVectorEnv, 2)
        again.close()
        envs.close()
    synchronous = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    assert isinstance(synchronous, SyncVectorEnv)
    synchronous.close()


def test_register_takes_a_namespace(registry):
    register(namespace="Probes")
    assert registry["Probes/Vector-v0"].vector_entry_point is SyncVectorEnv
    for env_id in ("Probes/Short-v0", "Probes/Long-v1"):
        envs = gymnasium.make_vec(env_id, 1)
        assert isinstance(envs, ActorVectorEnv)
        envs.close()


def test_register_changes_nothing_if_an_env_is_wrong(registry):
    before = entry_points()
    with pytest.raises(gymnasium.error.NameNotFound):
        register(["Probes/Short-v0", "Probes/Missing-v0"])
    with pytest.raises(gymnasium.error.NamespaceNotFound, match=r"'Prob' has no registered envs.*'Probes'"):
        register("Probes/Short-v0", namespace="Prob")
    with pytest.raises(ValueError, match="'Probes/Vector-v0' exists only as a vector env"):
        register(["Probes/Short-v0", "Probes/Vector-v0"])
    with pytest.raises(ValueError, match="without an env"):
        register()
    assert entry_points() == before


def test_wrappers_of_vector_envs_work_on_top():
    from gymnasium.wrappers import vector as wrappers

    def wrapped(envs):
        envs = wrappers.RecordEpisodeStatistics(envs)
        return wrappers.NormalizeReward(wrappers.NormalizeObservation(envs))

    envs, reference = wrapped(ActorVectorEnv([cartpole()] * 3)), wrapped(SyncVectorEnv([cartpole()] * 3))
    assert data_equivalence(envs.reset(seed=1), reference.reset(seed=1))
    reference.action_space.seed(1)
    episodes = 0
    for _ in range(80):
        actions = reference.action_space.sample()
        ours, theirs = envs.step(actions), reference.step(actions)
        assert data_equivalence(ours[:4], theirs[:4])
        assert ours[4].keys() == theirs[4].keys()
        if "episode" in ours[4]:
            episodes += 1
            assert ours[4]["episode"]["r"].tolist() == theirs[4]["episode"]["r"].tolist()
            assert ours[4]["episode"]["l"].tolist() == theirs[4]["episode"]["l"].tolist()
    assert episodes > 2
    envs.close()
    reference.close()


def test_episode_statistics_of_envs_that_are_not_in_the_mask_are_kept():
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        ActorVectorEnv([functools.partial(Probe, 3), functools.partial(Probe, 5)], autoreset_mode="Disabled")
    )
    envs.reset()
    for _ in range(3):
        _, _, ended, *_ = envs.step(acts(1, 2))
    envs.reset(options={"reset_mask": ended})
    for _ in range(2):
        *_, infos = envs.step(acts(1, 2))
    assert infos["episode"]["r"].tolist() == [0, 10]
    envs.close()


class Loose(gymnasium.Env):
    """Env whose values fit its spaces but not their dtype."""

    action_space = spaces.Discrete(2)
    values = (3, (4, 1), np.full(2, 0.5), [0.5, 0.25], {"a": 1})
    spaces = (
        spaces.Discrete(5),
        spaces.Tuple([spaces.Discrete(5), spaces.Discrete(2)]),
        BOX,
        BOX,
        spaces.Dict(a=spaces.Discrete(2)),
    )

    def __init__(self, which):
        self.value, self.observation_space = self.values[which], self.spaces[which]

    def reset(self, *, seed=None, options=None):
        return self.value, {}

    def step(self, action):
        return self.value, 0.0, bool(action), False, {}


@pytest.mark.parametrize("which", range(5))
def test_final_observation_is_the_one_that_the_env_returned(which):
    envs = ActorVectorEnv([lambda: Loose(which)] * 2, autoreset_mode="SameStep")
    reference = SyncVectorEnv([lambda: Loose(which)] * 2, autoreset_mode="SameStep")
    envs.reset(), reference.reset()
    ours, theirs = envs.step(acts(1, 0)), reference.step(acts(1, 0))
    assert data_equivalence(ours[0], theirs[0])
    assert data_equivalence(ours[4], theirs[4])
    envs.close()


class OneArray(Probe):
    """Fills the same array again and again."""

    def __init__(self, length):
        super().__init__(length)
        self.array = np.zeros(2, np.float32)

    def _obs(self):
        self.array[:] = super()._obs()
        return self.array


def test_a_reset_that_fills_the_last_observations_array_leaves_the_last_observation():
    envs = ActorVectorEnv([lambda: OneArray(2)] * 2, autoreset_mode="SameStep")
    envs.reset()
    envs.step(acts(1, 1))
    obs, *_, infos = envs.step(acts(1, 1))
    assert obs[:, 0].tolist() == [0, 0]
    assert [last[0] for last in infos["final_obs"]] == [2, 2]
    envs.close()


def test_videos_are_recorded(tmp_path):
    pytest.importorskip("moviepy")
    envs = gymnasium.wrappers.vector.RecordVideo(
        ActorVectorEnv([functools.partial(Films, 4)] * 2),
        str(tmp_path / "videos"),
        step_trigger=lambda step: step == 0,
        video_length=3,
        disable_logger=True,
    )
    envs.reset()
    for _ in range(5):
        envs.step(acts(1, 1))
    envs.close()
    assert [path.suffix for path in (tmp_path / "videos").iterdir() if path.suffix == ".mp4"] == [".mp4"]


class Films(Probe):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def render(self):
        return np.full((16, 16, 3), self.count, np.uint8)


# Importing ---------------------------------------------------------------------------------------------------


def test_workers_do_not_import_the_drop_in():
    class Spy(gymnasium.Wrapper):
        def modules(self):
            return ("envactors.integrations.gymnasium" in sys.modules, "envactors.vector_env" in sys.modules)

    # A fresh worker: those of the fork server are copies with this module's imports.
    envs = make_vec("CartPole-v1", 1, wrappers=[Spy], vector_kwargs={"context": "loky"})
    assert envs.call("modules") == ((False, False),)
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_say_the_seeds_of_episodes(mode):
    envs = ActorVectorEnv(
        [functools.partial(Teller, i, 2 + i) for i in range(2)], autoreset_mode=mode, seed_episodes=True
    )
    _, infos = envs.reset(seed=10)
    seeds = [infos["episode_seed"].tolist()]
    for _ in range(12):
        *_, infos = envs.step(np.array([1, 2]))
        for i in np.flatnonzero(infos.get("_episode_seed", np.zeros(2))).tolist():
            seeds.append((i, infos["episode_seed"][i]))
            assert infos["seed"][i] == infos["episode_seed"][i]
    envs.close()
    assert seeds[0] == [10, 11]
    for i in range(2):
        of_env = [seed for env, seed in seeds[1:] if env == i]
        assert len(of_env) >= 3
        assert of_env == [episode_seed(10 + i, number) for number in range(1, len(of_env) + 1)]


@pytest.mark.parametrize("single", ["Dict", "Tuple", "nested"])
def test_steps_build_no_spaces(single, monkeypatch):
    """What depends on the space is decided once: building batched spaces takes several times as long as a step."""
    box = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    space = {
        "Dict": gymnasium.spaces.Dict({str(i): box for i in range(6)}),
        "Tuple": gymnasium.spaces.Tuple([box] * 6),
        "nested": gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple([box, gymnasium.spaces.Text(3)]), b=box),
    }[single]

    class Env(gymnasium.Env):
        observation_space = space
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 1.0, False, False, {}

    envs = ActorVectorEnv([Env] * 2, backend="thread")
    try:
        envs.reset()
        built = []
        create = gymnasium.spaces.Space.__init__
        monkeypatch.setattr(
            gymnasium.spaces.Space, "__init__", lambda *args, **kwargs: (built.append(args), create(*args, **kwargs))[1]
        )
        obs = envs.step(np.array([0, 1]))[0]
        assert not built
        assert obs in envs.observation_space
    finally:
        envs.close()
