"""The core stays small enough to be read: bounds on files, classes, functions and imports."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import tokenize
from pathlib import Path

import pytest

import envactors as ea

PACKAGE = Path(ea.__file__).parent
# What stands beside the core: it is imported by nothing in it.
BESIDE = ("cli", "integrations", "observe", "remote", "testing", "tuning")
# What the core uses, and what is counted apart, under the same bounds: rooms for what not every user needs.
APART = ("rollout", "state")

# Lines of a file; of code of a class with its bases, and of a function: without docstrings, comments and blank lines.
MOST_FILE_LINES = 400
MOST_CLASS_LINES = 250
MOST_FUNCTION_LINES = 40
# Methods of a class beside those that start and end with two underscores and the names of the public API.
MOST_METHODS = 30
# Lines of code that the whole core should have at most; the goal after that is 5,800.
LIMIT = 6_800
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


def parse(text: str) -> ast.Module:
    """Parses a module; before Python 3.11.8 that fails once in a while, as another thread prints a traceback."""
    with contextlib.suppress(SystemError):  # github.com/python/cpython/issues/106905
        return ast.parse(text)
    return ast.parse(text)


class Module:
    """One file of the package."""

    def __init__(self, path):
        self.path = path
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        self.name = ".".join(("envactors", *parts)).removesuffix(".__init__")
        self.package = self.name if path.stem == "__init__" else self.name.rpartition(".")[0]
        self.text = path.read_text()
        self.tree = parse(self.text)

    @functools.cached_property
    def code(self):
        return lines_of_code(self.text, self.tree)

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


def room_of(path):
    return path.relative_to(PACKAGE).parts[0]


def of_core(path):
    return room_of(path) not in (*BESIDE, *APART)


# Functions, since every process that runs tests imports this file, and reading the package takes seconds.
@functools.cache
def whole_package():
    return {module.name: module for module in map(Module, sorted(PACKAGE.rglob("*.py")))}


@functools.cache
def core():
    return {name: module for name, module in whole_package().items() if of_core(module.path)}


@functools.cache
def bounded():
    """Returns the core and what is counted apart."""
    return core() | {name: module for name, module in whole_package().items() if room_of(module.path) in APART}


@functools.cache
def classes(modules=core):
    return {
        node.name: (module, node)
        for module in modules().values()
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
    """Returns a class and its bases in the core, each with its file."""
    found, left = {}, [name]
    while left:
        one = left.pop()
        if one in classes() and one not in found:
            found[one] = classes()[one]
            left += [base.id for base in classes()[one][1].bases if isinstance(base, ast.Name)]
    return found.values() or [classes(bounded)[name]]


def test_the_measures_measure():
    text = '"""Doc."""\n\n# A comment.\nclass A:\n    """Doc\n    string."""\n\n    x = (\n        1,\n    )\n'
    assert lines_of_code(text, ast.parse(text)) == {4, 8, 9, 10}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}}) == {frozenset("abc"), frozenset("d")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()
    assert {"step", "submit", "spawn"} <= public_names()
    assert len(core()) > 50
    assert any(len(with_bases(name)) > 1 for name in classes())
    assert "envactors.errors" in whole_package()["envactors.vector.facade"].imports(whole_package())


def test_imports_run_in_no_circles():
    # The package itself is lazy: its names are imported when they are first used.
    graph = {name: module.imports(whole_package()) - {"envactors", name} for name, module in whole_package().items()}
    assert circles(graph) == set()


def test_the_callers_half_knows_nothing_of_the_workers():
    found = {
        (name, imported)
        for name, module in core().items()
        for imported in module.imports(whole_package())
        if name.startswith(("envactors.actor", "envactors.envs", "envactors.vector"))
        and imported.startswith("envactors.worker")
    }
    assert {pair for pair in found if pair[1] != WORKER_API} == set()


def test_the_core_imports_nothing_of_what_stands_beside_it():
    beside = tuple(f"envactors.{name}" for name in BESIDE)
    imports = {(name, other) for name, module in core().items() for other in module.imports(whole_package())}
    # The names of the package are imported when they are used.
    found = {pair for pair in imports if pair[1].startswith(beside) and pair[0] != "envactors"}
    assert found == set()


def test_no_file_is_too_long():
    lengths = {name: module.text.count("\n") for name, module in bounded().items()}
    assert {name: length for name, length in lengths.items() if length > MOST_FILE_LINES} == {}


def test_no_class_is_too_large():
    public = public_names()
    too_large = {}
    for name in classes(bounded):
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
        for module in bounded().values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


# Strict: once the core is small enough, this mark has to go, and from then on the bound holds.
@pytest.mark.xfail(strict=True, reason="the core is still too large")
def test_the_core_is_small():
    total = sum(len(module.code) for module in core().values())
    assert total <= LIMIT, f"{total} lines of code"
