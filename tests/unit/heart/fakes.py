"""A backend without processes: tests play the worker through the other end of its channel.

`FakeWorker` plays frames by hand. For vectors it has rows, too: memory that is a bytearray, and the worker's own
`envactors.worker.main.Server`, which runs when the test says so, row by row. `FakeWorker.run_until_line` ends it
between any two lines, with the memory as it was there. `Stage` is a vector of such workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import sys
import threading
import time

import gymnasium
import numpy as np

import envactors as ea
from envactors.actor.actor import Actor
from envactors.actor.config import ActorConfig
from envactors.actor.handle import send_request
from envactors.actor.states import Phase
from envactors.backends.base import Backend, ExitStatus, NodeLoss, RowMemory, Traits, Use
from envactors.backends.local import LocalWorker
from envactors.integrations.access import VectorAccess
from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import FRAMES, METHOD_CALL, POSTS, STEP, STREAM, ControlPage, page_size
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Frame, Kind, Start
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import Slab
from envactors.system.polling import Doorbell
from envactors.worker import env_rows
from envactors.worker.main import Server

SOON = 10.0
# How often a worker that is played by another thread looks for requests, in seconds.
PERIOD = 0.0005
_pids = itertools.count(100_000_000)


class NoStacks:
    def read(self):
        return ""

    def wait(self, seconds):
        return ""


class PlainMemory(RowMemory):
    """The memory of a vector within this process."""

    def __init__(self):
        self.rows = bytearray()
        self.parts = {}

    def create(self, layout):
        self.rows = bytearray(layout.size)
        return self.open(layout)

    def extend(self, size):
        place = len(self.parts), size
        self.parts[place] = bytearray(size)
        return place, memoryview(self.parts[place])

    def open(self, layout):
        slab = Slab(layout, self.rows)
        return slab, Infos(slab)

    def open_region(self, place, *, writable):
        part = memoryview(self.parts[place])
        return part if writable else part.toreadonly()

    def close(self):
        pass


class WorkerChannel:
    """The worker's end of a channel, which can keep frames that the worker sends, of some kinds or of all."""

    def __init__(self, channel):
        self._channel = channel
        self.kept = None
        self.kinds = ()

    def fileno(self):
        return self._channel.fileno()

    def receive(self):
        return self._channel.receive()

    def send(self, frame):
        if self.kept is None or (self.kinds and frame.kind not in self.kinds):
            self._channel.send(frame)
        else:
            self.kept.append(frame)


class FakeWorker(LocalWorker):
    """Both ends of a worker."""

    reason_to_move = ""

    def __init__(self, envs, memory=None):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(SOON)
        self.far = Channel(theirs)
        self._page = bytearray(page_size(envs))
        bells = Doorbell(), Doorbell()
        self._exit = Doorbell()
        super().__init__(ControlPage(self._page, *bells), Channel(ours), self._exit.fileno())
        self.memory = memory
        self._far = WorkerChannel(self.far)
        self.server = Server(self._far, ControlPage(self._page, *bells), memory)
        self.pid = next(_pids)
        self.was_killed = self.is_gone = False
        self.rss = 1
        self._status = ExitStatus(signal=9)
        self._frames = []
        self._is_played = threading.RLock()

    # The parent's end

    def kill(self):
        self.was_killed = True
        self._exit.ring()

    def ask_stacks(self, *, may_interrupt=True):
        return NoStacks()

    def resident_memory(self):
        return self.rss

    def close(self):
        with self._is_played:
            self.is_gone = True
            self.channel.close()
            self.far.close()
            for bell in (self._exit, self.page.to_worker, self.page.to_parent):
                bell.close()
        return self._status

    # The worker's end, frame by frame

    def crash(self):
        self._exit.ring()

    def lose(self):
        """Count as ended, although code of the worker may still be running until `set_over`."""
        self._status = ExitStatus(loss=NodeLoss("far", "which was silent"), is_certain=False)
        self._exit.ring()

    def set_over(self):
        self.events.runtime.loop.call_soon(lambda: self.events.on_certain_end(self))

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

    # The worker's end, played by its server

    @property
    def envs(self):
        return [hosted.env for hosted in self.server.host.hosted_envs]

    @property
    def has_request(self):
        return self.page.counters[POSTS] != self.server.handled

    def play(self):
        """Run everything that is posted; return whether that was anything.

        Replies are sent at the end, so that no request that answers one of them runs as well.
        """
        with self._is_played:
            if self.is_gone or self.was_killed or self.server.closed or not self.has_request:
                return False
            with self.keeping(Kind.RESULT, Kind.FAILED) as frames:
                self.server.run_posted()
            self.send_frames(frames)
            if self.server.closed:
                self.crash()
            return True

    @contextlib.contextmanager
    def keeping(self, *kinds):
        """Keep the frames of some kinds (none: all) that the worker sends, in place of sending them."""
        self._far.kept, self._far.kinds = [], kinds
        yield self._far.kept
        self._far.kept = None

    def send_frames(self, frames):
        for frame in frames:
            self.far.send(frame)

    def read_frames(self):
        """Run the frames that have come, and no rows."""
        while self.page.counters[FRAMES] > self.server._frames_read:
            for frame in self.far.receive():
                self.server._frames_read += 1
                self.server._run_frame(frame)

    def _due(self, index):
        self.read_frames()
        server = self.server
        server.call_id = self.page.counters[STEP]
        server.page.is_streaming = self.page.counters[STREAM] != 0
        row = next(row for row in server.rows if row.index == index)
        assert server._posted_ids[index] != server._written_ids[index], "the row is posted"
        return row, int(server._ops[index]), int(server._posted_ids[index])

    def begin_row(self, index):
        """Begin a row, and do not complete it."""
        row, op, call_id = self._due(index)
        row.page.record_env(METHOD_CALL, row.position)
        row.begin(op, call_id)

    def run_row(self, *indices):
        """Run rows to their ends; the worker has not finished its step then."""
        for index in indices:
            env_rows.run_all([self._due(index)])

    def end_rows(self):
        """Finish a step whose rows were run one by one."""
        self.server.handled = self.page.counters[POSTS]
        self.server._last_step = self.page.counters[STEP]
        self.server.page.finish_step(self.page.counters[STEP])

    def run_until_line(self, number):
        """Run everything that is posted, until line ``number`` of the worker's code, where the worker has ended.

        Returns:
            False if it has fewer lines; then everything has run.
        """
        state = None

        def trace(frame, event, arg):
            nonlocal number, state
            if "/envactors/" not in frame.f_code.co_filename:
                return None
            if event == "line" and state is None:
                number -= 1
                if not number:
                    state = bytes(self.memory.rows), bytes(self._page), len(frames)
            return trace

        with self._is_played:
            with self.keeping() as frames:
                sys.settrace(trace)
                try:
                    self.server.run_posted()
                finally:
                    sys.settrace(None)
            if state is not None:
                self.memory.rows[:], self._page[:] = state[0], state[1]
                del frames[state[2] :]
            self.send_frames(frames)
            if state is not None:
                self.crash()
        return state is not None


