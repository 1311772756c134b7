"""Raises an exception at one line of the library in the calling thread, as an asynchronous exception would."""

from __future__ import annotations

import ast
import dis
import functools
import gc
import signal
import sys
from pathlib import Path
from types import CodeType

import envactors as ea

PACKAGE = str(Path(ea.__file__).parent)
# Beginnings of lines at which only a tracer can raise, and which the compiler's exception table does not cover: a lock
# would stay taken, or an exception would stay handled.
UNCOVERED = {dis.opmap[name] for name in ("NOP", "POP_EXCEPT") if name in dis.opmap}


class Interrupt(Exception):
    """The exception that is raised."""


@functools.cache
def bodies_of_with(filename):
    """The last line of each ``with`` statement of a file, by the lines of its head."""
    last = {}
    for node in ast.walk(ast.parse(Path(filename).read_text())):
        if isinstance(node, ast.With):
            last.update(dict.fromkeys(range(node.lineno, node.body[0].lineno), node.end_lineno))
    return last


def interrupt(function, number, *, only=None, signum=None):
    """Calls a function and raises `Interrupt` before its line number ``number`` of the library's code.

    With ``only``, a set of names, lines of functions with these names count alone. With ``signum`` that signal comes
    instead.

    Three kinds of lines are left out, since an exception cannot come there: the end of a ``with`` statement, which is
    traced as a line, although the interpreter looks for no exceptions of others between the last instruction of the
    body and the exit; lines without an instruction, such as ``try:``, which compilers do not count as part of the
    ``with`` that they stand in; and the ``return`` or ``break`` of an ``except`` clause, which begins with the end of
    the exception.

    Returns:
        Where that was; None if the function has ended before.
    """
    left, where = number, None
    # The line before, by frame.
    before_in = {}

    def trace(frame, event, _arg):
        nonlocal left, where
        filename = frame.f_code.co_filename
        if not filename.startswith(PACKAGE):
            return None
        if event == "line":
            line, before = frame.f_lineno, before_in.get(frame, 0)
            before_in[frame] = line
            if line <= before <= bodies_of_with(filename).get(line, 0):
                return trace
            if frame.f_code.co_code[frame.f_lasti] in UNCOVERED:
                return trace
            if only is not None and frame.f_code.co_name not in only:
                return trace
            if left == 0:
                where = f"{Path(filename).name}:{line}"
                sys.settrace(None)
                if signum is None:
                    raise Interrupt(where)
                signal.raise_signal(signum)
                return None
            left -= 1
        elif event == "return":
            before_in.pop(frame, None)
        return trace

    outer = sys.gettrace()
    gc.disable()  # a collection would run the finalizers of what earlier calls have left, at any line
    sys.settrace(trace)
    try:
        function()
    except BaseException:
        # The interrupt may have become the cause of another error, such as the failure of an env.
        if where is None:
            raise
    finally:
        sys.settrace(outer)
        gc.enable()
        before_in.clear()
    return where


@functools.cache
def with_exits(code: CodeType) -> set[int]:
    """Return the offsets at which a code object leaves ``with`` blocks, and those of `UNCOVERED` instructions.

    Python reports the line of the ``with`` statement again where it leaves the block, also with an exception. No signal
    handler runs at these points, before the context is left.
    """
    found, instructions = set(), list(dis.get_instructions(code))
    for place, one in enumerate(instructions[:-2]):
        if one.opcode in UNCOVERED:
            found.add(one.offset)
        if instructions[place + 1].opname == "WITH_EXCEPT_START":
            found.update((one.offset, instructions[place + 1].offset))
        others = instructions[place + 1 : place + 3]
        is_first = one.opname == "LOAD_CONST" and one.argval is None
        if is_first and all(i.opname == "DUP_TOP" or (i.opname == "LOAD_CONST" and i.argval is None) for i in others):
            found.add(one.offset)
            before = instructions[place - 1]
            if before.opname in ("SWAP", "ROT_TWO", "ROT_THREE"):  # a ``return`` in the block
                found.add(before.offset)
    return found
