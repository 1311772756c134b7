"""The package stays within its size, and its imports run in one direction."""

from __future__ import annotations

import ast
import contextlib
import functools
import logging.config
import sys
from pathlib import Path

import envactors as ea

PACKAGE = Path(ea.__file__).parent
CONTRACTS = Path(__file__).parents[2] / "pyproject.toml"

# Lines of code, without docstrings, comments, and blank lines.
MOST_PACKAGE_LINES = 25_022
MOST_HEART_LINES = 6_071
HEART = ("actor", "vector", "loop.py", "runtime.py", "replay.py")


def parse(text: str) -> ast.Module:
    """Parses a module; before Python 3.11.8 that fails once in a while, as another thread prints a traceback."""
    with contextlib.suppress(SystemError):  # github.com/python/cpython/issues/106905
        return ast.parse(text)
    return ast.parse(text)


def count_code(text: str) -> int:
    """Returns how many lines of a module hold code."""
    docstrings, strings = set(), set()
    for node in ast.walk(parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            strings.update(range(node.lineno, node.end_lineno + 1))  # its lines may be blank, or look like comments
    # Tokens would tell the same, in twice the time.
    lines = {number for number, line in enumerate(text.split("\n"), 1) if line.strip() and line.lstrip()[0] != "#"}
    return len((lines | strings) - docstrings)


# A function, since every process that runs tests imports this file, and reading the package takes seconds.
@functools.cache
def code_by_room() -> dict[str, int]:
    """Returns the lines of code of each module and subpackage of the package."""
    rooms: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        rooms[room] = rooms.get(room, 0) + count_code(path.read_text())
    return rooms


def test_docstrings_comments_and_blank_lines_are_no_code():
    text = '"""Doc."""\n\n# A comment.\nclass A:\n    """Doc\n    string."""\n\n    x = (\n        1,\n    )\n'
    assert count_code(text) == 4


def test_the_heart_stays_within_its_size():
    assert sum(code_by_room()[room] for room in HEART) <= MOST_HEART_LINES, code_by_room()


def test_the_package_stays_within_its_size():
    assert sum(code_by_room().values()) <= MOST_PACKAGE_LINES, code_by_room()


def test_imports_keep_the_contracts(monkeypatch):
    """The contracts are those of pyproject.toml, as `lint-imports` checks them."""
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the current directory
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)  # which would disable our loggers
    assert lint_imports(str(CONTRACTS), no_cache=True) == EXIT_STATUS_SUCCESS


def test_no_package_imports_a_module_that_imports_the_package():
    """The one circle that the contracts cannot see; the top package is lazy, and its modules may import it."""
    import grimp

    graph = grimp.build_graph("envactors", cache_dir=None)
    circles = {
        (package, module)
        for module in graph.modules
        for package in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{package}.") and graph.chain_exists(importer=package, imported=module)
    }
    assert {pair for pair in circles if pair[0] != "envactors"} == set()
