"""When memory runs out, or a worker truncates shared memory, the caller survives."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
from helpers import FORK_SERVER, SOON, START_METHODS, wait_until

import envactors as ea
from envactors.system.choice import PORTABLE
from envactors.testing import EchoEnv

pytestmark = pytest.mark.skipif(PORTABLE, reason="the portable system cannot do this")
MIB = 1 << 20


def own_oom_score_adj():
    return int(Path("/proc/self/oom_score_adj").read_text())


class Victim:
    """Returns its `oom_score_adj`."""

    def get_oom_score_adj(self):
        return own_oom_score_adj()


@pytest.mark.fresh_processes
@pytest.mark.parametrize("start_method", START_METHODS)
def test_the_kernel_prefers_workers_to_the_caller_and_its_helpers(start_method):
    backend = ea.ProcessBackend(start_method=start_method)
    with ea.spawn(Victim, backend=backend) as actor:
        expected = min(own_oom_score_adj() + 500, 1000)
        assert actor.get_oom_score_adj().result(SOON) == expected
        scores = {}
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                scores[int(child)] = int(Path(f"/proc/{child}/oom_score_adj").read_text())
        scores.pop(actor.pid, None)
        assert scores, "there is the helper at least"
        assert set(scores.values()) == {own_oom_score_adj()}


class Cutter(EchoEnv):
    """Tries to truncate all shared memory."""

    def cut(self):
        cut, refused = 0, 0
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if "envactors-slab" in os.readlink(f"/proc/self/fd/{name}"):  # noqa: PTH115
                    for size in (0, 1):
                        try:
                            os.ftruncate(int(name), size)
                            cut += 1
                        except PermissionError:
                            refused += 1
        return cut, refused


def test_a_worker_cannot_cut_off_memory_that_the_caller_uses():
    with ea.VectorEnv([Cutter] * 2, backend=FORK_SERVER) as envs:
        envs.reset(seed=0)
        ((cut, refused),) = envs.call("cut", env_ids=[0])
        assert cut == 0
        assert refused >= 2
        assert envs.step([3, 4])[1].tolist() == [3.0, 4.0]


@contextlib.contextmanager
def memory_cgroup(limit):
    """A memory cgroup within the caller's own, as the file that takes the ids of its processes."""
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        pytest.skip("there are no cgroups of version 2")
    own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().strip("/")
    directory = Path("/sys/fs/cgroup") / own / f"envactors-test-{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            (directory / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (directory / "memory.swap.max").write_text("0")
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        yield directory / "cgroup.procs"
        wait_until(lambda: not (directory / "cgroup.procs").read_text())
    finally:
        directory.rmdir()


def run_within(procs, code):
    """Runs a script in a cgroup."""
    head = f"import os\nopen({str(procs)!r}, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_more_memory_than_the_container_has_is_rejected_before_it_is_touched():
    code = """
    import numpy as np
    import envactors as ea
    from envactors.testing import EchoEnv
    from envactors.testing import Space

    class Large(EchoEnv):
        observation_space = Space((100 << 20,), np.uint8)

    try:
        ea.VectorEnv([Large] * 2, backend=ea.ProcessBackend(start_method="loky"))
    except ea.VectorEnvError as error:
        print(error)
    """
    with memory_cgroup(200 * MIB) as procs:
        ended = run_within(procs, code)
    assert ended.returncode == 0, ended.stderr
    size = 2 * 2 * 100 * MIB
    wanted = int(re.search(r"\d+", ended.stdout)[0])
    assert size < wanted < size + MIB
    assert f"{200 * MIB} bytes, of which " in ended.stdout


def test_when_memory_runs_out_a_worker_is_ended_and_not_a_larger_caller():
    code = """
    import sys
    import envactors as ea

    class Grows:
        def __init__(self):
            self.kept = []

        def grow(self):
            self.kept.append(b"x" * (2 << 20))

    ballast = b"x" * (110 << 20)
    ended = []
    actors = [ea.spawn(Grows, name=f"grows-{i}") for i in range(3)]
    while not ended:
        for future in [actor.grow() for actor in actors]:
            try:
                future.result(20)
            except ea.ActorDiedError as error:
                ended.append(error.signal)
    for actor in actors:
        actor.close()
    print("alive", len(ballast), set(ended))
    """
    with memory_cgroup(260 * MIB) as procs:
        ended = run_within(procs, code)
    assert ended.stdout == f"alive {110 * MIB} {{9}}\n", (ended.returncode, ended.stderr[-2000:])
