"""Long runs of a vector whose workers are killed all the while, and what is compared of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import zlib

import numpy as np
from helpers import SOON, journals

import envactors as ea

COUNT = 8


def checksum_of_run(make, actions, steps, seconds=None, every=None, **options):
    """Return the checksum over all observations and rewards of that many steps, the longest replay, and the restarts.

    Args:
        make: Makes an env.
        actions: The actions of 8 envs, by step; they come again.
        steps: How many steps of all envs together.
        seconds: From one kill to the next; None for none.
        every: Steps of the vector from one kill to the next, however long they take; None for none.
        options: Those of the vector.
    """
    stop = threading.Event()
    restart = ea.RestartPolicy(max_restarts=100_000, backoff=0.0)
    given = {"on_failure": "replay", "envs_per_actor": 4, "restart": restart, **options}
    with ea.VectorEnv([make] * COUNT, **given) as envs:
        dice = random.Random(3)

        def kill():
            pid = dice.choice(envs.actors).pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it may have ended since
                    os.kill(pid, signal.SIGKILL)

        def storm():
            while not stop.wait(seconds):
                kill()

        thread = threading.Thread(target=storm)
        check = zlib.crc32(envs.reset(seed=1)[0])
        if seconds is not None:
            thread.start()
        try:
            longest = 0
            for turn in range(steps // COUNT):
                if every is not None and turn % every == every // 2:
                    kill()
                obs, rewards, _, _, infos = envs.step(actions[turn % len(actions)])
                check = zlib.crc32(rewards, zlib.crc32(np.ascontiguousarray(obs), check))
                assert not any("failure" in info for info in infos)
                if turn % 997 == 0:  # at no multiple of the steps between snapshots
                    longest = max(longest, *(journal._size for actor in envs.actors for journal in journals(actor)))
        finally:
            stop.set()
            if seconds is not None:
                thread.join(SOON)
        return check, longest, sum(actor.stats().restarts for actor in envs.actors)
