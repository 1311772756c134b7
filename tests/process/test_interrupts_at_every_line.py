"""An exception at every line of each public call: nothing hangs, nothing is mixed up, and `reset` works."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import threading
from pathlib import Path

import functions
import numpy as np
import pytest
from helpers import FORK_SERVER
from interrupting import with_exits
from leaks import inventory, settled_inventory

import envactors as ea

# Python ignores an exception in a finalizer, such as that of a doorbell, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOON = 20.0
PACKAGE = str(Path(ea.__file__).parent)
FOLDERS = (
    *("loop.py", "runtime.py", "replay.py", "vector_env.py"),
    *("actor", "pools", "rollout", "sessions", "system", "vector"),
)
ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0)
# Every line is tried by `-m slow`; otherwise each call has this many lines between two tries, other ones in each of its
# variants. `tests/unit/heart/test_env_group.py` tries steps closer together, without processes.
STRIDE = 40


class Hit(Exception):
    """Comes at a line of the library."""


@functools.lru_cache(None)
def uncovered(code):
    """Return where a code object leaves ``with`` blocks, and its lines without an instruction, such as ``try:``.

    No signal handler runs at the end of such a line, which the ``with`` block around it does not cover either.
    """
    return with_exits(code) | {one.offset for one in dis.get_instructions(code) if one.opname == "NOP"}


def is_in_finalizer(frame):
    """Return whether Python would ignore an exception here, and pytest would keep the frame, and what it has open."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class Tracer:
    """Raises at the n-th line that the calling thread runs in the core; counts lines."""

    def __init__(self, at):
        self.at = at
        self.lines = 0

    def __call__(self, frame, event, arg):
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or not path[len(PACKAGE) + 1 :].startswith(FOLDERS):
            return None
        return None if is_in_finalizer(frame) else self.on_line

    def on_line(self, frame, event, arg):
        if event == "line" and frame.f_lasti not in uncovered(frame.f_code):
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise Hit
        return self.on_line


def interrupted(function, at):
    """Call a function and raise at its line ``at``; return whether it had that many lines."""
    tracer = Tracer(at)
    sys.settrace(tracer)
    try:
        function()
    except Hit:
        pass
    finally:
        sys.settrace(None)
    return tracer.lines >= at


class Env:
    """Its observations say which action and which seed they are of."""

    import gymnasium

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(10**6)
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.array([0.0, -1.0 if seed is None else -2.0 - seed]), {}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps, action], float), float(action), False, False, {"action": int(action)}

    def echo(self, value):
        return value


def recv_all(envs, actions):
    envs.send(actions)
    count = 0
    while count < len(actions):
        count += len(envs.recv(min_envs=1).env_ids)


CALLS = {
    "step": lambda envs, actions: envs.step(actions),
    "step of some": lambda envs, actions: envs.step(actions[:1], env_ids=[1]),
    "recv": recv_all,
    "submit": lambda envs, actions: [future.result(SOON) for future in envs.submit(actions)],
    "send": lambda envs, actions: envs.send(actions),
    "reset": lambda envs, actions: envs.reset(seed=5),
    "reset of some": lambda envs, actions: envs.reset(seed=[6], env_ids=[1]),
    "restore": lambda envs, actions: envs.restore(envs.snapshot()),
    "call": lambda envs, actions: envs.call("echo", 1),
    "attributes": lambda envs, actions: (envs.set_attr("steps", 3), envs.get_attr("steps")),
    "handle": lambda envs, actions: [envs[1].get("steps").result(SOON), envs[1].echo(1).result(SOON)],
    "cancel": lambda envs, actions: [future.cancel() for future in [envs[0].echo(1), envs[0].echo(2)]],
    "renew": lambda envs, actions: envs.actors[0].renew().result(SOON),
    "kill": lambda envs, actions: envs.actors[0].kill(restart=True),
    "stats": lambda envs, actions: (envs.stats(), repr(envs.actors[0])),
}


