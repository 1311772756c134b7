"""Pickled values and exceptions in another interpreter."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import cloudpickle
from helpers import TwoArguments

from envactors.mailbox.messages import Fault
from envactors.mailbox.pickling import dumps, pack_failure, unpack_failure

MAIN = """
class Value:
    def __init__(self, number):
        self.number = number

class MainError(Exception):
    def __init__(self, code, detail):
        super().__init__(detail)
        self.code = code

def double(value):
    return Value(2 * value.number)
"""


def test_objects_from_main_are_pickled_by_value(monkeypatch):
    """The other half has a main module of its own, without any of this."""
    main = {"__name__": "__main__"}
    exec(MAIN, main)
    for name in ("Value", "MainError", "double"):
        monkeypatch.setattr(sys.modules["__main__"], name, main[name], raising=False)

    class Local(TwoArguments):
        pass

    failures = [pack_failure(error, Fault.RAISED) for error in (main["MainError"](7, "boom"), Local(8, "bang"))]
    assert type(unpack_failure(failures[0])) is main["MainError"]
    said = in_another_interpreter(
        """
        value, double = loads(data[0])
        print(double(value).number, type(value).__module__)
        for packed in data[1:]:
            error = unpack_failure(Failure(*loads(packed)))
            print(type(error).__name__, error, error.code)
        """,
        [dumps((main["Value"](21), main["double"])), *(dumps(tuple(failure)) for failure in failures)],
    )
    assert said == ["42 __main__", "MainError boom 7", "Local 8: bang 8"]


def test_objects_from_modules_that_are_registered_are_pickled_by_value(monkeypatch):
    module = types.ModuleType("only_here")
    exec(MAIN, vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        data = dumps((module.Value(21), module.double))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert in_another_interpreter("value, double = loads(data[0])\nprint(double(value).number)", [data]) == ["42"]


def in_another_interpreter(code, data):
    script = """
import pickle, sys
sys.path += sys.argv[1:]
from envactors.mailbox.messages import Failure
from envactors.mailbox.pickling import loads, unpack_failure
data = pickle.load(sys.stdin.buffer)
"""
    done = subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(code), str(Path(__file__).parents[1])],
        input=pickle.dumps(data),
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    return done.stdout.decode().splitlines()
