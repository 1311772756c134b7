"""An env for workers in other interpreters: needs NumPy alone, and Python 3.10."""

from __future__ import annotations

import logging
import os
import sys
import time

import numpy as np


class Space:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def sample(self):
        return np.zeros(self.shape, self.dtype)


class Elsewhere:
    """Counts its steps, and tells where it runs."""

    observation_space = Space((2,), np.float32)
    action_space = Space((), np.int64)

    def __init__(self):
        self.steps = 0
        self._variables = dict(os.environ)
        self._names = {*sys.modules}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observe(), {"version": sys.version_info[:2], "spread": np.arange(10)[::2]}

    def step(self, action):
        self.steps += 1
        return self._observe(), np.float32(self.steps), np.bool_(False), False, {"noise": np.full(3, action, ">i2")}

    def _observe(self):
        return np.array([self.steps, sys.version_info[1]], np.float32)

    def where(self):
        import envactors

        return sys.version_info[:2], np.__version__, sys.executable, envactors.__file__, sys.path

    def variable(self, name):
        return self._variables.get(name)

    def imported(self, name):
        return name in self._names

    def parent(self):
        return os.getppid()

    def echo(self, value):
        return value

    def decode(self, content):
        from envactors.mailbox.info_codec import decode

        info, _ = decode(content)
        return info

    def exit(self):
        sys.stderr.write("leaving\n")
        os._exit(3)

    def sleep(self):
        time.sleep(1000.0)

    def log(self, text):
        logging.getLogger("simulator").warning("told: %s", text)

    def code(self):
        return lambda: 1

    def fail(self, kind):
        if kind == "ufunc":
            np.add("a", 1)
        elif kind == "memory":
            np.zeros(1 << 50)
        elif kind == "axis":
            np.zeros(3).sum(axis=4)
        elif kind == "attribute":
            self.nothing  # noqa: B018
        elif kind == "import":
            import no_such_module  # noqa: F401
        elif kind == "unicode":
            b"\xff".decode()
        elif kind == "own":
            raise Own("told", 3)


class Own(Exception):
    def __init__(self, text, number):
        super().__init__(text)
        self.number = number


class Factories:
    number = 3

    @staticmethod
    def make():
        return Elsewhere()


def broken():
    raise LookupError("no such env")
