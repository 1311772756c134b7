"""The env of simulated processes: it shows whose result is whose, and behaves as badly as the world wants."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar

import envactors as ea
from envactors.mailbox.slab import INLINE_INFO_ROOM
from envactors.testing import EchoEnv, expected_checksum
from simulation.world import Killed, Violation, World

_LARGEST_SEED = (1 << 63) - 1
# A process that crashes while it writes a result makes at most this many stores before.
_MOST_LAST_STORES = 6
# The deadline of steps, if there are any, in seconds.
STEP_DEADLINE = 1.0


class EnvFailedError(Exception):
    """The exception of an env."""


class Large:
    """An info that does not fit into a row."""

    def __init__(self) -> None:
        self.content = bytes(INLINE_INFO_ROOM)


class Misbehaving:
    """An env that crashes, hangs, sleeps, or raises at random."""

    world: ClassVar[World]
    # How likely each kind of trouble is, per step, reset, or call.
    trouble: ClassVar[float] = 0.0
    may_hang: ClassVar[bool] = False

    def __init__(self) -> None:
        self._process = next(process for process in self.world.processes if process.fiber is self.world.fiber)

    @property
    def env_id(self) -> int:
        """Its index in the vector."""
        actor = ea.current_actor()
        assert actor is not None, "its code runs in workers"
        return actor.index

    @env_id.setter
    def env_id(self, value: int) -> None:
        del value

    def _misbehave(self) -> None:
        world = self.world
        if not world.chance(self.trouble):
            return
        kinds = ("crash", "die", "raise", "nap", *(("hang", "late") if self.may_hang else ("nap",)))
        kind = world.random.choice(kinds)
        world.note(f"env {self.env_id} in process {self._process.number}: {kind}")
        world.troubles += kind != "nap"
        if kind == "crash":
            self._process.crash()
        elif kind == "die":
            self._process.fiber.stores_left = world.random.randint(1, _MOST_LAST_STORES)
        elif kind == "raise":
            raise EnvFailedError(f"env {self.env_id} has failed")
        elif kind == "nap":
            self._process.sleep(world.random.choice((0.001, 0.1, 0.3)))
        else:
            world.hang(self._process.number, self.env_id)
            seconds = None if kind == "hang" else world.random.choice((0.9, 1.1, 1.1, 2.1))
            env_id, token, number = world.log[-1]
            if (env_id, number) == (self.env_id, self._process.number) and (seconds is None or seconds > STEP_DEADLINE):
                world.too_late[env_id, token].add(number)
            self._process.sleep(seconds)


class SimulatedEnv(Misbehaving, EchoEnv):
    """An `EchoEnv` that misbehaves."""

    # Interval of the actions that end the process; 0 for none.
    poison: ClassVar[int] = 0
    # Whether the process of an env that has raised in a step or reset must not be used any more.
    discards: ClassVar[bool] = False
    # Whether a call that runs again, in another process, often ends that, too: its retries are to run out.
    ends_retries: ClassVar[bool] = False
    # How long each step takes, in seconds.
    pace: ClassVar[float] = 0.0
    # The most episodes that end in a process before it is replaced; None if it never is.
    most_episodes: ClassVar[int | None] = None
    # How many steps an episode has.
    length: ClassVar[int] = 3

    def __init__(self) -> None:
        Misbehaving.__init__(self)
        EchoEnv.__init__(self, episode_length=self.length)
        self.tag = 0
        self._is_fresh, self._has_raised = True, False
        # How many episodes have ended here, without those too short for the process to be replaced.
        self._episodes = 0
        # The token of the step that ended an episode, which may also reset the env; 0 for none.
        self._last_step = 0
        self._misbehave()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.log.append((self.env_id, None, self._process.number))
        with self._counted(self._last_step):
            try:
                self._misbehave()
            except (EnvFailedError, Killed):
                self.world.failed_resets.add(self.env_id)
                if self.most_episodes == 2 and self._episodes:
                    self._episodes -= 1  # in a reset within a step, the end of the episode is not reported
                # Nobody learns of what fails in a process that is being ended.
                is_ending = self._process.is_being_killed or self._process.number in self.world.late
                if seed is not None and not is_ending:
                    self.world.failed_seeds.add((self.env_id, seed))
                raise
        if self.most_episodes is not None and self._episodes >= self.most_episodes:
            self.world.errors.append(Violation(f"env {self.env_id} is reset in a process that is too old"))
        # The checksum has no place for larger ones.
        obs, info = super().reset(seed=None if seed is None else seed % _LARGEST_SEED, options=options)
        actor = ea.current_actor()
        assert actor is not None, "its code runs in workers"
        is_renewed, self._is_fresh = self._is_fresh and actor.incarnation > 0, False
        return obs, {**info, "seed": seed, "is_renewed": is_renewed}

    def step(self, action: Any) -> Any:
        if self._is_fresh:
            self.world.errors.append(Violation(f"env {self.env_id} steps, and was never reset in its process"))
        self.world.log.append((self.env_id, int(action), self._process.number))
        with self._counted(int(action)):
            if self.pace:
                self._process.sleep(self.pace)
            self._misbehave()
            if self.poison and int(action) % self.poison == 0:
                self.world.troubles += 1
                self._process.crash()
        obs, reward, terminated, truncated, info = super().step(action)
        self._episodes += terminated
        self._last_step = int(action) if terminated else 0
        if self.world.chance(0.2):
            info = {"token": int(action)}
            if self.world.chance(0.3):
                info["large"] = Large()  # it has no place in the row
        return obs, reward, terminated, truncated, info

    def note(self, token: int) -> int:
        """Return the token."""
        self.world.note(f"env {self.env_id} in process {self._process.number} notes {token}")
        has_run = self.ends_retries and any(entry[:2] == (self.env_id, token) for entry in self.world.log)
        self.world.log.append((self.env_id, token, self._process.number))
        if has_run and self.world.chance(0.5):
            self.world.troubles += 1
            self._process.crash()
        self.checksum = zlib.crc32(struct.pack("<q", token), self.checksum)
        self._misbehave()
        return token

    @contextlib.contextmanager
    def _counted(self, token: int) -> Iterator[None]:
        """Run a step with this token, or a reset that may belong to that step, and note whether it raises."""
        world = self.world
        if self._has_raised and self.discards:
            world.errors.append(Violation(f"env {self.env_id} has raised, and runs in the same process"))
        try:
            world.pause_worker()
            yield
        except EnvFailedError:
            self._has_raised = True
            world.raised[token] += 1
            raise


def checksum_of(seed: int | None) -> int:
    """Return the checksum of an env that was just reset with a seed."""
    return expected_checksum(None if seed is None else seed % _LARGEST_SEED, ())
