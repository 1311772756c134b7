"""Every Python, the oldest and newest versions of what the library works with, and its packages: ``nox -s SESSION``.

Pythons that are not found are skipped. Arguments after ``--`` go to pytest, and files among them replace the session's.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["smoke"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False  # in CI, too

PROJECT: dict[str, Any] = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
FREE_THREADED = ["3.13t", "3.14t"]
# By its version, which is the build without CUDA where an index has both.
TORCH = "torch==2.13.0"

# About a minute: actors, the facade, faults, shared memory and a drop-in.
SMOKE = [
    "tests/unit/test_errors.py",
    "tests/unit/test_wire.py",
    *(f"tests/process/test_{name}.py" for name in ("actors", "faults", "shared_memory_steps", "vector")),
    "tests/integrations/test_gymnasium_dropin.py",
]
# What the smoke needs of the extra `test`: notebooks are left out.
SMOKE_TOOLS = ("psutil", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


class Subject(NamedTuple):
    """What is tested with its oldest and its newest versions, where, with which files, and beside what."""

    oldest_python: str
    newest_python: str
    extras: tuple[str, ...]
    files: tuple[str, ...]
    torch: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    # What the library asks for in newer versions than pyproject.toml does.
    newer: tuple[str, ...] = ()


SUBJECTS = {
    "core": Subject("3.10", "3.13", ("gymnasium", "demo"), ("tests",)),
    "sb3": Subject("3.11", "3.11", ("gymnasium", "sb3"), ("tests/integrations/test_sb3.py",), torch=(TORCH,)),
    "tianshou": Subject("3.11", "3.11", ("tianshou",), ("tests/integrations/test_tianshou.py",), torch=(TORCH,)),
    # What its own envs and tests import is no extra, since users choose their games.
    "pettingzoo": Subject(
        "3.10", "3.13", ("pettingzoo",), ("tests/integrations/test_pettingzoo.py",), beside=("pygame-ce", "pymunk<7.4")
    ),
    "torchrl": Subject(
        "3.11", "3.11", ("gymnasium", "torchrl"), ("tests/integrations/test_torchrl.py",), torch=(TORCH,)
    ),
    "jax": Subject("3.11", "3.12", ("gymnasium", "jax"), ("tests/integrations/test_jax.py",), newer=("numpy",)),
    "mlagents": Subject("3.10", "3.11", ("mlagents",), ("tests/integrations/test_mlagents.py",)),
    "openenv": Subject("3.11", "3.12", ("openenv",), ("tests/integrations/test_openenv.py",)),
    # The newest PyTorch that LeRobot accepts.
    "lerobot": Subject(
        "3.12",
        "3.12",
        ("lerobot",),
        ("tests/integrations/test_lerobot.py",),
        torch=("torch==2.11.0", "torchvision==0.26.0"),
        newer=("numpy",),
    ),
    # Ray pins its own version of Gymnasium, so the extra's oldest one cannot be installed beside it. Nor can NumPy 1,
    # which its PyArrow refuses.
    "rllib": Subject(
        "3.11",
        "3.12",
        ("cli",),
        ("tests/integrations/test_rllib.py", "tests/integrations/test_rllib_multi_agent.py"),
        torch=(TORCH,),
        beside=("ray[rllib]",),
        newer=("numpy",),
    ),
    "recipes": Subject(
        "3.11",
        "3.12",
        ("cli", "gymnasium"),
        ("tests/integrations/test_recipes.py", "tests/integrations/test_recipes_training.py"),
        torch=(TORCH,),
        beside=("skrl",),
    ),
    "dask": Subject("3.10", "3.13", ("dask",), ("tests/remote/test_dask.py",)),
}


def add_pyenv_to_path() -> None:
    """Put the Pythons of pyenv before its shims, which fail for every version that is not the chosen one."""

    def rank(path: Path) -> tuple[bool, list[int]]:
        # A free-threaded build has both python3.14t and python3.14, which must not hide the ordinary one.
        return not path.name.endswith("t"), [int(number) for number in re.findall(r"\d+", path.name)]

    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted((root / "versions").glob("3.*"), key=rank, reverse=True)
    os.environ["PATH"] = os.pathsep.join([*(str(path / "bin") for path in found), os.environ["PATH"]])


add_pyenv_to_path()


def tools(extra: str, names: Iterable[str]) -> list[str]:
    """Return the requirements of these names in an extra."""
    return [text for text in EXTRAS[extra] if Requirement(text).name in names]


def lowest(requirements: Iterable[str], newer: Iterable[str] = ()) -> list[str]:
    """Return each requirement at its lower bound, as in ``numpy==1.24``; those without one stay as they are.

    Args:
        requirements: The requirements.
        newer: Names to leave out.
    """
    left_out = {PROJECT["name"], *newer}
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.name in left_out or (requirement.marker and not requirement.marker.evaluate()):
            continue
        bounds = [part.version for part in requirement.specifier if part.operator == ">="]
        found.append(f"{requirement.name}=={bounds[0]}" if bounds else str(requirement))
    return found


def run_tests(session: nox.Session, files: Iterable[str]) -> None:
    """Run these files, or those among the arguments."""
    options = list(session.posargs)
    if not any(Path(option.partition("::")[0]).exists() for option in options):
        options += files
    session.run("pytest", *options)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The whole suite."""
    session.install("-e", ".[test]")
    run_tests(session, ["tests"])


