"""Driving a vector env through a plan of faults, and accounting for every result."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

import envactors as ea
from envactors.arrays.specs import Spec, conform, flatten, spec_of_value, unflatten
from envactors.testing.leaks import describe
from envactors.testing.rehearsal import Request, Result, Script, same
from envactors.testing.sabotage import FaultKind, LargeEcho, Order, Orders, Place, head_of
from envactors.testing.tally import ChaosReport, Tally
from envactors.worker.host import renewed_seed

_PATIENCE = 20.0  # seconds beyond that, after which a result counts as lost
CHILD_PATIENCE = 5.0  # seconds after which a process whose parent has died must be gone
_SHORT_REST = 0.002
_GLANCE = 0.05
_WATCH_PERIOD = 0.1
_MOST_GAP = 3  # results between two faults of one actor
_LONGEST_EPISODE = 200  # steps after which an env is given a new seed
_UNFIRED_RESULTS = 30  # after which an env is reset by hand, if its reset is to suffer
_LAST_ROUNDS = 3

_IN_STEP_OR_RESET = (
    FaultKind.STOP,
    FaultKind.HANG,
    FaultKind.SLEEP,
    FaultKind.EXCEPTION,
    FaultKind.UNPICKLABLE,
    FaultKind.EXIT,
    FaultKind.SEGFAULT,
    FaultKind.CHILD,
    FaultKind.KILL_WRITING,
    FaultKind.BUS_WRITING,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        kind: What happens.
        env_id: To which env.
        place: Where in its life; None: while its process is idle.
        gap: How many results its actor gives out in peace before.
        joined: Whether it may come while the fault before it, in the same actor, is not over yet.
        by_hand: Whether a reset that is to suffer is asked for, rather than waited for.
        overrun: Of a sleep, by how many seconds it is longer than the deadline.
    """

    kind: FaultKind
    env_id: int
    place: Place | None
    gap: int
    joined: bool
    by_hand: bool
    overrun: float


def plan_faults(faults: int, seed: int, num_envs: int) -> list[Fault]:
    """Plans a storm; all kinds come about equally often.

    Args:
        faults: How many.
        seed: Equal ones give equal plans.
        num_envs: How many envs there are to choose from.
    """
    dice = random.Random(seed)  # noqa: S311 # no secret
    plan: list[Fault] = []
    while len(plan) < faults:
        for kind in dice.sample(list(FaultKind), len(FaultKind)):
            place: Place | None = Place.STEP
            if kind is FaultKind.KILL_IDLE:
                place = None
            elif kind is FaultKind.KILL_FACTORY:
                place = Place.FACTORY
            elif kind is FaultKind.KILL_RESET or (kind in _IN_STEP_OR_RESET and dice.random() < 0.2):
                place = Place.RESET
            plan.append(
                Fault(
                    kind,
                    env_id=dice.randrange(num_envs),
                    place=place,
                    gap=dice.randint(0, _MOST_GAP),
                    joined=dice.random() < 0.25,
                    by_hand=dice.random() < 0.3,
                    overrun=round(dice.uniform(0.0, 0.1), 3),
                )
            )
    return plan[:faults]


class Limits(NamedTuple):
    """How long things may take, in seconds.

    Attributes:
        deadline: A step or reset.
        stall: A result.
        start: On top of that where a process has to start.
    """

    deadline: float
    stall: float
    start: float


class _Track:
    """What is known of one env.

    Attributes:
        env_id: Which.
        asked: When it was asked for the result that it owes, None where it owes none.
        action: The action of that step.
        asked_of: The incarnation of its actor when it was.
        incarnation: The process that holds its episode, None where that is not known.
        resets: Whether its next step resets.
        renewed: Whether that is on a new process.
        root_seed: The seed of its last seeded reset.
        last: Its last observation.
        steps: Since that reset.
        is_known: Whether it can be told what its next result must be.
    """

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.asked: float | None = None
        self.action: Any = None
        self.asked_of = 0
        self.incarnation: int | None = None
        self.resets = self.renewed = False
        self.root_seed = 0
        self.last: Any = None
        self.steps = 0
        self.is_known = True


