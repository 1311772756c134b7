"""The core stays small enough to be read: bounds on files, classes, functions and imports, and on one warm step."""

from __future__ import annotations

import ast
import collections
import inspect
import io
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest
from helpers import FORK_SERVER

import envactors as ea
from envactors.actor.wait_tuner import BOTH_SPIN, WaitTuner

PACKAGE = Path(ea.__file__).parent
# What stands beside the core: it is imported by nothing in it.
BESIDE = ("cli", "integrations", "observe", "remote", "state", "testing", "tuning")

# Lines of a file; of code of a class with its bases, and of a function: without docstrings, comments and blank lines.
MOST_FILE_LINES = 400
MOST_CLASS_LINES = 250
MOST_FUNCTION_LINES = 40
# Methods of a class beside those that start and end with two underscores and the names of the public API.
MOST_METHODS = 30
# Lines of code of the whole core: it may shrink, towards 5,800, but not grow, except by what it learns to do.
LIMIT = 9_385
# One warm step of eight envs in two processes: files and Python calls in the caller, calls in a worker.
MOST_STEP_FILES = 10
MOST_CALLER_CALLS = 30
MOST_WORKER_CALLS = 20
# What the caller's half may know of the worker's: names of the API.
WORKER_API = "envactors.worker.context"


def public_names():
    values = [getattr(ea, name) for name in ea.__all__]
    members = {name for value in values if inspect.isclass(value) for name in dir(value)}
    return {name for name in {*ea.__all__, *members} if not name.startswith("_")}


def lines_of_code(text, tree):
    """Returns the numbers of the lines that hold code."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


class Module:
    """One file of the core."""

    def __init__(self, path):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        self.name = ".".join(("envactors", *parts)).removesuffix(".__init__")
        self.package = self.name if path.stem == "__init__" else self.name.rpartition(".")[0]
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.code = lines_of_code(self.text, self.tree)

    def size(self, node):
        return sum(1 for line in self.code if node.lineno <= line <= node.end_lineno)

    def imports(self, modules):
        """Returns the modules of the package that it imports, also for types alone, and within functions."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    base = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    origin = ".".join([*base, *filter(None, [node.module])])
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    found.add(inner if inner in modules else origin)
        return {name for name in found if name in modules}


def of_core(path):
    return path.relative_to(PACKAGE).parts[0] not in BESIDE


ALL = {module.name: module for module in map(Module, sorted(PACKAGE.rglob("*.py")))}
CORE = {module.name: module for module in map(Module, filter(of_core, sorted(PACKAGE.rglob("*.py"))))}
CLASSES = {
    node.name: (module, node)
    for module in CORE.values()
    for node in ast.walk(module.tree)
    if isinstance(node, ast.ClassDef)
}