class FakeUse(Use):
    """Notes whether it is open, and how often it was closed."""

    def __init__(self, backend):
        self.backend = backend
        self.is_open = False
        self.closed = 0

    def open(self):
        self.is_open = True

    def start(self, name, memory, envs):
        return self.backend.start(envs, memory)

    def close(self):
        self.is_open = False
        self.closed += 1


class FakeBackend(Backend):
    traits = Traits(can_kill=True)

    def __init__(self, max_starting=None):
        self.traits = Traits(can_kill=True, max_starting=max_starting)
        self.uses = []
        self.workers = queue.Queue()
        self.all = []

    def make_memory(self):
        return PlainMemory()

    def use(self, env_vars, runtime):
        self.uses.append(FakeUse(self))
        return self.uses[-1]

    def start(self, envs, memory):
        worker = FakeWorker(envs, memory)
        self.all.append(worker)
        self.workers.put(worker)
        return worker

    def next_worker(self):
        return self.workers.get(timeout=SOON)

    @contextlib.contextmanager
    def playing(self):
        """Have another thread play all workers."""
        is_over, problems = threading.Event(), []

        def play():
            try:
                while not is_over.wait(PERIOD):
                    for worker in tuple(self.all):
                        worker.play()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=play)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        assert not problems


def make_actor(**options):
    """Return an actor and its backend."""
    backend = FakeBackend()
    options.setdefault("deadlines", ea.Deadlines())
    options.setdefault("restart", ea.RestartPolicy(max_restarts=5, backoff=0.0))
    start = Start("actor", 0, [b"factory"], ([], []))
    actor = Actor(ActorConfig(name="actor", backend=backend, start=start, env_vars={}, **options))
    actor.join_and_start()
    return actor, backend


def call(actor, *args, **options):
    """Submit a call of a method, whose name is always "method", with these arguments."""
    return send_request(actor, Kind.CALL, (0, "method", args, {}), "method", **options)


# Vectors -------------------------------------------------------------------------------------------------

# Actions with an effect; all others are only returned.
END, CUT, RAISE, INFO, LARGE, TRAP, LEAVE, HUGE = 90, 91, 92, 93, 94, 95, 96, 97
# The size of an info that fits into the buffer of the channel, and takes several reads.
HUGE_SIZE = 100_000


class RowError(Exception):
    """Raised by an env."""


class Trap:
    """Cannot be unpickled."""

    def __reduce__(self):
        return _spring, ()


def _spring():
    raise ValueError("sprung")


