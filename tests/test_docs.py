"""Every Python block of the README and of docs/ is run, each file's blocks one after the other in one script."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What protobuf has to say of mlagents_envs' messages, for the page of whose users it is installed.
PROTOBUF = "ignore:Call to deprecated create function:DeprecationWarning"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path):
    for package in re.findall(r"^(?:from|import) (\w+)", blocks(page)[0], flags=re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script = tmp_path / "blocks.py"
    script.write_text("\n\n".join(blocks(page)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", PROTOBUF, str(script)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_readmes_commands_are_the_ones_promised():
    readme = (ROOT / "README.md").read_text()
    assert "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]' && .venv/bin/envactors demo" in readme
    assert "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest\n" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_are_there(page):
    for path, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), f"{path}::{name}"


def test_the_tables_of_figures_are_those_of_the_measured_files():
    spec = importlib.util.spec_from_file_location("measure", ROOT / "docs/figures/measure.py")
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    pages = [(ROOT / "docs" / name).read_text() for name in measure.PAGES]
    tables = [table for _, tables in measure.QUESTIONS.values() for table in tables]
    found = re.findall(r"^<!-- figures: (\w+) -->$", "".join(pages), flags=re.MULTILINE)
    assert sorted(found) == sorted(tables)
    assert [measure.with_tables(page) for page in pages] == pages


def test_every_promise_has_its_number_and_tests_that_there_are():
    page = (ROOT / "docs/reliability.md").read_text()
    promises = re.split(r"^(\d+)\. ", page.partition("\n## Where a promise")[0], flags=re.MULTILINE)
    assert [int(number) for number in promises[1::2]] == [*range(1, 32), 33]
    for number, text in zip(promises[1::2], promises[2::2], strict=True):
        assert re.search(r"`tests/\w+\.py::", text), f"promise {number} names no test"
