"""The helper process: which actors share one, what its workers get, and what happens if it lacks memory."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import SOON, is_gone, promised, wait_until

import envactors as ea

pytestmark = pytest.mark.fresh_processes

MANY = ea.RestartPolicy(max_restarts=50, backoff=0.0)


class Worker:
    """Describes its process."""

    def __init__(self):
        self._names = {*sys.modules}
        self._variables = dict(os.environ)

    def has(self, name):
        return name in self._names

    def variable(self, name):
        return self._variables.get(name)

    def setting(self):
        return sys.path, sys.argv, str(Path.cwd())

    def parent(self):
        return os.getppid()

    def faults_of_a_collection(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def backend(**options):
    return ea.ProcessBackend(start_method="forkserver", **options)


def spawn(**options):
    return ea.spawn(Worker, restart=MANY, **{"backend": backend(), **options})


def helper_of(actor):
    return psutil.Process(actor.parent().result(SOON))


# Sharing ------------------------------------------------------------------------------------------


def test_actors_of_equal_settings_share_a_helper_which_ends_with_the_last_of_them():
    with spawn() as first:
        helper = helper_of(first)
        with spawn(env_vars={"FLAVOUR": "sour"}) as second:
            assert helper_of(second) == helper
        assert helper.is_running()
        with spawn(backend=backend(preload=["colorsys"])) as third:
            other = helper_of(third)
            assert other != helper
        wait_until(lambda: is_gone(other.pid))
        assert helper_of(first) == helper
    wait_until(lambda: is_gone(helper.pid))


def test_a_helper_imports_the_preloaded_modules():
    with spawn(backend=backend(preload=("colorsys", "no_such_module"))) as actor:
        assert actor.has("colorsys").result(SOON)
        assert not actor.has("no_such_module").result(SOON)
    with spawn() as actor:
        assert actor.has("numpy").result(SOON)
        assert not actor.has("colorsys").result(SOON)
    with pytest.raises(ValueError, match="'loky'"):
        ea.ProcessBackend("loky", preload=("colorsys",))


def test_what_is_preloaded_reads_the_variables_of_the_actor_and_of_no_other(tmp_path, monkeypatch):
    (tmp_path / "flavours.py").write_text("import os\nread = os.environ.get('FLAVOUR')\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Reader:
        def read(self):
            import flavours

            return flavours.read, os.environ.get("FLAVOUR"), os.getppid()

    preloading, read = backend(preload=["flavours"]), {}
    with ea.ActorPool(Reader, 0 + 1, backend=preloading) as plain:
        read[None] = plain.actors[0].read().result(SOON)
        for flavour in ("sweet", "sour"):
            with (
                ea.spawn(Reader, backend=preloading, env_vars={"FLAVOUR": flavour}) as actor,
                ea.spawn(Reader, backend=preloading, env_vars={"FLAVOUR": flavour}) as alike,
            ):
                read[flavour] = actor.read().result(SOON)
                assert alike.read().result(SOON) == read[flavour]
        assert plain.actors[0].read().result(SOON) == read[None]
    assert {flavour: values[:2] for flavour, values in read.items()} == {
        None: (None, None),
        "sweet": ("sweet", "sweet"),
        "sour": ("sour", "sour"),
    }
    assert len({helper for _, _, helper in read.values()}) == 3


def test_without_preload_no_helper_has_an_actors_variables():
    with spawn(env_vars={"FLAVOUR": "sour"}) as first, spawn() as second:
        assert helper_of(first) == helper_of(second)
        assert first.variable("FLAVOUR").result(SOON) == "sour"
        assert second.variable("FLAVOUR").result(SOON) is None
        assert "FLAVOUR" not in helper_of(first).environ()


def test_a_worker_has_the_callers_path_arguments_and_directory_as_they_are_when_it_starts(tmp_path, monkeypatch):
    with spawn() as first:
        before = first.setting().result(SOON)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "argv", ["somewhere.py", "--else"])
        monkeypatch.chdir(tmp_path)
        with spawn() as second:
            assert helper_of(second) == helper_of(first)
            path, argv, directory = second.setting().result(SOON)
            assert path[0] == str(tmp_path)
            assert argv == ["somewhere.py", "--else"]
            assert directory == str(tmp_path)
        assert first.setting().result(SOON) == before


def test_a_caller_whose_directory_was_removed_starts_workers(tmp_path, monkeypatch):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(removed)
    removed.rmdir()
    with spawn() as actor:
        assert actor.has("numpy").result(SOON)


def test_a_preload_that_leaves_threads_running_is_rejected_by_name_and_at_once(tmp_path, monkeypatch):
    code = "import threading\nthreading.Thread(target=threading.Event().wait, name='busy-bee', daemon=True).start()\n"
    (tmp_path / "restless.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with spawn(backend=backend(preload=["colorsys", "restless"])) as actor:
        with pytest.raises(ea.ActorStartError, match=r"importing 'restless' leaves threads running \(busy-bee\)"):
            actor.parent().result(SOON)
        assert actor.state is ea.ActorState.DEAD
        assert actor.stats().restarts == 0


def test_a_preload_whose_threads_end_is_accepted(tmp_path, monkeypatch):
    code = "import threading\nthread = threading.Timer(0.05, print)\nthread.start()\n"
    (tmp_path / "hasty.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with spawn(backend=backend(preload=["hasty"])) as actor:
        assert actor.has("hasty").result(SOON)


def test_collections_of_a_worker_free_nothing_that_python_has_kept_since_the_imports(tmp_path, monkeypatch):
    # Python keeps thousands of freed tuples for new ones, and frees them in a full collection.
    code = "kept = [tuple(range(i % 18 + 2)) for i in range(36_000)]\ndel kept\n"
    (tmp_path / "wasteful.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with spawn(backend=backend(preload=["wasteful"])) as actor:
        assert actor.faults_of_a_collection().result(SOON) < 300  # pages that were copied


def test_a_renewal_takes_milliseconds():
    gymnasium = pytest.importorskip("gymnasium")
    with ea.spawn(lambda: gymnasium.make("CartPole-v1"), backend=backend()) as actor:
        actor.reset().result(SOON)
        times = []
        for _ in range(7):
            begun = time.monotonic()
            actor.renew().result(SOON)
            times.append(time.monotonic() - begun)
        assert statistics.median(times) < promised(0.25)  # 0.03 on an idle machine: docs/guides/performance.md


# Without memory ------------------------------------------------------------------------------------------


def test_a_helper_out_of_memory_fails_starts_until_it_is_replaced():
    with spawn(deadlines=ea.Deadlines(start=SOON)) as actor, spawn() as going_on:
        helper = helper_of(actor)
        used = helper.memory_info().vms
        resource.prlimit(helper.pid, resource.RLIMIT_AS, (used // 2, used // 2))
        renewal = actor.renew()
        wait_until(lambda: renewal.done() or actor.stats().restarts >= 2)
        if not renewal.done():  # its workers die in their first steps; the next helper has memory enough
            helper.kill()
        assert renewal.result(SOON) >= 1
        assert actor.has("numpy").result(SOON)
        assert going_on.has("numpy").result(SOON)