class PlayedEnv:
    """Its observation is the number of steps in the episode, the last action, and the seed of the episode."""

    observation_space = gymnasium.spaces.Box(-1e12, 1e12, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)
    fails_reset = False
    drift = 0.0  # makes a replay return something else

    def __init__(self):
        self.steps, self.seed, self.closed = 0, -1.0, False
        self.resets = []

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        if self.fails_reset:
            raise RowError("in reset")
        self.steps, self.seed = 0, -1.0 if seed is None else float(seed)
        return np.array([self.drift, -1.0, self.seed]), {}

    def step(self, action):
        self.steps += 1
        if action == RAISE:
            raise RowError("in step")
        if action == LEAVE:
            raise SystemExit
        infos = {
            INFO: {"n": self.steps},
            LARGE: {"text": "x" * 10_000},
            TRAP: {"trap": Trap()},
            HUGE: {"text": "x" * HUGE_SIZE},
        }
        obs = np.array([self.steps, float(action), self.seed])
        return obs, float(action), action == END, action == CUT, infos.get(int(action), {})

    def echo(self, value):
        return value

    def fail(self):
        raise RowError("in a call")

    def close(self):
        self.closed = True


class Stage:
    """A vector whose workers the test plays.

    Args:
        count: How many envs it has.
        seed: The seed of a first reset; None for no reset.
        options: Those of the vector.
    """

    def __init__(self, count=2, *, seed=0, env=PlayedEnv, **options):
        self.backend = FakeBackend(options.pop("max_starting", None))
        options.setdefault("restart", ea.RestartPolicy(max_restarts=10**6, backoff=0.0))
        with self.backend.playing():
            self.envs = ea.VectorEnv([env] * count, backend=self.backend, **options)
            self.access = VectorAccess(self.envs)
            if seed is not None:
                self.envs.reset(seed=seed)
        self.engine = self.envs._engine
        self.table = self.engine.table
        self.episodes = self.table.episodes
        self.runtime = self.actor().runtime

    def actor(self, position=0):
        return self.envs.actors[position]._actor

    def worker(self, position=0):
        """Return the worker that an actor has now."""
        return self.actor(position).process.worker

    def env(self, index=0):
        """Return an env, as its worker has it."""
        group = self.engine.group_by_env[index]
        return group.actor.process.worker.envs[index - group.indices.start]

    # Driving

    def settle(self):
        """Have the threads of the library do everything that can be done now."""
        for _ in range(3):
            for submit in (self._call_soon, self.runtime.launcher._pool.submit, self.runtime.callbacks.submit):
                done = threading.Event()
                submit(done.set)
                assert done.wait(SOON)

    def _call_soon(self, function):
        """Call a function in the loop, in the round after the next one, once all that is ready now was handled."""
        loop = self.runtime.loop
        loop.call_soon(functools.partial(loop.call_soon, function))

    def run(self):
        """Have the workers do everything that they have been sent, and the parent react, until nothing is left."""
        self.settle()
        while sum(worker.play() for worker in tuple(self.backend.all)):
            self.settle()

    def crash(self, position=0):
        """End the process of an actor, and wait until the parent knows it."""
        self.worker(position).crash()
        self.settle()

    def start(self, actions, ids=None):
        """Start steps, as `step` does."""
        self.access.start_steps(ids, np.asarray(actions))

    def finish(self, ids=None, timeout=SOON):
        """Return the `Batch` of the envs that `start` has started; workers are played meanwhile."""
        with self.backend.playing():
            return self.access.gather(ids, timeout, "step")

    def play(self, function, *args, **options):
        """Call a function while another thread plays the workers."""
        with self.backend.playing():
            return function(*args, **options)

    def step(self, actions, ids=None):
        """Return what `VectorEnv.step` returns; workers are played meanwhile."""
        return self.play(self.envs.step, np.asarray(actions), ids)

    def reset(self, **options):
        return self.play(self.envs.reset, **options)

    def close(self):
        with self.backend.playing():
            self.envs.close(SOON)

    # Checks

    def check(self):
        """Check the invariant between changes."""
        check_invariant(self.engine)


def check_invariant(engine):
    """Check what holds between changes; see `envactors.vector.table` and `envactors.actor.change`."""
    from envactors.vector.row_jobs import QueuedRows
    from envactors.vector.table import DONE, FAILED, IDLE, POSTED, QUEUED

    table = engine.table
    with table.lock:
        for index, status in enumerate(table.status):
            group = engine.group_by_env[index]
            actor = group.actor
            waiting = [job for job in actor.jobs.waiting if isinstance(job, QueuedRows) and index in job.ids]
            assert bool(waiting) == (status == QUEUED) or status != QUEUED, "a queued env waits in its actor"
            assert status != QUEUED or len(waiting) >= 1
            assert index not in table.requests or status != IDLE, "an idle env has no request"
            assert index not in table.outcomes or status in (DONE, FAILED)
            assert status != POSTED or table.slab.posted_ids[index] == table.rows.posted_ids[index]
            if status == POSTED and actor.phase is Phase.LIVE and not table.has_outcome(index):
                assert actor.jobs.running is group.rows_job, "rows that run are the running job"
                assert table.rows.posted_incarnations[index] == actor.process.incarnation
        for group in engine.groups:
            actor = group.actor
            known = {*actor.jobs.waiting, actor.jobs.running, actor.jobs.renewal}
            assert set(actor.jobs.unfinished) <= known, "an unfinished job is queued or running"
            assert {job for job in actor.jobs.waiting if job is not group.rows_job} <= {*actor.jobs.unfinished}


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
