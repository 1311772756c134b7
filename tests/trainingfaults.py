"""An env that fails again and again, for runs of training that must end as they would without failures."""

from __future__ import annotations

import os
import signal

import gymnasium

import envactors as ea


class Failing(gymnasium.Wrapper):
    """Each of its first processes ends in one of its steps: by a signal, by an exception, and so on in turn.

    Steps that are replayed in a new process count too, so the failures are ``every`` steps apart.

    Args:
        env: The env.
        every: How many steps are between failures.
        count: How many processes fail.
    """

    def __init__(self, env, every, count):
        super().__init__(env)
        actor = ea.current_actor()
        incarnation = count if actor is None else actor.incarnation
        self.kills = incarnation % 2 == 0
        self.left = (incarnation + 1) * every if incarnation < count else 0

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("fails again and again")
        return super().step(action)