def circles(graph):
    """Returns groups of names each of which can be reached from each other."""

    def reachable(start):
        seen, left = set(), [*graph[start]]
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += graph[name]
        return seen

    reach = {name: reachable(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def with_bases(name):
    """Returns a class of the core and its bases there, each with its file."""
    found, left = {}, [name]
    while left:
        one = left.pop()
        if one in CLASSES and one not in found:
            found[one] = CLASSES[one]
            left += [base.id for base in CLASSES[one][1].bases if isinstance(base, ast.Name)]
    return found.values()


def test_the_measures_measure():
    text = '"""Doc."""\n\n# A comment.\nclass A:\n    """Doc\n    string."""\n\n    x = (\n        1,\n    )\n'
    assert lines_of_code(text, ast.parse(text)) == {4, 8, 9, 10}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}}) == {frozenset("abc"), frozenset("d")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()
    assert {"step", "submit", "spawn"} <= public_names()
    assert len(CORE) > 50
    assert any(len(with_bases(name)) > 1 for name in CLASSES)
    assert "envactors.errors" in ALL["envactors.vector.facade"].imports(ALL)


def test_imports_run_in_no_circles():
    # The package itself is lazy: its names are imported when they are first used.
    graph = {name: module.imports(ALL) - {"envactors", name} for name, module in ALL.items()}
    assert circles(graph) == set()


def test_the_callers_half_knows_nothing_of_the_workers():
    found = {
        (name, imported)
        for name, module in CORE.items()
        for imported in module.imports(ALL)
        if name.startswith(("envactors.actor", "envactors.vector")) and imported.startswith("envactors.worker")
    }
    assert {pair for pair in found if pair[1] != WORKER_API} == set()


def test_the_core_imports_nothing_of_what_stands_beside_it():
    beside = tuple(f"envactors.{name}" for name in BESIDE)
    imports = {(name, other) for name, module in CORE.items() for other in module.imports(ALL)}
    # The names of the package are imported when they are used.
    found = {pair for pair in imports if pair[1].startswith(beside) and pair[0] != "envactors"}
    assert found == set()


def test_no_file_is_too_long():
    lengths = {name: module.text.count("\n") for name, module in CORE.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_FILE_LINES} == {}


def test_no_class_is_too_large():
    public = public_names()
    too_large = {}
    for name in CLASSES:
        family = with_bases(name)
        lines = sum(module.size(node) for module, node in family)
        methods = {
            part.name
            for _, node in family
            for part in node.body
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
            and not part.name.startswith("__")
            and part.name not in public
        }
        if lines > MOST_CLASS_LINES or len(methods) > MOST_METHODS:
            too_large[name] = lines, len(methods)
    assert too_large == {}


def test_no_function_is_too_long():
    lengths = {
        f"{module.name}.{node.name}": module.size(node)
        for module in CORE.values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


def test_the_core_does_not_grow_back():
    total = sum(len(module.code) for module in CORE.values())
    assert total <= LIMIT, f"{total} lines of code"


# One step ------------------------------------------------------------------------------------------------

STEPS = 500


class Box:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


class Calls:
    """Counts calls of the package's functions in this thread, by file, from one lap to the next."""

    def __init__(self):
        self.seen = collections.Counter()
        self.laps = []
        sys.setprofile(self.note)

    def note(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.seen[frame.f_code.co_filename[len(str(PACKAGE)) :]] += 1

    def lap(self):
        self.laps.append(self.seen)
        self.seen = collections.Counter()

    def least(self):
        """Returns the calls of the lap that had the fewest, without the first and the last one."""
        sys.setprofile(None)
        return dict(min(self.laps[1:-1], key=lambda lap: sum(lap.values())))


class Watched:
    """Does nothing; can count the calls in its worker, from one step to the next."""

    calls = None

    def __init__(self):
        self.observation_space, self.action_space = Box((4,), np.float32), Box((), np.int64)
        self.obs = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        if self.calls is not None:
            self.calls.lap()
        return self.obs, 0.0, False, False, {}

    def watch(self):
        self.calls = Calls()

    def report(self):
        calls, self.calls = self.calls, None
        return calls.least()


@pytest.fixture(scope="module")
def step_calls():
    """The calls of one warm step in the caller, and in a worker of four envs, by file: the least of many steps.

    On a busy machine many steps sleep, which takes more; so the one strategy to choose from is to spin.
    """
    before = sys.getprofile()
    try:
        with ea.VectorEnv([Watched] * 8, envs_per_actor=4, backend=FORK_SERVER) as envs:
            envs.reset(seed=0)
            actions, tuner = np.zeros(8, np.int64), WaitTuner(may_spin=True)
            tuner._short = tuner._long = tuner._candidates = (BOTH_SPIN,)
            envs._stepper._tuner = tuner

            def make_steps(after_each):
                for _ in range(STEPS):
                    envs.step(actions)
                    after_each()

            make_steps(lambda: None)
            calls = Calls()
            make_steps(calls.lap)
            in_caller = calls.least()
            envs[0].watch().result()
            make_steps(lambda: None)
            return {"caller": in_caller, "worker": envs[0].report().result()}
    finally:
        sys.setprofile(before)


def test_a_warm_step_goes_through_few_files(step_calls):
    assert len(step_calls["caller"]) <= MOST_STEP_FILES, step_calls["caller"]


@pytest.mark.parametrize(("half", "most"), [("caller", MOST_CALLER_CALLS), ("worker", MOST_WORKER_CALLS)])
def test_a_warm_step_makes_few_calls(step_calls, half, most):
    assert 5 < sum(step_calls[half].values()) <= most, step_calls[half]
