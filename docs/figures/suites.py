"""Runs other libraries' own tests of vector envs with their class replaced by the drop-in.

``measure.py suites`` uses it. Below the directory that the environment variable CHECKOUTS names, each library has a
copy of its repository (``Gymnasium``, ``stable-baselines3``, ``tianshou``) at the version that is installed; DI-engine
installs its tests. What is not installed, or not there, keeps the figures that it has.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple


class Suite(NamedTuple):
    """The tests of one library.

    Attributes:
        package: The distribution whose version counts.
        tests: Files below the copy of its repository; where it installs its tests, below the installed package.
        swap: A pytest plugin that replaces the class.
    """

    package: str
    tests: tuple[str, ...]
    swap: str


SUITES = {
    "Gymnasium": Suite(
        "gymnasium",
        tuple(
            f"tests/vector/test_{name}.py"
            for name in ("async_vector_env", "autoreset_mode", "observation_mode", "vector_env", "vector_env_info")
        ),
        """
        import gymnasium.vector, gymnasium.vector.async_vector_env as module
        from envactors.integrations.gymnasium import ActorVectorEnv
        gymnasium.vector.AsyncVectorEnv = module.AsyncVectorEnv = ActorVectorEnv
        """,
    ),
    "stable-baselines3": Suite(
        "stable_baselines3",
        ("tests/test_vec_envs.py", "tests/test_dict_env.py", "tests/test_utils.py", "tests/test_her.py"),
        """
        import stable_baselines3.common.vec_env as package, stable_baselines3.common.vec_env.subproc_vec_env as module
        from envactors.integrations.sb3 import ActorVecEnv
        package.SubprocVecEnv = module.SubprocVecEnv = ActorVecEnv
        """,
    ),
    "tianshou": Suite(
        "tianshou",
        ("test/base/test_env.py",),
        """
        import tianshou.env as package, tianshou.env.venvs as module
        from envactors.integrations.tianshou import ActorVectorEnv
        package.SubprocVectorEnv = package.ShmemVectorEnv = ActorVectorEnv
        module.SubprocVectorEnv = module.ShmemVectorEnv = ActorVectorEnv
        """,
    ),
    "DI-engine": Suite(
        "DI-engine",
        ("ding/envs/env_manager/tests/test_subprocess_env_manager.py",),
        """
        import ding.envs.env_manager.subprocess_env_manager as module
        from envactors.integrations.ding import AsyncActorEnvManager, SyncActorEnvManager
        module.SyncSubprocessEnvManager = SyncActorEnvManager
        module.AsyncSubprocessEnvManager = AsyncActorEnvManager
        """,
    ),
}


def measure(known: dict[str, Any]) -> dict[str, Any]:
    """Run the suites of what is installed; what is known of the others stays."""
    checkouts = Path(os.environ["CHECKOUTS"]) if "CHECKOUTS" in os.environ else None
    return {name: run(name, suite, checkouts) or known.get(name, {}) for name, suite in SUITES.items()}


def run(name: str, suite: Suite, checkouts: Path | None) -> dict[str, Any] | None:
    """Run one library's tests; return None if it, or the copy of its repository, is not there."""
    try:
        distribution = importlib.metadata.distribution(suite.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    root = None if checkouts is None else checkouts / name
    if root is None or not (root / suite.tests[0]).exists():
        root = Path(str(distribution.locate_file("")))
    if not (root / suite.tests[0]).exists():
        return None
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "swapped.py").write_text(textwrap.dedent(suite.swap))
        report = Path(directory, "report.xml")
        # A package's own tests are run where they are, beside their conftest.
        first = root / suite.tests[0]
        where = root if first.parts[-2] != "tests" or len(suite.tests) > 1 else first.parent
        # Not `python -m pytest`, which would import the library from the copy of its repository.
        command = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "swapped", "-p", "no:cacheprovider"]
        command += ["--junitxml", str(report), *(str((root / test).relative_to(where)) for test in suite.tests)]
        path = os.pathsep.join([directory, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, cwd=where, env=os.environ | {"PYTHONPATH": path}, check=False)  # noqa: S603
        if not report.exists():  # a version that the drop-in does not know
            return None
        counts = {"passed": 0, "failed": 0, "skipped": 0}
        failures = []
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 # pytest wrote it just now
            kind = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            kind = {"failure": "failed", "error": "failed"}.get(kind, kind)
            counts[kind] += 1
            if kind == "failed":
                failures.append(str(case.get("name")))
    if not counts["passed"]:  # the tests are those of another version than the installed one
        return None
    files = [Path(test).name for test in suite.tests]
    return {"version": distribution.version, "files": files, **counts, "failures": failures}


def show(name: str, measured: dict[str, Any]) -> str:
    """Return what a page says of one library's tests."""
    found = measured.get(name)
    if not found:
        return ""
    files = ", ".join(f"`{file}`" for file in found["files"])
    total = found["passed"] + found["failed"]
    text = f"{found['passed']} of {total} tests of {name} {found['version']} pass with the class replaced"
    if found["skipped"]:
        text += f"; {found['skipped']} are skipped, as with the original class"
    text += f" ({files})."
    if found["failures"]:
        text += " These fail: " + ", ".join(f"`{failure}`" for failure in found["failures"]) + "."
    return "\n".join(textwrap.wrap(text, 118, break_on_hyphens=False, break_long_words=False)) + "\n"


if __name__ == "__main__":
    json.dump(measure({}), sys.stdout, indent=1)
