"""Releases: one version everywhere, the files that belong to the package, and the sessions of nox."""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envactors as ea

ROOT = Path(__file__).parents[2]


def citation():
    """Returns the plain fields of CITATION.cff."""
    return dict(re.findall(r'^([\w-]+): "?([^"\n>]+)"?$', (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE))


def changelog():
    """Returns the headings of the versions in the changelog."""
    return re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def released():
    """Returns the dates of the versions in the changelog."""
    return dict(heading.split(" - ") for heading in changelog() if heading != "Unreleased")


def test_the_changelog_has_the_version_and_its_date_first():
    newest = next(heading for heading in changelog() if heading != "Unreleased")
    assert newest.split(" - ")[0] == ea.__version__
    assert all(dt.date.fromisoformat(date) for date in released().values())


def test_changelog_has_only_known_kinds_of_changes():
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Performance", "Fixed"}
    text = (ROOT / "CHANGELOG.md").read_text()
    assert {*re.findall(r"^### (.*)$", text, flags=re.MULTILINE)} <= kinds


def test_the_citation_has_the_version_and_its_date():
    assert citation()["version"] == ea.__version__
    assert citation()["date-released"] == released()[ea.__version__]
    assert citation()["license"] == "MIT"


def test_the_installed_version_is_that_of_the_module():
    version = importlib.metadata.version("envactors")
    if version != ea.__version__ and (ROOT / "envactors").is_dir():
        pytest.skip(f"installed for development as {version}: install it again")
    assert version == ea.__version__


def test_the_package_is_marked_as_typed():
    assert (Path(ea.__file__).parent / "py.typed").is_file()


def test_every_python_of_the_classifiers_has_its_sessions():
    pytest.importorskip("nox")
    done = subprocess.run([sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
    of_classifiers = {
        line.rpartition(" ")[2]
        for line in importlib.metadata.metadata("envactors").get_all("Classifier")
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
    }
    assert len(of_classifiers) >= 5
    for name in ("tests", "smoke"):
        assert {*re.findall(rf"^[*-] {name}-(\S+)", done.stdout, flags=re.MULTILINE)} == of_classifiers
    for name in ("oldest(core)", "newest(core)", "package", "free_threaded-3.14t"):
        assert re.search(rf"^[*-] {re.escape(name)} ", done.stdout, flags=re.MULTILINE)


@pytest.fixture
def noxfile(tmp_path, monkeypatch):
    """The noxfile, imported where pyenv has these Pythons; it puts them on PATH."""
    registry = pytest.importorskip("nox.registry")
    monkeypatch.setattr(registry, "_REGISTRY", type(registry._REGISTRY)())  # or a second import would be refused
    for version in ("2.7.18", "3.9.18", "3.13.0", "3.13.0t", "3.14.1t"):
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "noxfile", raising=False)
    return importlib.import_module("noxfile")


def test_lower_bounds_become_versions(noxfile):
    wanted = ["numpy>=1.24", "protobuf<3.21", "envactors[cli]", "setuptools>=60; python_version>='99'"]
    assert noxfile.lowest(wanted) == ["numpy==1.24", "protobuf<3.21"]


def test_the_files_of_the_smoke_exist(noxfile):
    named = {*noxfile.SMOKE, *(path for subject in noxfile.SUBJECTS.values() for path in subject.files)}
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_pyenvs_newest_python_comes_first_and_free_threaded_ones_last(noxfile, tmp_path):
    versions = ("3.13.0", "3.9.18", "3.14.1t", "3.13.0t")
    assert os.environ["PATH"].split(os.pathsep) == [*(str(tmp_path / f"versions/{v}/bin") for v in versions), "/bin"]


def test_the_measure_of_threads_runs():
    pytest.importorskip("gymnasium")
    script = ROOT / "docs/figures/threads.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), "0.02"], capture_output=True, text=True, check=True
    )
    assert re.search(r"GIL (on|off), \d+ envs of 1 ms: .* ratio \d+\.\d\d$", done.stdout.strip())