@nox.session(python=PYTHONS)
def smoke(session: nox.Session) -> None:
    """About a minute of tests."""
    session.install("-e", ".[demo]", *tools("test", SMOKE_TOOLS))
    run_tests(session, SMOKE)


@nox.session
@nox.parametrize("python,subject", [nox.param(one.oldest_python, name, id=name) for name, one in SUBJECTS.items()])
def oldest(session: nox.Session, subject: str) -> None:
    """Everything at the lowest version that pyproject.toml allows."""
    one = SUBJECTS[subject]
    wanted = [*PROJECT["dependencies"], *(text for extra in one.extras for text in EXTRAS[extra])]
    session.install(
        *one.torch,
        "-e",
        f".[{','.join(one.extras)}]",
        *lowest(wanted, one.newer),
        *one.beside,
        *test_tools(one),
    )
    session.run("python", "-m", "pip", "list")
    run_tests(session, one.files)


@nox.session
@nox.parametrize("python,subject", [nox.param(one.newest_python, name, id=name) for name, one in SUBJECTS.items()])
def newest(session: nox.Session, subject: str) -> None:
    """Everything at the newest version that there is, also in an environment of an earlier run."""
    one = SUBJECTS[subject]
    upgrade = ("--upgrade", "--upgrade-strategy", "eager")
    session.install(*upgrade, *one.torch, "-e", f".[{','.join(one.extras)}]", *one.beside, *test_tools(one))
    session.run("python", "-m", "pip", "list")
    run_tests(session, one.files)


def test_tools(one: Subject) -> list[str]:
    """Return what the tests of a subject need besides what is tested."""
    every = [text for text in EXTRAS["test"] if Requirement(text).name != PROJECT["name"]]
    return every if one.files == ("tests",) else [*tools("test", SMOKE_TOOLS), *EXTRAS["cli"]]


@nox.session(python=FREE_THREADED)
def free_threaded(session: nox.Session) -> None:
    """How many times as many steps threads make in parallel without the GIL as one thread does."""
    session.install("-e", ".[gymnasium]")
    session.run("python", "docs/figures/threads.py", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build sdist and wheel, check both, and test the installed wheel with the sdist's tests; ``-- --all`` runs all.

    Leaves both in dist/.
    """
    session.install("build", "twine", "check-wheel-contents")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")  # the wheel is built from the sdist
    (sdist,) = Path("dist").glob("*.tar.gz")
    (wheel,) = Path("dist").glob("*.whl")
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    session.run("check-wheel-contents", str(wheel))
    check_contents(session, sdist, wheel)

    folder = Path(session.create_tmp()) / "package"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)  # noqa: S202 # it has just been built here
    (source,) = folder.iterdir()
    shutil.rmtree(source / "envactors")  # what is imported is what the wheel installed

    session.run("python", "-m", "venv", str(folder / "venv"))
    python = str((folder / "venv/bin/python").absolute())
    every = "--all" in session.posargs
    options = [option for option in session.posargs if option != "--all"]
    extra = "test" if every else "demo"
    files = ["tests"] if every else [*SMOKE, "tests/docs/test_package.py"]
    wheel = wheel.absolute()
    with session.chdir(source):
        run = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(python, *run, str(wheel), external=True)
        session.run(python, "-W", "error", "-c", ALONE, external=True)
        session.run(python, *run, f"{wheel}[{extra}]", *tools("test", SMOKE_TOOLS), external=True)
        session.run(python, "-m", "pytest", *options, *files, external=True)


# With the dependencies alone: from site-packages, and an actor answers.
ALONE = """
import sysconfig, pathlib
import envactors as ea
assert pathlib.Path(ea.__file__).is_relative_to(sysconfig.get_path("purelib")), ea.__file__
with ea.spawn(dict, name="one") as actor:
    actor.update({"answer": 42}).result()
    assert actor.pop("answer").result() == 42
"""


def check_contents(session: nox.Session, sdist: Path, wheel: Path) -> None:
    """Fail unless both hold what they should, and nothing else."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.partition("/")[0] for name in inside if name.endswith(".dist-info/METADATA"))
    for name in ("envactors/py.typed", f"{info}/licenses/LICENSE"):
        if name not in inside:
            session.error(f"{wheel.name} lacks {name}")
    if others := {name for name in inside if not name.startswith(("envactors/", f"{info}/"))}:
        session.error(f"{wheel.name} holds {sorted(others)}")

    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    known = (
        set(str(session.run("git", "ls-files", silent=True, external=True)).split()) if Path(".git").exists() else held
    )
    needed = {"LICENSE", "CHANGELOG.md", "CITATION.cff", "noxfile.py", "docs/conf.py", "tests/conftest.py"}
    if missing := needed - held:
        session.error(f"{sdist.name} lacks {sorted(missing)}")
    if others := held - known - {"PKG-INFO"}:
        session.error(f"{sdist.name} holds {sorted(others)}, which are not in the repository")
