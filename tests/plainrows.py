"""Rows of envs in ordinary memory, and an actor whose worker is simulated by the test, one write at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np

import envactors as ea
from envactors.actor.config import ActorConfig
from envactors.actor.process import START_CALL_ID
from envactors.actor.reactor import Reactor
from envactors.actor.slots import Slot, Slots
from envactors.actor.states import BACKOFF, LAUNCHING, LIVE
from envactors.actor.supervisor import Supervisor
from envactors.backends.base import ExitStatus, Stacks, Worker
from envactors.backends.local import InlineBackend, LocalChannel
from envactors.envs.core import EnvFuture, VectorCore
from envactors.mailbox import bundle
from envactors.mailbox.control_page import (
    ASLEEP,
    BEGUN,
    ENV_INDEX,
    FINISHED,
    METHOD,
    METHOD_RESET,
    METHOD_STEP,
    OVERFLOWS,
    SINCE,
    STEP,
    ControlPage,
    page_size,
)
from envactors.mailbox.info_codec import PLAIN, Infos
from envactors.mailbox.messages import Attach, Description, Fault, Frame, Kind, Start
from envactors.mailbox.pickling import dumps, pack_failure
from envactors.mailbox.slab import HALF, RESET, Layout, Slab
from envactors.mailbox.specs import ArraySpec
from envactors.system.polling import READABLE, Doorbell
from envactors.vector.asking import Asker
from envactors.vector.outcomes import Outcomes

SCALAR = ArraySpec((), np.dtype(np.float64))
# How many numbers a worker writes for one env.
WRITES_PER_ENV = 7


def make_slots(count, *, autoreset="next_step", on_failure="raise", positions=None):
    """Returns the slots of envs whose observations, actions and rewards are single numbers."""
    layout = Layout(SCALAR, SCALAR, SCALAR, count)
    slab = Slab(layout, bytearray(layout.size))
    of = [Slot(index, index if positions is None else positions[index]) for index in range(count)]
    return Slots(of, slab, Infos(slab), autoreset, on_failure, pickles=True)


@contextlib.contextmanager
def running_reactor():
    """Runs a reactor that has no actors of its own."""
    reactor = Reactor()
    try:
        yield reactor
    finally:
        reactor.stop()
        reactor.join(5.0)


class NoStacks(Stacks):
    """Those of a worker that is played."""

    def read(self):
        return ""

    def wait(self, seconds):
        return ""


class PlayedWorker(Worker):
    """A worker without a process: the test reads its requests and writes its results."""

    def __init__(self, envs):
        self.pid = os.getpid()
        self.outputs = []
        self.page = ControlPage(bytearray(page_size(envs)), Doorbell(), Doorbell())
        self.requests, self.replies = deque(), deque()
        self.is_killed = False
        self._ended, self._bell = Doorbell(), Doorbell()
        self.sentinel = self._ended.fileno()
        self.channel = LocalChannel(self.replies, self.requests, self._bell, None)

    def kill(self):
        self.is_killed = True

    def begin_timing(self, spans):
        """Do nothing, since there is no process."""

    def ask_stacks(self):
        return NoStacks()

    def reap(self):
        for bell in (self.page.to_worker, self.page.to_parent, self._ended, self._bell):
            bell.close()
        return ExitStatus(None, 9)


class PlayedBackend(InlineBackend):
    """A backend whose workers are simulated by the test."""

    kills = pickles = True
    inline = False

    def launch(self, name, env_vars, memory, envs=1):
        return PlayedWorker(envs)


class Launches:
    """Replaces the thread that starts workers: the test does so in `PlayedActor.start`."""

    def __init__(self):
        self.queued = set()

    def launch(self, job, limit):
        self.queued.add(job)

    def withdraw(self, job):
        was_queued = job in self.queued
        self.queued.discard(job)
        return was_queued

    def finish(self, job):
        self.queued.discard(job)


class PlayedActor:
    """An actor with three of a vector's envs; only its worker is simulated.

    Attributes:
        FIRST, COUNT: The first of its envs, and how many it has.
        ENVS: Its envs.
        AFTER: How many envs the vector has after these.
    """

    FIRST, COUNT = 2, 3
    ENVS = (2, 3, 4)
    AFTER = 1

    def __init__(self, reactor, *, on_failure="raise", autoreset="next_step", deadlines=None, permits=None):
        count = self.FIRST + self.COUNT + self.AFTER
        self.slots = make_slots(
            count, autoreset=autoreset, on_failure=on_failure, positions=[env - self.FIRST for env in range(count)]
        )
        self.slab = self.slots.slab
        self.writer = Infos(self.slab)
        self.supervisor = self._make_supervisor(reactor, on_failure, deadlines or ea.Deadlines(), permits)
        self.core = self.supervisor.core
        described = Description(SCALAR, SCALAR, SCALAR, {}, None)
        self.vector = VectorCore([self.supervisor] * count, self.slots, described, copy=True, recycle=None)
        self.pending, self.reader, self.episodes = self.vector.pending, self.vector.reader, self.vector.episodes
        self.outcomes = Outcomes(self.vector)
        self.asker = Asker(self.vector)
        self.start()
        attach = Attach(self.slab.layout, autoreset == "same_step")
        self.supervisor.attach(attach, self.slots, self.pending, self.outcomes.read_for_future)
        self.rows = self.supervisor.calls.rows
        self.reply(None)

    def _make_supervisor(self, reactor, on_failure, deadlines, permits):
        # Without the engine, which starts workers in another thread.
        supervisor = Supervisor.__new__(Supervisor)
        supervisor.closed = threading.Event()
        supervisor.config = ActorConfig(
            "played",
            PlayedBackend(),
            Start("played", self.FIRST, [b""] * self.COUNT, ([], [])),
            deadlines,
            ea.RestartPolicy(max_restarts=100, backoff=0.1, backoff_max=0.1),
            {},
            max_journal=100 if on_failure == "replay" else None,
            permits=permits,
        )
        supervisor._assemble(SimpleNamespace(reactor=reactor, launcher=Launches(), release=lambda _member: None))
        return supervisor

    # Its processes ---------------------------------------------------------------------------------------

    @property
    def worker(self):
        return self.core.process.worker

    @property
    def page(self):
        return self.core.process.page

    def start(self):
        """Starts the first process, or the next one once the last has ended."""
        if self.core.phase is BACKOFF:
            self.supervisor.on_timer(self.core.timers.next())
        assert self.core.phase is LAUNCHING
        self.supervisor.lifecycle.launch()
        self.worker.requests.clear()
        self._receive(Frame(Kind.RESULT, self.core.incarnation, START_CALL_ID, dumps(None)))
        assert self.core.phase is LIVE

    def _receive(self, frame):
        self.worker.replies.append(frame)
        self.supervisor.calls.on_channel(READABLE)

    def reply(self, value):
        """Answer the running call, and return its request."""
        call = self.core.table.running
        self._receive(Frame(Kind.RESULT, self.core.incarnation, call.call_id, dumps(value)))
        return call

    def exit(self):
        """Has the process end."""
        self.supervisor.lifecycle.on_exit(self.core.process)

    def abort(self):
        self.supervisor.kill(restart=True)
        self.exit()

    def close(self):
        self.supervisor.kill(restart=False)
        if self.core.process is not None:
            self.exit()
        assert self.supervisor.core.phase.name == "CLOSED"

    # Requests ---------------------------------------------------------------------------------------

    def step(self, *envs, stream=False):
        """Asks for steps, whose actions are the numbers of the envs."""
        env_ids = list(envs or self.ENVS)
        actions = np.array(env_ids, np.float64)
        self.asker.start_steps(env_ids, actions, stream=stream, wait=ASLEEP, checked=SCALAR)

    def submit(self, *envs):
        """Asks for steps, and returns futures."""
        futures = [EnvFuture(self.supervisor, None, env) for env in envs]
        actions = np.array(envs, np.float64)
        self.asker.start_steps(list(envs), actions, stream=True, wait=ASLEEP, futures=futures, checked=SCALAR)
        return futures

    def reset(self, *envs, seed=None, options=None):
        envs = envs or self.ENVS
        self.asker.start_resets(list(envs), [seed] * len(envs), [options] * len(envs))

    def begin(self, *, seed=5):
        """Resets all envs and steps them once."""
        self.reset(seed=seed)
        self.work()
        self.deliver()
        self.step()
        self.work()
        self.deliver()

    def deliver(self):
        """Reads what has arrived, and returns the results and errors by env."""
        with self.core.change, self.core.lock:
            if self.supervisor.calls.rows is not None:
                self.supervisor.calls.rows.arrive()
        self.outcomes.read(self.slots.unread())
        ready = self.pending.ready
        found = {env: result.error or result.step or self.reader.step(env) for env, result in ready.items()}
        self.pending.take(list(found))
        return found

    # Its worker --------------------------------------------------------------------------------

    def due(self):
        return [env for env in self.ENVS if self.slab.posted[env] != self.slab.completed[env]]

    def scan(self, raises=(), large=()):
        """What the worker writes for what is posted, as (function, env, what happens); see `EnvRow.run`."""
        slab, page = self.slab, self.page
        counters, step = page.counters, page.counters[STEP]
        for env in self.due():
            number, op = int(slab.posted[env]), int(slab.ops[env])
            method = METHOD_RESET if op & RESET else METHOD_STEP
            yield lambda: page.times.__setitem__(SINCE, time.monotonic()), env, "prepares"
            yield lambda method=method: counters.__setitem__(METHOD, method), env, "prepares"
            yield lambda env=env: counters.__setitem__(ENV_INDEX, env - self.FIRST), env, "prepares"
            yield lambda number=number: counters.__setitem__(BEGUN, number), env, "runs"
            cell = op & HALF, env
            yield lambda cell=cell, n=number: slab.observations[0].__setitem__(cell, 1000 * cell[1] + n), env, "runs"
            yield lambda env=env: self._write_info(env, env in raises, env in large), env, "runs"
            yield lambda env=env, number=number: slab.completed.__setitem__(env, number), env, "has ended"
        yield lambda: counters.__setitem__(FINISHED, step), None, "has ended"

    def _write_info(self, env, raises, large):
        self.slab.terminated[env] = self.slab.truncated[env] = False
        overflow = None
        if raises:
            overflow = self.writer.fail(env, pack_failure(ValueError(f"of env {env}"), Fault.RAISED))
        elif large:
            overflow = self.writer.put(env, self.writer.pack({"large": "x" * 10_000}, []))
        else:
            self.writer.encodings[env] = PLAIN
        if overflow is not None:
            self.worker.replies.append(
                Frame(Kind.OVERFLOW, self.core.incarnation, self.page.last_call, bundle.pack([(env, overflow)]))
            )
            self.page.counters[OVERFLOWS] += 1

    def work(self, writes=None, **what):
        """Perform the next write; return the env that the worker is at, and what the write does."""
        at, doing = None, "has ended"
        for write, env, happens in itertools.islice(self.scan(**what), writes):
            write()
            at, doing = env, happens
        return at, doing

    def begin_env(self, env):
        """Has all envs before this one run, and this one begin."""
        return self.work(4 + WRITES_PER_ENV * self.due().index(env))