def check_works(envs, counter):
    """A reset works, and steps return what belongs to their actions."""
    seed = next(counter)
    obs, infos = envs.reset(seed=seed, timeout=SOON)
    assert obs[:, 1].tolist() == [-2.0 - seed - index for index in range(envs.num_envs)]
    for _ in range(2):
        actions = [next(counter) for _ in range(envs.num_envs)]
        obs, rewards, _, _, infos = envs.step(actions, timeout=SOON)
        assert obs[:, 1].tolist() == rewards.tolist() == [float(action) for action in actions]
        assert [info["action"] for info in infos] == actions
    assert envs.call("echo", seed) == [seed] * envs.num_envs


class Companion:
    """A thread that calls methods of the last env, and waits for each; an answer is right, or an error."""

    def __init__(self, envs):
        self.envs = envs
        self.over = threading.Event()
        self.problem = None
        self.answers = 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        for i in itertools.count():
            if self.over.wait(0.002) and self.answers:  # on a busy machine, the first one may come late
                return
            try:
                assert self.envs[self.envs.num_envs - 1].echo(i).result(SOON) == i
                self.answers += 1
            except ea.ActorError:
                pass
            except BaseException as error:
                self.problem = error
                return

    def end(self):
        self.over.set()
        self.thread.join(SOON)
        assert not self.thread.is_alive()
        assert self.problem is None


def run_at_lines(call, envs, lines, counter):
    for at in lines:
        actions = [next(counter) for _ in range(envs.num_envs)]
        with contextlib.suppress(ea.EnvActorsError):
            if not interrupted(lambda actions=actions: CALLS[call](envs, actions), at):
                return
        check_works(envs, counter)
    pytest.fail("the call has more lines than were tried")


@pytest.mark.parametrize("with_thread", [False, True])
@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_some_lines(call, packed, with_thread):
    start = 1 + STRIDE // 4 * (2 * (packed - 1) + with_thread)
    check_lines(call, packed, with_thread, range(start, 10_000, STRIDE))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_every_line(call):
    check_lines(call, 2, True, range(1, 10_000))


def make_vector(packed=1):
    snapshot = ea.SnapshotPolicy(vars, lambda env, state: vars(env).update(state))
    return ea.VectorEnv([Env] * 2, envs_per_actor=packed, restart=ALWAYS, backend=FORK_SERVER, snapshot=snapshot)


def check_lines(call, packed, with_thread, lines):
    counter = itertools.count(1)
    with make_vector(packed) as envs:
        check_works(envs, counter)
        companion = Companion(envs) if with_thread else None
        try:
            run_at_lines(call, envs, lines, counter)
        finally:
            if companion is not None:
                companion.end()


@pytest.mark.parametrize("call", ["step", "step of some", "recv", "submit", "reset", "call", "stats"])
def test_an_exception_at_every_line_in_process(call):
    counter = itertools.count(1)
    with ea.VectorEnv([Env] * 2, backend="inline") as envs:
        check_works(envs, counter)
        run_at_lines(call, envs, range(1, 10_000), counter)


def test_an_exception_at_some_lines_of_a_lone_actor():
    with ea.spawn(Env, restart=ALWAYS, backend=FORK_SERVER) as actor:
        for at in range(1, 10_000, 3):
            value = object.__hash__(at)
            with contextlib.suppress(ea.ActorError):
                if not interrupted(lambda value=value: actor.echo(value).result(SOON), at):
                    break
            assert actor.echo(at).result(SOON) == at


ENDS = {
    "close": lambda envs: envs.close(SOON),
    "close one": lambda envs: envs.actors[0].close(SOON),
    "kill one": lambda envs: envs.actors[0].kill(),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_exception_at_some_lines_of_an_end(end):
    check_end(end, range(1, 10_000, 43))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ENDS)
def test_an_exception_at_every_line_of_an_end(end):
    check_end(end, range(1, 10_000))


