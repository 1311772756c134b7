"""Checkpoint files follow the umask and symbolic links, and leave no temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from helpers import Echo

import envactors as ea

# Writes a checkpoint, and is killed before it is complete.
KILLED = """
import os, signal, sys
from envactors.state import checkpoint_file

checkpoint_file.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
checkpoint_file.write_file(sys.argv[1], b"payload")
"""


@pytest.fixture
def envs():
    with ea.VectorEnv([Echo], on_failure="replay") as envs:
        envs.reset(seed=1)
        yield envs


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_a_new_checkpoint_follows_the_umask_and_a_later_one_keeps_the_mode(envs, tmp_path):
    path = tmp_path / "envs"
    before = os.umask(0o027)
    try:
        envs.checkpoint(path)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o640
    path.chmod(0o604)
    envs.checkpoint(path)
    assert mode_of(path) == 0o604


def test_a_checkpoint_is_written_through_links(envs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "envs", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):  # to where there is nothing, and to a file
        envs.checkpoint(link)
        assert link.is_symlink()
        ea.VectorEnv.resume(link, [Echo]).close()
    assert names_in(tmp_path / "elsewhere") == ["envs"]


def test_the_next_checkpoint_removes_files_that_a_killed_process_left(envs, tmp_path):
    path = tmp_path / "envs"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = names_in(tmp_path)
    assert left != "envs"
    envs.checkpoint(path)
    assert names_in(tmp_path) == ["envs"]
