"""Driving a vector env through a plan of faults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import envactors as ea
from envactors.arrays.specs import split_batch
from envactors.testing.census import Census
from envactors.testing.crew import Crew
from envactors.testing.plan import Fault
from envactors.testing.referee import Limits, Referee
from envactors.testing.rehearsal import Script
from envactors.testing.sabotage import Orders
from envactors.testing.tally import ChaosReport, Tally
from envactors.testing.track import Delivered, Track

_PATIENCE = 20.0  # seconds beyond that, after which a result counts as lost
_SHORT_REST = 0.002
_GLANCE = 0.05
_WATCH_PERIOD = 0.1
_LONGEST_EPISODE = 200  # steps after which an env is given a new seed
_LAST_ROUNDS = 3


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
        self._script = script
        self._tally = tally
        self._patience = limits.stall + limits.start + _PATIENCE
        self._watch = watch
        self._watched = 0.0
        self._dice = random.Random(tally.seed)  # noqa: S311 # no secret
        self._census = Census(envs.actors, orders, tally, limits.stall)
        self._referee = Referee(envs, script, tally, limits)
        self._tracks = [Track(i, envs[i]) for i in range(envs.num_envs)]
        size = -(-envs.num_envs // len(envs.actors))
        self._crews = [
            Crew(
                actor,
                self._tracks[index * size : (index + 1) * size],
                plan,
                orders,
                self._census,
                tally,
                limits.deadline,
            )
            for index, actor in enumerate(envs.actors)
        ]
        self._crew_of = {track.env_id: crew for crew in self._crews for track in crew.tracks}
        self._seeds = tally.seed

    # The course of it ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lets everything happen that is planned, and a few rounds more."""
        try:
            self._reset(self._tracks)
            while any(crew.faults for crew in self._crews):
                self._check_progress()
                for crew in self._crews:
                    crew.sabotage()
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
        for index, (crew, actor) in enumerate(zip(self._crews, stats.actors, strict=True)):
            if actor.restarts > crew.ends:
                self._tally.unexplained += actor.restarts - crew.ends
                self._tally.note(
                    f"actor {index} was restarted {actor.restarts} times, and lost {crew.ends} processes by "
                    f"faults; the last failure: {actor.last_failure}"
                )

    def account_for_processes(self) -> None:
        """Looks for processes that should be gone, once the envs are closed."""
        self._census.close()

    def _look_around(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self._watched + _WATCH_PERIOD and not at_once:
            return
        self._watched = now
        self._tally.renewals = sum(actor.incarnation for actor in self._envs.actors)
        self._census.look()
        if self._watch is not None:
            self._watch(self._tally.report())

    def _check_progress(self) -> None:
        self._look_around()
        if time.monotonic() > self._tally.progress + self._patience:
            waiting = [fault for crew in self._crews for fault in crew.faults]
            self._lose(f"nothing happens any more, and these faults wait: {waiting[:3]}")

    def _lose(self, why: str) -> None:
        """Gives up, with all results that are owed."""
        owing = [track.env_id for track in self._tracks if track.asked is not None]
        self._tally.lost += max(len(owing), 1)
        self._tally.note(f"turn {self._tally.turn}, the envs {owing} owe results: {why}")
        raise _OverError

    # Asking ----------------------------------------------------------------------------------------------

    def _ask(self, tracks: Iterable[Track]) -> tuple[list[Any], list[int]]:
        """Notes that envs are asked to step; gives their actions and ids."""
        actions, ids = [], []
        for track in tracks:
            track.ask(self._script.action(track.env_id, self._tally.turn))
            actions.append(track.action)
            ids.append(track.env_id)
        self._tally.turn += 1
        return actions, ids

    def _free(self) -> list[Track]:
        """The envs that can be asked, in any order."""
        free = [track for crew in self._crews if not crew.is_held for track in crew.tracks if track.asked is None]
        self._dice.shuffle(free)
        return free

    def _due(self) -> list[Track]:
        """The envs that are to be reset by hand."""
        due = set().union(*(crew.due() for crew in self._crews))
        return [
            track
            for track in self._tracks
            if track.steps >= _LONGEST_EPISODE
            or (not track.is_known and self._script.play is not None)
            or track.env_id in due
        ]

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
        self._take_batch(
            [self._tracks[env_id] for env_id in batch.env_ids.tolist()],
            batch.obs,
            batch.rewards,
            batch.terminated.tolist(),
            batch.truncated.tolist(),
            batch.infos,
            batch.incarnations.tolist(),
        )

    def _drain(self) -> None:
        while any(track.asked is not None for track in self._tracks):
            self._check_progress()
            self._receive()
        for crew in self._crews:
            crew.look()

    def _gather(self) -> None:
        """Waits for all results, and asks for the next ones in another way."""
        self._drain()
        self._reset(self._due())
        # Which process a renewed env is on decides its seed, and a step does not tell; later it may be gone already.
        if self._dice.random() < 0.5 and not any(track.renewed for track in self._tracks):
            self._step_all()
        else:
            self._submit()

    def _step_all(self) -> None:
        actions, _ = self._ask(self._tracks)
        obs, rewards, terminated, truncated, infos = self._envs.step(actions, timeout=self._patience)
        nowhere = [None] * len(infos)
        self._take_batch(self._tracks, obs, rewards, terminated.tolist(), truncated.tolist(), infos, nowhere)

    def _submit(self) -> None:
        free = self._free()
        tracks = free[: self._dice.randint(0, len(free))]
        if not tracks:
            return
        futures = self._envs.submit(*self._ask(tracks))
        try:
            for future in ea.as_completed(futures, timeout=self._patience):
                step = future.result()
                self._take([Delivered(self._tracks[step.env_id], *step[1:])])
        except concurrent.futures.TimeoutError:
            self._lose("submitted steps have not come")

    def _reset(self, tracks: Sequence[Track]) -> None:
        """Resets envs by hand, with new seeds."""
        if not tracks:
            return
        _, ids = self._ask(tracks)
        seeds = [self._seeds + i for i in range(len(tracks))]
        self._seeds += len(tracks)
        obs, infos = self._envs.reset(seed=seeds, env_ids=ids, timeout=self._patience)
        for track, seed in zip(tracks, seeds, strict=True):
            track.begin(seed)
        count = len(tracks)
        self._take_batch(tracks, obs, [0.0] * count, [False] * count, [False] * count, infos, [None] * count, seeds)

    # Taking ----------------------------------------------------------------------------------------------

    def _take_batch(self, tracks: Sequence[Track], obs: Any, *columns: Iterable[Any]) -> None:
        """Takes results in, whose further columns are as in `Delivered`."""
        rows = split_batch(self._envs.observation_spec, obs, len(tracks), "observations")
        self._take([Delivered(*row) for row in zip(tracks, rows, *columns, strict=True)])

    def _take(self, results: Iterable[Delivered]) -> None:
        admitted = self._referee.admit(results)
        for result in admitted:
            self._crew_of[result.track.env_id].give(result.track.env_id, result.incarnation)
        self._referee.judge(admitted)
