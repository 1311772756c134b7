"""The two files of a crash bundle, and how they are written and read.

``report.json`` is for people and other programs; `docs/guides/debugging.md` describes it. ``inputs.pkl`` is a pickled
dict of a format number and of bytes that only a worker unpickles.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
REPORT, INPUTS = "report.json", "inputs.pkl"


class SavedInputs(NamedTuple):
    """The content of ``inputs.pkl``.

    Attributes:
        name: The name of the actor.
        env: The index of the env in its vector.
        position: Its position among the envs of its actor.
        factory: Its factory, pickled.
        registrations, seed_episodes, snapshot: As of `envactors.mailbox.messages.Start`.
        journal: A `envactors.mailbox.messages.Replay`, pickled; None without one.
        has_checks: Whether the journal has a checksum over the observations.
        request: The kind and the pickled fields of the request that failed; None if none was running.
        observation: The last observation, pickled; None if there was none.
        env_vars: The environment variables that the actor was given.
        sys_path: The caller's ``sys.path``.
    """

    name: str
    env: int
    position: int
    factory: bytes
    registrations: tuple[list[bytes], list[bytes]]
    seed_episodes: bool
    snapshot: bytes | None
    journal: bytes | None
    has_checks: bool
    request: tuple[int, bytes] | None
    observation: bytes | None
    env_vars: dict[str, str]
    sys_path: list[str]


def write(path: str, report: dict[str, Any], inputs: SavedInputs) -> None:
    """Write a bundle, so that its directory has both files as soon as it exists, and only this user can enter it.

    Raises:
        OSError: The directory cannot be written.
    """
    directory, name = os.path.split(path)
    temporary = Path(directory, f".{name}.{os.getpid()}")
    try:
        temporary.mkdir(mode=0o700, parents=True)
        text = json.dumps({"format": FORMAT, **report}, indent=2, default=str)
        (temporary / REPORT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        (temporary / INPUTS).write_bytes(pickle.dumps({"format": FORMAT, **inputs._asdict()}))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read(path: str) -> tuple[dict[str, Any], SavedInputs]:
    """Read a bundle.

    Raises:
        OSError: There is none.
        ValueError: Its format is another one, or it is damaged.
    """
    try:
        report = json.loads(Path(path, REPORT).read_text(encoding="utf-8"))
        found = report["format"]
        if found == FORMAT:
            inputs = pickle.loads(Path(path, INPUTS).read_bytes())
            del inputs["format"]
            return report, SavedInputs(**inputs)
    except OSError:
        raise
    except Exception as error:  # of many types
        raise ValueError(f"the bundle {path} is damaged ({error!r}): expected what crash_dir= has left") from error
    raise ValueError(f"{path} has format {found}: expected {FORMAT}; use the version that has written it")
