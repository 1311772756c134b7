"""Type checkers accept right uses of the library, and report an error on each wrong line and on no other."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = ["accepted.py", "rejected.py"]
# Beside the interpreter, as pip installs it, or anywhere else.
PYRIGHT = shutil.which("pyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def expected():
    """Returns the code of each line that has a mark."""
    return {
        (name, number): mark[1]
        for name in FILES
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
        if (mark := re.search(r"# E: ([\w-]+)$", line))
    }


def run(*command, cwd=ROOT, **options):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options).stdout


def test_there_are_enough_lines_of_both_kinds():
    assert (HERE / "accepted.py").read_text().count("    assert_type(") >= 25
    assert len(expected()) >= 15


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_reports_the_marked_errors_and_no_others():
    options = ["--strict", "--python-version=3.10", "--no-pretty", "--hide-error-context"]
    said = run(sys.executable, "-m", "mypy", *options, *(str(HERE / name) for name in FILES))
    found = {}
    for name, number, code in re.findall(r"^.*?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", said, flags=re.MULTILINE):
        found.setdefault((name, int(number)), set()).add(code)
    assert found.keys() == expected().keys(), said
    assert [line for line, code in expected().items() if code not in found[line]] == [], said


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_pyright_reports_errors_on_the_marked_lines_and_on_no_others():
    options = ["--outputjson", "--pythonversion=3.10", f"--pythonpath={sys.executable}"]
    said = json.loads(run(PYRIGHT, *options, *(str(HERE / name) for name in FILES)))
    reports = said["generalDiagnostics"]
    found = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"] for one in reports}
    assert found.keys() == expected().keys(), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_every_public_name_has_a_type(tmp_path):
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    options = ["--outputjson", f"--pythonpath={sys.executable}", "--ignoreexternal"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    report = json.loads(run(PYRIGHT, *options, "--verifytypes=envactors", cwd=tmp_path, env=environment))
    symbols = report["typeCompleteness"]["symbols"]
    assert len(symbols) > 1000
    incomplete = {
        one["name"]: [diagnostic["message"] for diagnostic in one["diagnostics"]]
        for one in symbols
        if one["isExported"] and not (one["isTypeKnown"] and not one["isTypeAmbiguous"])
    }
    # Without messages are names that another module defines. Bases are unknown where their library is not installed or
    # has no types: ALF's names are then defined by envactors, and the class that OpenEnv's function returns has such a
    # base.
    unknown = {"Type of base class unknown", "Type of metaclass unknown"}
    exempt = ("envactors.integrations.alf.values.", "envactors.integrations.openenv.")
    ours = {
        name: messages
        for name, messages in incomplete.items()
        if messages and not unknown.intersection(messages) and not name.startswith(exempt)
    }
    assert ours == {}