class _Crew:
    """One actor, and what is to happen to its envs.

    Attributes:
        index: Which actor.
        tracks: Its envs.
        queue: The faults that are still to come.
        armed: Those that were ordered and have not happened.
        gap: How many results come before the next fault.
        unfired: How many results have come since a fault was ordered.
        unsettled: The envs that have given no result since the last fault.
        successor: The first incarnation whose results count as such.
        ends: How many of its processes have been ended, at most.
    """

    def __init__(self, index: int, tracks: list[_Track], queue: Iterable[Fault]) -> None:
        self.index = index
        self.tracks = tracks
        self.queue = collections.deque(queue)
        self.armed: list[Fault] = []
        self.gap = self.queue[0].gap if self.queue else 0
        self.unfired = 0
        self.unsettled: set[int] = set()
        self.successor = 0
        self.ends = 0

    @property
    def is_free(self) -> bool:
        """Whether none of its envs owes a result."""
        return all(track.asked is None for track in self.tracks)


class _Delivered(NamedTuple):
    """One result as it was handed out."""

    track: _Track
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int | None


class _OverError(Exception):
    """The storm cannot go on; why has been counted."""


class Storm:
    """Drives a vector env through a plan of faults.

    Args:
        envs: Made of `Saboteur`.
        orders: What those obey.
        plan: The faults.
        script: What is expected.
        tally: Where everything is counted.
        limits: How long things may take.
        watch: Is given the tally's report now and then.
    """

    def __init__(
        self,
        envs: ea.VectorEnv,
        orders: Orders,
        plan: Sequence[Fault],
        script: Script,
        tally: Tally,
        limits: Limits,
        watch: Callable[[ChaosReport], None] | None,
    ) -> None:
        self._envs = envs
        self._orders = orders
        self._script = script
        self._tally = tally
        self._limits = limits
        self._watch = watch
        self._watched = 0.0
        self._dice = random.Random(tally.seed)  # noqa: S311 # no secret
        self._replays = tally.on_failure == "replay"
        self._tracks = [_Track(i) for i in range(envs.num_envs)]
        size = -(-envs.num_envs // len(envs.actors))
        self._crews = []
        for index in range(len(envs.actors)):
            tracks = self._tracks[index * size : (index + 1) * size]
            ids = {track.env_id for track in tracks}
            self._crews.append(_Crew(index, tracks, (fault for fault in plan if fault.env_id in ids)))
        self._crew_of = {track.env_id: crew for crew in self._crews for track in crew.tracks}
        self._turn = 0
        self._seeds = tally.seed
        self._workers: dict[int, psutil.Process] = {}
        self._children: list[tuple[psutil.Process, float]] = []
        self._progress = time.monotonic()

    # The course of it ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lets everything happen that is planned, and a few rounds more."""
        try:
            self._reset(self._tracks)
            while any(crew.queue or crew.armed for crew in self._crews):
                self._check_progress()
                for crew in self._crews:
                    self._sabotage(crew)
                if self._dice.random() < 0.03 or len(self._due()) > 1 + len(self._crews) // 3:
                    self._gather()
                else:
                    self._send()
                    self._receive()
            self._drain()
            for _ in range(_LAST_ROUNDS):
                self._send()
                self._drain()
            self._reset([track for track in self._tracks if self._script.play])
            self._send()
            self._drain()
        except _OverError:
            pass
        except (ea.ActorError, ea.VectorEnvError) as error:
            with contextlib.suppress(_OverError):
                self._lose(f"{type(error).__name__}: {error}")
        finally:
            self._look_around(at_once=True)
        stats = self._envs.stats()
        for crew, actor in zip(self._crews, stats.actors, strict=True):
            if actor.restarts > crew.ends:
                self._tally.unexplained += actor.restarts - crew.ends
                self._tally.note(
                    f"actor {crew.index} was restarted {actor.restarts} times, and lost {crew.ends} processes by "
                    f"faults; the last failure: {actor.last_failure}"
                )

    def account_for_processes(self) -> None:
        """Looks for processes that should be gone, once the envs are closed."""
        deadline = time.monotonic() + CHILD_PATIENCE
        left = [*self._workers.values(), *(child for child, _ in self._children)]
        while (left := [process for process in left if _is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        for process in left:
            self._leak(process)

    def _leak(self, process: psutil.Process) -> None:
        self._tally.leaks.append(f"process {process.pid}: {describe(process.pid)}")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    def _look_around(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self._watched + _WATCH_PERIOD and not at_once:
            return
        self._watched = now
        self._tally.renewals = sum(actor.incarnation for actor in self._envs.actors)
        for actor in self._envs.actors:
            self._remember(actor.pid)
        for track in self._tracks:
            pid = self._orders.take_child(track.env_id)
            if pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child = psutil.Process(pid)
                    if self._orders.path in child.cmdline():  # and not another that has its number now
                        self._children.append((child, now + self._limits.stall))
        for child, since in list(self._children):
            if not _is_alive(child):
                self._children.remove((child, since))
            elif now > since + CHILD_PATIENCE:
                self._children.remove((child, since))
                self._leak(child)
        if self._watch is not None:
            self._watch(self._tally.report())

    def _check_progress(self) -> None:
        self._look_around()
        if time.monotonic() > self._progress + self._patience():
            waiting = [fault for crew in self._crews for fault in (*crew.armed, *crew.queue)]
            self._lose(f"nothing happens any more, and these faults wait: {waiting[:3]}")

    def _remember(self, pid: int | None) -> None:
        if pid is not None and pid not in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._workers[pid] = psutil.Process(pid)

    def _lose(self, why: str) -> None:
        """Gives up, with all results that are owed."""
        owing = [track.env_id for track in self._tracks if track.asked is not None]
        self._tally.lost += max(len(owing), 1)
        self._tally.note(f"turn {self._turn}, the envs {owing} owe results: {why}")
        raise _OverError

    # Faults ----------------------------------------------------------------------------------------------

    def _sabotage(self, crew: _Crew) -> None:
        """Orders the next fault of an actor where its time has come."""
        self._see_what_happened(crew)
        while (fault := self._next(crew)) is not None:
            self._await_successor(crew, fault)
            if fault.place in (None, Place.FACTORY) and not self._kill_idle(crew, fault):
                return
            crew.queue.popleft()
            crew.unfired = 0
            if crew.queue:
                crew.gap = crew.queue[0].gap
            if fault.place is None:
                self._happened(crew, fault)
            else:
                crew.armed.append(fault)
                if fault.place is not Place.FACTORY:
                    order = Order(fault.kind, self._limits.deadline + fault.overrun)
                    self._orders.give(fault.env_id, fault.place, order)

    def _await_successor(self, crew: _Crew, fault: Fault) -> None:
        """Where failures are replayed, has the next fault wait for what takes the place of the process now."""
        if self._replays:
            lost = 2 if fault.place is Place.FACTORY else 1
            crew.successor = self._envs.actors[crew.index].incarnation + lost

    def _next(self, crew: _Crew) -> Fault | None:
        """The next fault of an actor, if it may come now."""
        if not crew.queue:
            return None
        fault = crew.queue[0]
        if crew.armed or crew.unsettled:
            if self._replays or not fault.joined:
                return None
            if fault.place is not None and self._orders.waits(fault.env_id, fault.place):
                return None
        elif crew.gap > 0:
            return None
        return fault

    def _kill_idle(self, crew: _Crew, fault: Fault) -> bool:
        """Kills the process of an actor that has nothing to do; False where it cannot be now."""
        pid = self._envs.actors[crew.index].pid
        if pid is None or not crew.is_free:
            return False
        if fault.place is Place.FACTORY:
            self._orders.give(fault.env_id, fault.place, Order(fault.kind))
            crew.ends += 1
        self._remember(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _is_held(self, crew: _Crew) -> bool:
        """Whether its envs are not to be asked, since its process is to be killed while it is idle."""
        fault = self._next(crew)
        return fault is not None and fault.place in (None, Place.FACTORY)

    def _see_what_happened(self, crew: _Crew) -> None:
        for fault in list(crew.armed):
            assert fault.place is not None, "what happens to an idle process is not ordered"
            if not self._orders.waits(fault.env_id, fault.place):
                crew.armed.remove(fault)
                self._happened(crew, fault)

    def _happened(self, crew: _Crew, fault: Fault) -> None:
        self._tally.faults[fault.kind.value] += 1
        self._progress = time.monotonic()
        crew.ends += 1
        crew.unfired = 0
        crew.unsettled = {track.env_id for track in crew.tracks}

    def _due(self) -> list[_Track]:
        """The envs that are to be reset by hand."""
        due = [
            track
            for track in self._tracks
            if track.steps >= _LONGEST_EPISODE or (not track.is_known and self._script.play is not None)
        ]
        for crew in self._crews:
            for fault in crew.armed:
                if fault.place is Place.RESET and (fault.by_hand or crew.unfired > _UNFIRED_RESULTS):
                    track = self._tracks[fault.env_id]
                    if track not in due:
                        due.append(track)
        return due

    # Asking ----------------------------------------------------------------------------------------------

    def _ask(self, tracks: Iterable[_Track]) -> tuple[list[Any], list[int]]:
        """Notes that envs are asked to step; gives their actions and ids."""
        now = time.monotonic()
        actions, ids = [], []
        for track in tracks:
            track.action = self._script.action(track.env_id, self._turn)
            track.asked, track.asked_of = now, self._envs.actors[self._crew_of[track.env_id].index].incarnation
            actions.append(track.action)
            ids.append(track.env_id)
        self._turn += 1
        return actions, ids

    def _free(self) -> list[_Track]:
        """The envs that can be asked, in any order."""
        free = [
            track for crew in self._crews if not self._is_held(crew) for track in crew.tracks if track.asked is None
        ]
        self._dice.shuffle(free)
        return free

    def _send(self) -> None:
        free = self._free()
        if free:
            self._envs.send(*self._ask(free))

    def _receive(self) -> None:
        owing = sum(track.asked is not None for track in self._tracks)
        if not owing:
            time.sleep(_SHORT_REST)
            return
        least = self._dice.randint(1, owing) if self._dice.random() < 0.1 else 1
        most = least if self._dice.random() < 0.2 else None
        batch = self._envs.recv(min_envs=least, max_envs=most, timeout=_GLANCE)
        self._take(
            [
                _Delivered(
                    self._tracks[env_id],
                    _row(batch.obs, self._envs.observation_spec, i),
                    batch.rewards[i],
                    bool(batch.terminated[i]),
                    bool(batch.truncated[i]),
                    batch.infos[i],
                    int(batch.incarnations[i]),
                )
                for i, env_id in enumerate(batch.env_ids.tolist())
            ]
        )

    def _drain(self) -> None:
        while any(track.asked is not None for track in self._tracks):
            self._check_progress()
            self._receive()
        for crew in self._crews:
            self._see_what_happened(crew)

    def _gather(self) -> None:
        """Waits for all results, and asks for the next ones in another way."""
        self._drain()
        due = self._due()
        if due:
            self._reset(due)
        # Which process a renewed env is on decides its seed, and a step does not tell; later it may be gone already.
        if self._dice.random() < 0.5 and not any(track.renewed for track in self._tracks):
            self._step_all()
        else:
            self._submit()

    def _step_all(self) -> None:
        actions, _ = self._ask(self._tracks)
        obs, rewards, terminated, truncated, infos = self._envs.step(actions, timeout=self._patience())
        self._take(
            [
                _Delivered(
                    track,
                    _row(obs, self._envs.observation_spec, i),
                    rewards[i],
                    bool(terminated[i]),
                    bool(truncated[i]),
                    infos[i],
                    None,
                )
                for i, track in enumerate(self._tracks)
            ]
        )

    def _submit(self) -> None:
        free = self._free()
        tracks = free[: self._dice.randint(0, len(free))]
        if not tracks:
            return
        futures = self._envs.submit(*self._ask(tracks))
        try:
            for future in ea.as_completed(futures, timeout=self._patience()):
                step = future.result()
                self._take([_Delivered(self._tracks[step.env_id], *step[1:])])
        except concurrent.futures.TimeoutError:
            self._lose("submitted steps have not come")

    def _reset(self, tracks: Sequence[_Track]) -> None:
        """Resets envs by hand, with new seeds."""
        if not tracks:
            return
        _, ids = self._ask(tracks)
        seeds = [self._seeds + i for i in range(len(tracks))]
        self._seeds += len(tracks)
        obs, infos = self._envs.reset(seed=seeds, env_ids=ids, timeout=self._patience())
        for track, seed in zip(tracks, seeds, strict=True):
            track.root_seed, track.resets, track.renewed = seed, True, False
            track.incarnation, track.steps, track.is_known = None, 0, True
        self._take(
            [
                _Delivered(track, _row(obs, self._envs.observation_spec, i), 0.0, False, False, infos[i], None)
                for i, track in enumerate(tracks)
            ],
            seeds,
        )

    def _patience(self) -> float:
        return self._limits.stall + self._limits.start + _PATIENCE

    # Checking --------------------------------------------------------------------------------------------

    def _take(self, results: list[_Delivered], seeds: Sequence[int] | None = None) -> None:
        """Takes results in; those of resets by hand come with their seeds."""
        now = time.monotonic()
        asked, whole = [], []
        for i, result in enumerate(results):
            track = result.track
            self._tally.delivered += 1
            if track.asked is None:
                self._tally.duplicated += 1
                self._tally.note(f"turn {self._turn}, env {track.env_id}: a result that nobody asked for")
                continue
            self._progress = now
            self._time(track, now - track.asked)
            track.asked = None
            crew = self._crew_of[track.env_id]
            crew.gap -= 1
            crew.unfired += 1
            # A process that is being killed may give another result or two.
            where = self._envs[track.env_id].incarnation if result.incarnation is None else result.incarnation
            if where >= crew.successor or crew.unfired > _UNFIRED_RESULTS:
                crew.unsettled.discard(track.env_id)
            if "failure" in result.info:
                self._tally.failures += 1
                if self._replays:
                    self._tally.not_replayed += 1
                    self._tally.note(
                        f"turn {self._turn}, env {track.env_id}: not replayed after {result.info['failure']!r}"
                    )
                if seeds is None:
                    self._take_failure(result)
                    continue
            request = self._request(result, None if seeds is None else seeds[i])
            if self._script.play is not None and track.is_known:
                asked.append(request)
                whole.append(result)
            track.steps += 1
            track.resets = result.terminated or result.truncated
            track.renewed = False
            track.last = result.obs
        if asked:
            assert self._script.play is not None, "nothing was to be compared"
            for result, request, expected in zip(whole, asked, self._script.play(asked), strict=True):
                self._compare(result, request, expected)

    def _request(self, result: _Delivered, seed: int | None) -> Request:
        """What an env was asked, if this result is its answer."""
        track, incarnation = result.track, result.incarnation
        if track.resets and track.renewed and incarnation is not None:
            seed = renewed_seed(track.root_seed, incarnation)
        announced = track.resets or self._replays or None in (incarnation, track.incarnation)
        if not announced and incarnation != track.incarnation:
            self._count_mixed_up(track, f"incarnation {incarnation} came unannounced after {track.incarnation}")
        if incarnation is not None or track.resets:
            track.incarnation = incarnation
        return Request(track.env_id, track.resets, seed if track.resets else track.action)

    def _take_failure(self, result: _Delivered) -> None:
        """Takes in that an episode was broken off: the last observation once more, and a reset comes next."""
        track = result.track
        if track.is_known and not (
            same(result.obs, track.last) and result.reward == 0.0 and not result.terminated and result.truncated
        ):
            self._count_mixed_up(track, "a failure came without the last observation, reward 0 and truncated")
        track.incarnation = result.incarnation
        track.resets = track.renewed = True

    def _time(self, track: _Track, stall: float) -> None:
        self._tally.longest_stall = max(self._tally.longest_stall, stall)
        if stall <= self._limits.stall:
            return
        actor = self._envs.actors[self._crew_of[track.env_id].index]
        started = self._replays or track.renewed or actor.incarnation != track.asked_of
        if not started or stall > self._limits.stall + self._limits.start:
            self._tally.stalls += 1
            self._tally.note(f"turn {self._turn}, env {track.env_id}: its result took {stall:.2f} s")

    def _compare(self, result: _Delivered, request: Request, expected: Result) -> None:
        track = result.track
        spec: Spec = self._envs.observation_spec or spec_of_value(result.obs)
        obs = conform(spec, expected.obs, "the rehearsed observation")
        reward = conform(self._envs.reward_spec, expected.reward, "the rehearsed reward")
        if (
            same(result.obs, obs)
            and same(np.asarray(result.reward), np.asarray(reward))
            and (result.terminated, result.truncated) == (expected.terminated, expected.truncated)
        ):
            return
        track.is_known = False  # nor are those after it, until the next reset by hand
        if isinstance(obs, np.ndarray) and obs.shape == (LargeEcho.SIZE,):
            self._classify(result, head_of(result.obs), obs[:4].tolist())
        else:
            self._count_mixed_up(
                track, f"asked {request}, got {result[1:5]} of incarnation {result.incarnation}, expected {expected}"
            )

    def _classify(self, result: _Delivered, head: list[int] | None, expected: list[int]) -> None:
        """Says what is wrong with a result of an echo env."""
        tally, track = self._tally, result.track
        if head is None:
            tally.torn += 1
        elif head[0] != track.env_id:
            tally.mixed_up += 1
        elif head[1] > expected[1]:
            tally.duplicated += 1
        elif head[1] < expected[1]:
            tally.lost += 1
        else:
            tally.mixed_up += 1
        shown = result.obs[:4].tolist() if head is None else head
        tally.note(
            f"turn {self._turn}, env {track.env_id}: [env, steps, action, checksum] is {shown}"
            f"{' and torn' if head is None else ''}, expected {expected}; reward {result.reward}, terminated "
            f"{result.terminated}, truncated {result.truncated}, incarnation {result.incarnation}"
        )

    def _count_mixed_up(self, track: _Track, what: str) -> None:
        self._tally.mixed_up += 1
        self._tally.note(f"turn {self._turn}, env {track.env_id}: {what}")


def _row(batch: Any, spec: Spec | None, index: int) -> Any:
    """One env's observation of a batch."""
    if spec is None:
        return batch[index]
    return unflatten(spec, iter([leaf[index] for leaf in flatten(spec, batch)]))


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
