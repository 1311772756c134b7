"""Every Python block of the README and of docs/ is run, each file's blocks one after the other in one script."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program_server import OF_SCRIPTS, ProgramServer

import envactors as ea
from envactors.testing import EchoEnv, FaultyEnv

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ea.__file__).parent  # installed from a wheel it is not below the root
# Warnings of protobuf about mlagents_envs' messages and of TorchRL about its own classes, on the pages about them.
PROTOBUF = "ignore:Call to deprecated create function:DeprecationWarning"
TORCHRL = "ignore:Creating :DeprecationWarning"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
# Runs the script of each directory as a main module, and stores its output there.
TOGETHER = """
import gc, logging, os, sys, traceback, types

def run(directory):
    os.chdir(directory)
    sys.path.insert(0, directory)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, fd)
        os.close(opened)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.path.join(directory, "blocks.py")
    try:
        with open(main.__file__) as file:
            exec(compile(file.read(), main.__file__, "exec"), vars(main))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.path.remove(directory)
    sys.modules.pop("my_envs", None)
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
        handler.close()

stdout, stderr = os.dup(1), os.dup(2)
for directory in sys.argv[1:]:
    run(directory)
    gc.collect()
for fd, kept in ((1, stdout), (2, stderr)):
    os.dup2(kept, fd)
    os.close(kept)
"""
# Runs each section of a page as a separate doctest; prints the failures.
DOCTESTS = """
import doctest, json, pathlib, sys

runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
for title, text in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    runner.run(doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, title, sys.argv[1], 0))
sys.exit(runner.failures > 0)
"""


@pytest.fixture(scope="module")
def interpreter(helper_processes):
    server = ProgramServer("-W", "error", "-W", PROTOBUF, "-W", TORCHRL, modules=OF_SCRIPTS)
    yield server
    server.close()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


WITH_BLOCKS = [page for page in PAGES if blocks(page)]


def what_is_not_installed(page: Path) -> str | None:
    packages = re.findall(r"^(?:from|import) (\w+)", blocks(page)[0], flags=re.MULTILINE)
    packages = [package for package in packages if package != "my_envs"]
    return next((package for package in packages if importlib.util.find_spec(package) is None), None)


def write_script(page: Path, directory: Path) -> Path:
    script = directory / "blocks.py"
    parts = blocks(page)
    envs = ROOT / "tests/docs/my_envs" / page.with_suffix(".py").name
    if envs.exists():
        shutil.copy(envs, directory / "my_envs.py")
    script.write_text("\n\n".join(parts))
    return script


def outputs(page: Path) -> list[str]:
    """Returns the texts that follow a block as its output, except those that leave out lines."""
    line = r"(?!```).*\n"
    texts = re.findall(rf"^```python\n(?:{line})*```\n\n```text\n((?:{line})*)", page.read_text(), flags=re.MULTILINE)
    return [text for text in texts if "  ...\n" not in text]


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.]*", "N", text)


@pytest.fixture(scope="module")
def said(request, interpreter, tmp_path_factory):
    """The output of each selected page, (stdout, stderr); one process runs all of them."""
    asked = {
        item.callspec.params["page"] for item in request.session.items if item.originalname == "test_code_blocks_run"
    }
    directories = {page: tmp_path_factory.mktemp("page") for page in asked if what_is_not_installed(page) is None}
    for page, directory in directories.items():
        write_script(page, directory)
    script = tmp_path_factory.mktemp("pages") / "together.py"
    script.write_text(TOGETHER)
    done = interpreter.run(script, [str(directory) for directory in directories.values()], script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return {
        page: tuple((directory / name).read_text() for name in ("stdout", "stderr"))
        for page, directory in directories.items()
    }


@pytest.mark.timeout(300)  # the first of them runs all
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_code_blocks_run(page, said):
    if (package := what_is_not_installed(page)) is not None:
        pytest.skip(f"{package} is not installed")
    printed, errors = said[page]
    assert errors == ""
    assert [text for text in outputs(page) if without_numbers(text) not in without_numbers(printed)] == []


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_code_blocks_run_alone(page, interpreter, tmp_path):
    if (package := what_is_not_installed(page)) is not None:
        pytest.skip(f"{package} is not installed")
    script = write_script(page, tmp_path)
    done = interpreter.run(script, [], tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0


def test_commands_lead_from_the_log_to_a_debugger(interpreter, tmp_path):
    page = ROOT / "docs/guides/debugging.md"
    script = write_script(page, tmp_path)
    assert interpreter.run(script, [], tmp_path).returncode == 0
    text = blocks(page)[0].partition("with ea.")[0].replace("3 - self.position", "4 - self.position")
    (tmp_path / "my_envs.py").write_text(f"{text}\n\nFixed = Maze\n")
    commands = re.findall(r"^envactors (replay .*)$", page.read_text(), flags=re.MULTILINE)
    outputs = []
    for command in commands:
        line = f"{sys.executable} -m envactors.cli {command}"
        done = subprocess.run(
            line, shell=True, input="p self.position\ncontinue\n", capture_output=True, text=True, cwd=tmp_path
        )
        outputs.append(done.stdout)
    assert "ends in the same way: ZeroDivisionError('float division by zero') in step 3, 3 of 3" in outputs[0]
    assert "(Pdb) 2\n" in outputs[1]
    assert "instead: no failure in step 3" in outputs[2]


def examples(page: Path) -> list[tuple[str, str]]:
    """Returns the title of each section and its doctest."""
    sections = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)[1:]
    found = []
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        found.append((title, "\n".join(re.findall(r"^```pycon\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))))
    return [(title, text) for title, text in found if text]


@pytest.mark.parametrize("page", [page for page in REFERENCE if examples(page)], ids=lambda page: page.name)
def test_examples_of_the_reference_are_true(page, interpreter, tmp_path):
    sections = []
    for title, text in examples(page):
        packages = re.findall(r"^>>> (?:from|import) (\w+)", text, flags=re.MULTILINE)
        if all(importlib.util.find_spec(package) for package in packages):
            sections.append((title, text))
    (tmp_path / "page.json").write_text(json.dumps(sections))
    script = tmp_path / "doctests.py"
    script.write_text(DOCTESTS)
    done = interpreter.run(script, ["page.json"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""


def test_only_the_reference_has_doctests():
    assert [page.name for page in PAGES if "```pycon" in page.read_text() and page not in REFERENCE] == []


def test_every_public_name_is_in_the_reference_with_an_example():
    text = "".join(page.read_text() for page in REFERENCE)
    documented = set(re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)$", text, flags=re.MULTILINE))
    run = "\n".join(example for page in REFERENCE for _, example in examples(page))
    homes = ["envactors", "envactors.testing", "envactors.remote", "envactors.state"]
    public = [(home, name) for home in homes for name in importlib.import_module(home).__all__]
    public = [(home, name) for home, name in public if name not in ("Future", "as_completed", "wait")]
    drop_ins = ("alf", "ding", "gymnasium", "jax", "lerobot", "mlagents", "pettingzoo", "rllib", "sb3")
    for module in (*drop_ins, "tianshou", "torchrl"):
        source = ast.parse((PACKAGE / f"integrations/{module}/__init__.py").read_text())
        listed = [
            node.value for node in source.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        ]
        public += [(f"envactors.integrations.{module}", name) for name in ast.literal_eval(listed[0])]
    # The two types of ALF are its own where it is installed, and those of its page elsewhere.
    public = [(home, name) for home, name in public if name not in ("StepType", "TimeStep")]
    assert [f"{home}.{name}" for home, name in public if f"{home}.{name}" not in documented] == []
    # An example names it, or makes what it is the type of.
    assert [name for _, name in public if not re.search(rf"\b{name}\b", run)] == []


def test_the_readmes_commands_are_the_ones_promised():
    readme = (ROOT / "README.md").read_text()
    assert "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]' && .venv/bin/envactors demo" in readme
    assert "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest\n" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert "gallery/" not in target, "link to ../examples/, which is in every checkout"
            assert (page.parent / target).exists(), target


def test_the_tables_of_figures_are_those_of_the_measured_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/figures")
    measure = importlib.import_module("measure")
    pages = [(ROOT / "docs" / name).read_text() for name in measure.PAGES]
    tables = [table for _, tables in measure.QUESTIONS.values() for table in tables]
    found = re.findall(r"^<!-- figures: (.+) -->$", "".join(pages), flags=re.MULTILINE)
    assert sorted(found) == sorted(tables)
    assert [measure.with_tables(page) for page in pages] == pages


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs/migrate").glob("*.md"))], ids=lambda p: p.name
)
def test_figures_of_drop_ins_stand_only_in_tables_that_are_measured(page):
    written = re.sub(r"<!-- figures: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"\d[\d,.]* (?:of \d+ )?(?:tests? )?(?:pass|fail)\b|\d[\d,.]* steps per second", written) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_for_users_name_no_tests(page):
    if "development" not in page.parts:
        assert re.findall(r"test_\w+\.py::\w+|`test_\w+`", page.read_text()) == []


def read_promises():
    return json.loads((ROOT / "tests/docs/promises.json").read_text())


def test_every_promise_of_the_page_has_tests():
    page = (ROOT / "docs/guides/reliability.md").read_text()
    promised = re.findall(r"^- \*\*`([\w-]+)`\*\*: ", page, flags=re.MULTILINE)
    assert sorted(promised) == sorted(read_promises())
    assert all(read_promises().values())


def test_promises_are_cited_by_name():
    files = [*(ROOT / "tests").rglob("*.py"), *PAGES]
    lists = r"promises? (\d+|`[\w-]+`(?:,? (?:and )?`[\w-]+`)*)"
    cited = {
        name
        for path in files
        for names in re.findall(lists, re.sub(r"\s+", " ", path.read_text()), flags=re.IGNORECASE)
        for name in re.findall(r"[\w-]+", names.replace(" and ", " "))
    }
    assert len(cited) > 10
    assert cited - {*read_promises()} == set()


def test_the_tests_of_the_promises_exist():
    missing = []
    for test in (test for tests in read_promises().values() for test in tests):
        path, _, name = test.partition("::")
        if not re.search(rf"^ *def {name or 'test_'}", (ROOT / path).read_text(), flags=re.MULTILINE):
            missing.append(test)
    assert missing == []


def test_readme_shows_the_log_of_a_crash(caplog):
    factories = [lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(3)]
    options = {"on_failure": "renew", "restart": ea.RestartPolicy(max_restarts=100)}
    with caplog.at_level("INFO", logger="envactors"), ea.VectorEnv(factories, **options) as envs:
        envs.reset(seed=0)
        envs[2].arm("segfault").result()
        envs.step([0] * 3)
        envs.step([0] * 3)
    first_lines = [(record, record.getMessage().partition("\n")[0]) for record in caplog.records]
    logged = {without_numbers(f"{record.levelname} {record.name} {line}") for record, line in first_lines}
    shown = re.findall(r"^(?:WARNING|INFO) .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(shown) == 3
    assert {without_numbers(line) for line in shown} <= logged


def test_links_of_the_readme_show_their_paths():
    links = re.findall(r"(?<!!)\[([^]]+)\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert [text for text, target in links if "://" not in target and text != target] == []


def test_modules_that_the_architecture_names_exist():
    named = re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / "docs/development/architecture.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (PACKAGE / path).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_docs_are_short():
    # 1,300 of these words are about executors, a new part of the library.
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= 28_700
