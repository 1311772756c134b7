"""An interpreter that has imported what scripts import first, and runs each in a fork of its own.

The half of a second that an interpreter takes to import this is what most short scripts take. Most of the rest is what
their fork servers take to start, so that a script keeps its own until it ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import NamedTuple

_SERVER = """
import importlib.util, json, os, sys
import numpy
import envactors as ea
ea.VectorEnv, ea.spawn, ea.ProcessBackend
if importlib.util.find_spec("gymnasium"):  # there is another server for callers that have it
    importlib.import_module("gymnasium")

def run():
    for line in iter(sys.stdin.readline, ""):
        path, arguments, keeps_server, directory, output, errors = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(directory)
            for fd, name, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
                opened = os.open(name, flags)
                os.dup2(opened, fd)
                os.close(opened)
            sys.argv[:] = [path, *arguments]
            sys.path[0] = os.path.dirname(path)
            if keeps_server:
                ea.ProcessBackend().retain({})
            return path
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()

path = run()
del run
__file__ = path
with open(path) as file:
    code = compile(file.read(), path, "exec")
exec(code)
"""


class Done(NamedTuple):
    """How a script has ended."""

    returncode: int
    stdout: str
    stderr: str


class WarmInterpreter:
    """Runs scripts one after the other."""

    def __init__(self, process):
        self._process = process

    def run(self, script, arguments, directory, *, keeps_server=True):
        output, errors = directory / "stdout", directory / "stderr"
        output.touch()
        errors.touch()
        request = [str(script), arguments, keeps_server, str(directory), str(output), str(errors)]
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline()
        assert code, "the interpreter has ended"
        return Done(int(code), output.read_text(), errors.read_text())


@contextlib.contextmanager
def warm_interpreter(*flags):
    """Start an interpreter with these flags."""
    command = [sys.executable, *flags, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield WarmInterpreter(process)
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()
