"""A backend without processes: tests play the worker through the other end of its channel."""

from __future__ import annotations

import itertools
import queue
import socket

import envactors as ea
from envactors.actor.actor import Actor
from envactors.actor.config import ActorConfig
from envactors.actor.future import ActorFuture
from envactors.actor.jobs import Call
from envactors.backends.base import Backend, ExitStatus, NodeLoss
from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import METHOD_CALL, ControlPage, page_size
from envactors.mailbox.messages import Frame, Kind, Start
from envactors.mailbox.pickling import dumps, loads
from envactors.system.polling import Doorbell

SOON = 10.0
_pids = itertools.count(100_000_000)


class NoStacks:
    def read(self):
        return ""

    def wait(self, seconds):
        return ""


class FakeWorker:
    """Both ends of a worker."""

    refusal = loss = node = None
    is_leaving = False
    is_over = True

    def __init__(self, envs):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(SOON)
        self.channel, self.far = Channel(ours), Channel(theirs)
        self.page = ControlPage(bytearray(page_size(envs)), Doorbell(), Doorbell())
        self.outputs = []
        self.pid = next(_pids)
        self.was_killed = False
        self._on_over = []
        self._exit = Doorbell()
        self.sentinel = self._exit.fileno()
        self._frames = []

    # The parent's end

    def kill(self):
        self.was_killed = True
        self._exit.ring()

    def is_current_thread(self):
        return False

    def ask_stacks(self):
        return NoStacks()

    def when_over(self, then):
        if self.is_over:
            then()
        else:
            self._on_over.append(then)

    def resident_memory(self):
        return 1

    def reap(self):
        self.channel.close()
        self.far.close()
        for bell in (self._exit, self.page.to_worker, self.page.to_parent):
            bell.close()
        return ExitStatus(None, 9)

    # The worker's end

    def crash(self):
        self._exit.ring()

    def lose(self):
        """Count as ended, although code of the worker may still be running until `set_over`."""
        self.is_over, self.loss = False, NodeLoss("far", "which was silent")
        self._exit.ring()

    def set_over(self):
        self.is_over = True
        for then in self._on_over:
            then()

    def take(self):
        """Return the next frame that the parent has sent."""
        while not self._frames:
            self._frames += self.far.receive()
        return self._frames.pop(0)

    def begin(self, frame, method=METHOD_CALL):
        """Begin a request, as the parent sees it on the control page."""
        self.page.start_request(frame.call_id, method, 0)

    def reply(self, frame, value, kind=Kind.RESULT):
        self.page.finish_frame(frame.call_id)
        self.far.send(Frame(kind, frame.incarnation, frame.call_id, dumps(value)))

    def serve_start(self):
        """Start successfully."""
        self.reply(self.take(), None)
        return self

    def serve_call(self, value="done"):
        """Run the next call."""
        frame = self.take()
        self.begin(frame)
        self.reply(frame, value)
        return loads(frame.payload)


class FakeBackend(Backend):
    kills = True
    spin = inline = False
    max_starting = None

    def __init__(self):
        self.workers = queue.Queue()

    def launch(self, name, env_vars, memory, envs=1):
        worker = FakeWorker(envs)
        self.workers.put(worker)
        return worker

    def next_worker(self):
        return self.workers.get(timeout=SOON)


def make_actor(**options):
    """Return an actor and its backend."""
    backend = FakeBackend()
    options.setdefault("deadlines", ea.Deadlines())
    options.setdefault("restart", ea.RestartPolicy(max_restarts=5, backoff=0.0))
    start = Start("actor", 0, [b"factory"], ([], []))
    return Actor(ActorConfig(name="actor", backend=backend, start=start, env_vars={}, **options)), backend


def call(actor, *args, **options):
    """Submit a call."""
    future = ActorFuture(actor, None)
    actor.submit(Call("method", 0, Kind.CALL, future, **options), (0, "method", args, {}))
    return future