def check_end(end, lines):
    """After an interrupted end, the same end closes the actor, the other actor works, and nothing is left."""
    before = inventory()
    for at in lines:
        envs = make_vector()
        was_interrupted = interrupted(lambda envs=envs: ENDS[end](envs), at)
        ENDS[end](envs)
        if end != "close":
            assert envs[1].echo(at).result(SOON) == at
            with pytest.raises(ea.ActorClosedError):
                envs[0].echo(at)
        envs.close(SOON)
        del envs
        assert settled_inventory(before) == before, at
        if not was_interrupted:
            break


MAKERS = {
    "VectorEnv": make_vector,
    "spawn": lambda: ea.spawn(Env, backend=FORK_SERVER),
    "ActorPool": lambda: ea.ActorPool(Env, 2, backend=FORK_SERVER),
    "Executor": lambda: ea.Executor(2, backend=FORK_SERVER),
    "SessionPool": lambda: ea.SessionPool(Env, 2, backend=FORK_SERVER),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_exception_at_some_lines_of_the_making_leaves_nothing_behind(kind):
    check_making(kind, range(1, 10_000, 97 if kind == "VectorEnv" else 23))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MAKERS)
def test_an_exception_at_every_line_of_the_making_leaves_nothing_behind(kind):
    check_making(kind, range(1, 10_000))


def check_making(kind, lines):
    before, made = inventory(), []
    for at in lines:
        was_interrupted = True
        with contextlib.suppress(ea.EnvActorsError):
            was_interrupted = interrupted(lambda: made.append(MAKERS[kind]()), at)
        for one in made:
            one.shutdown() if kind == "Executor" else one.close()
        made.clear()
        assert settled_inventory(before) == before, at
        if not was_interrupted:
            break


POOL_CALLS = {
    "submit": lambda pool, value: pool.submit(functions.identity, value).result(SOON),
    "several": lambda pool, value: [one.result(SOON) for one in [pool.submit(functions.identity, 1) for _ in range(5)]],
    "map": lambda pool, value: list(pool.map(functions.identity, range(4), chunksize=2)),
    "cancel": lambda pool, value: [one.cancel() for one in [pool.submit(functions.identity, 1) for _ in range(4)]],
    "abort": lambda pool, value: pool.options(deadline=1).submit(functions.sleep_in_c).abort(),
    "stats": lambda pool, value: pool.stats(),
}


@pytest.mark.parametrize("call", POOL_CALLS)
def test_an_exception_at_some_lines_of_an_executor(call):
    check_executor(call, range(1, 10_000, 17))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", POOL_CALLS)
def test_an_exception_at_every_line_of_an_executor(call):
    check_executor(call, range(1, 10_000))


def check_executor(call, lines):
    with ea.Executor(2, backend=FORK_SERVER, deadline=SOON / 2) as pool:
        for at in lines:
            with contextlib.suppress(ea.ActorError):
                if not interrupted(lambda at=at: POOL_CALLS[call](pool, at), at):
                    break
            futures = [pool.submit(functions.identity, number) for number in range(6)]
            assert [future.result(SOON) for future in futures] == [*range(6)]
        else:
            pytest.fail("the call has more lines than were tried")


@pytest.mark.parametrize("wait", [True, False])
def test_an_exception_at_some_lines_of_the_end_of_an_executor(wait):
    for at in range(1, 10_000, 7):
        pool = ea.Executor(1, backend=FORK_SERVER)
        futures = [pool.submit(functions.identity, number) for number in range(3)]
        was_interrupted = interrupted(lambda pool=pool: pool.shutdown(wait=wait), at)
        pool.shutdown()
        assert [future.result(0) for future in futures] == [0, 1, 2]
        if not was_interrupted:
            break


def test_an_exception_at_some_lines_of_a_rollout():
    counter = itertools.count(1)
    with ea.VectorEnv([Env] * 2, restart=ALWAYS, backend=FORK_SERVER) as envs:
        check_works(envs, counter)
        envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
        for at in range(1, 10_000, 13):
            with contextlib.suppress(ea.EnvActorsError):
                if not interrupted(lambda: envs.rollout(3, timeout=SOON), at):
                    break
            check_works(envs, counter)
            assert envs.rollout(2, timeout=SOON).valid.all()
