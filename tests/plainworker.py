"""The worker's half of an actor, driven without a process: the test plays its parent."""

from __future__ import annotations

import os

import numpy as np

from envactors.backends.local import LocalMemory
from envactors.mailbox import bundle
from envactors.mailbox.control_page import ASLEEP, PAGE, ControlPage
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Attach, Failure, Frame, Kind, Start
from envactors.mailbox.pickling import dumps, dumps_by_value, make_payload
from envactors.mailbox.slab import HALF, PAYLOAD, RESET, SEED, Layout
from envactors.mailbox.specs import ArraySpec
from envactors.system.choice import PORTABLE
from envactors.system.polling import Doorbell
from envactors.worker.main import Server

OBSERVATION, ACTION, REWARD = (ArraySpec(shape, np.dtype(np.float64)) for shape in ((2,), (), ()))


class Box:
    def __init__(self, shape):
        self.shape, self.dtype = shape, np.dtype(np.float64)


class Stuck:
    """Can neither be pickled nor copied."""

    def __reduce_ex__(self, _protocol):
        raise RuntimeError("not me")


class Scripted:
    """Counts its steps; action 2 ends an episode, 3 raises, 4 has an info that does not travel, 5 a large one."""

    def __init__(self):
        self.observation_space, self.action_space = Box((2,)), Box(())
        self.obs, self.steps, self.info = np.zeros(2), 0, {"same": [0]}
        self.seeds = []
        self.hook = None

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        self.seeds.append(seed)
        self.obs[:] = 100 if seed is None else seed % 1000
        return self.obs, {"options": options} if options else {}

    def step(self, action):
        if self.hook is not None:
            self.hook()
        if action == 3:
            raise ValueError(f"step {self.steps}")
        self.steps += 1
        self.obs[:] = self.steps, action
        info = {}
        if action == 4:
            info = {"stuck": Stuck()}
        elif action == 5:
            info = {"large": "x" * 10_000}
        elif action == 6:
            self.info["same"][0] = self.steps
            info = self.info
        return self.obs, float(action), action == 2, action == 7, info


class Parent:
    """Replaces a worker's parent: posts what is asked and collects the replies.

    Args:
        factory: Makes each env.
        count: How many envs there are.
        autoreset: Whether an episode that ends is reset within the step.
        pickles: Whether values without a fixed size are pickled.
        guard: See `envactors.worker.env_rows.WriteGuard`.
        action: The spec of actions that are written to rows; None if they come as payload.
        observation: The spec of observations.
        reward: The spec of rewards; None if they are objects.
    """

    def __init__(
        self,
        factory=Scripted,
        *,
        count=3,
        autoreset=False,
        pickles=True,
        guard=None,
        action=ACTION,
        observation=OBSERVATION,
        reward=REWARD,
    ):
        self.page = ControlPage(bytearray(PAGE), Doorbell(), Doorbell())
        self.requests, self.replies = [], []
        self.pickles = pickles
        self.call_id = 0
        layout = Layout(observation, action, reward, count)
        self.memory = LocalMemory()
        self.slab, self.infos = self.memory.create(layout)
        if pickles:
            self.infos = Infos(self.slab)
        self.server = Server(self, self.page, self, guard)
        factories = [dumps_by_value(factory)] * count
        start = Start("actor", 0, factories, ([], []), Attach(layout, autoreset), journal=True)
        self.ask(Kind.START, dumps(tuple(start)))
        self.server.run_posted()
        assert [frame.kind for frame in self.take_replies()] == [Kind.ENV_MADE] * (count - 1) + [Kind.RESULT]

    def close(self):
        self.page.to_worker.close()
        self.page.to_parent.close()

    def open(self, layout):
        slab, infos = self.memory.open(layout)
        return slab, Infos(slab) if self.pickles else infos

    # The worker's end of the channel ---------------------------------------------------------------------

    def fileno(self):
        return -1

    def send(self, frame):
        self.replies.append(frame)

    def receive(self):
        frames, self.requests = self.requests, []
        return frames

    # The parent's ----------------------------------------------------------------------------------------

    @property
    def envs(self):
        return [hosted.env for hosted in self.server.host.hosted_envs]

    def take_replies(self):
        replies, self.replies = self.replies, []
        return replies

    def ask(self, kind, payload):
        """Sends a request that is a frame; returns its call id."""
        number, self.call_id = self.call_id, self.call_id + 1
        self.requests.append(Frame(kind, 7, number, payload))
        self.page.post_frame(ASLEEP)
        return number

    def send_payloads(self, number, parts):
        self.requests.append(Frame(Kind.PAYLOADS, 7, number, parts))
        self.page.post_frame(ASLEEP)

    def write_rows(self, actions, *, ops=None, seeds=None, payloads=None):
        """Writes into rows what is asked of these envs, a mapping of env and action; returns the call id."""
        number, self.call_id = self.call_id, self.call_id + 1
        slab, parts = self.slab, []
        for env, action in actions.items():
            bits = (int(slab.ops[env]) & HALF ^ HALF) | (ops or {}).get(env, 0)
            if env in (seeds or {}):
                slab.seeds[env] = seeds[env]
                bits |= SEED
            if slab.actions:
                slab.actions[0][env] = action
            elif not bits & RESET and not (payloads and env in payloads):
                payloads = {**(payloads or {}), env: make_payload(action, pickles=self.pickles)}
            if payloads and env in payloads:
                parts.append((env, payloads[env]))
                bits |= PAYLOAD
            slab.ops[env] = bits
        if parts:
            self.send_payloads(number, bundle.pack(parts) if self.pickles else parts)
        for env in actions:
            slab.posted[env] = number
        return number

    def post(self, actions, *, stream=False, **what):
        """Posts what is asked of these envs; for the arguments see `write_rows`."""
        number = self.write_rows(actions, **what)
        self.page.post_step(number, ASLEEP, stream)
        return number

    def run(self, actions, **what):
        """Has these envs run, and returns the result of each."""
        self.post(actions, **what)
        self.server.run_posted()
        overflow = self.overflow()
        return {env: self.read(env, overflow) for env in actions}

    def overflow(self):
        frames = [frame for frame in self.take_replies() if frame.kind == Kind.OVERFLOW]
        return {env: part for frame in frames for env, part in bundle.unpack(frame.payload)}

    def read(self, env, overflow=None):
        """An env's result: (observation, reward, terminated, truncated, info) and the checksum, or its failure."""
        slab, half, part = self.slab, int(self.slab.ops[env]) & HALF, (overflow or {}).get(env)
        assert slab.completed[env] == slab.posted[env]
        if self.infos.failed(env):
            return self.infos.failure(env, part)
        info, objects = self.infos.decode(env, part)
        array = slab.observations[0]
        obs = objects[0] if array is None else array[half, env].tolist()
        reward = objects[-1] if slab.layout.reward is None else float(slab.rewards[env])
        return (obs, reward, bool(slab.terminated[env]), bool(slab.truncated[env]), info), int(slab.checks[half, env])

    def count_rings(self):
        """How often the worker has rung since this was called last."""
        fd = self.page.to_parent.fileno()
        try:
            return len(os.read(fd, 100)) if PORTABLE else os.eventfd_read(fd)
        except BlockingIOError:
            return 0


def fault_of(result):
    """Where a result has failed, None if it has not."""
    return result.fault if isinstance(result, Failure) else None
