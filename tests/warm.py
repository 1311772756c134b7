"""An interpreter that has imported what scripts import first, and runs each in a fork of its own.

The half of a second that an interpreter takes to import this is what most short scripts take. Most of the rest is what
their fork servers take to start, so that a script has one that is a fork, too (see `nursery`), and keeps it until it
ends. The command `envactors` is such a script, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# What scripts import. There is another fork server for callers that have gymnasium.
OF_SCRIPTS = ("numpy", "envactors.vector_env", "envactors.backends.process", "gymnasium")

_SERVER = """
def serve():
    import gc, importlib.util, json, os, sys
    import envactors as ea
    sys.path.insert(0, sys.argv[1])
    import nursery
    del sys.path[0], sys.modules["nursery"]
    for module in sys.argv[2:]:
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    # At its end a fork would look through all of this for garbage, and so copy it.
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        path, arguments, keeps_server, environment, directory, output, errors = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            for fd, name, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
                opened = os.open(name, flags)
                os.dup2(opened, fd)
                os.close(opened)
            sys.argv[:] = [path, *arguments]
            sys.path[0] = os.path.dirname(path)
            nursery.fork_nursery()
            if keeps_server:
                ea.ProcessBackend().use({}).open()
            with open(path) as file:
                return path, compile(file.read(), path, "exec")
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()

# A script finds no names but its own, so that it must import what it uses.
__file__, code = serve()
del serve
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

    def run(self, script, arguments, directory, *, environment=os.environ, keeps_server=True):
        """Runs a script in a directory, in an environment that is by default the present one."""
        output, errors = directory / "stdout", directory / "stderr"
        # Another script may have left its own there.
        output.write_text("")
        errors.write_text("")
        request = [str(script), arguments, keeps_server, {**environment}, str(directory), str(output), str(errors)]
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline()
        assert code, "the interpreter has ended"
        return Done(int(code), output.read_text(), errors.read_text())


@contextlib.contextmanager
def warm_interpreter(*flags, modules=OF_SCRIPTS):
    """Start an interpreter with these flags, which imports those of the modules that are installed."""
    command = [sys.executable, *flags, "-c", _SERVER, str(Path(__file__).parent), *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield WarmInterpreter(process)
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()
