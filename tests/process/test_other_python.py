"""Workers in another interpreter, with other versions of Python and NumPy (`ProcessBackend(python=)`)."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
from pathlib import Path

import elsewhere
import numpy as np
import psutil
import pytest
from conformance import BackendConformance
from helpers import SOON, is_gone, wait_until
from interpreters import NEEDED, OWN, WITH_ANY_NUMPY, another, make_venv, pythons

import envactors as ea
from envactors.integrations.adapter import adapted
from envactors.integrations.sb3.adapter import StableBaselinesEnvAdapter
from envactors.mailbox import pickling
from envactors.mailbox.info_codec import encode
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv

# Making a virtual environment may take a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

# The oldest NumPy for the tests whose major version is the caller's.
MAJOR = np.__version__.partition(".")[0]
NUMPY = {"1": "1.26", "2": "2.1"}[MAJOR]
MANY = ea.RestartPolicy(max_restarts=50, backoff=0.0)
HERE = str(Path(__file__).parents[1])
PATH = {"PYTHONPATH": HERE}
MAKE = "elsewhere:Elsewhere"


@pytest.fixture(scope="module")
def older(request):
    """Another version of Python, with NumPy and cloudpickle, and nothing else."""
    versions = sorted(WITH_ANY_NUMPY - {OWN})
    return another(request.config.cache, versions, f"numpy-{NUMPY}", f"numpy=={NUMPY}.*", NEEDED)


@pytest.fixture(scope="module", params=["same packages", pytest.param("older NumPy", marks=pytest.mark.slow)])
def same(request, tmp_path_factory):
    """The caller's version of Python, with its packages, or with an older NumPy if there is one for it."""
    if request.param == "same packages":
        made = make_venv(tmp_path_factory.mktemp("same") / "venv", pythons()[OWN])
        (packages,) = Path(made).parents[1].glob("lib/python3*/site-packages")
        (packages / "callers.pth").write_text(sysconfig.get_path("purelib"))
        return made
    numpy = f"numpy=={NUMPY if OWN in WITH_ANY_NUMPY else MAJOR}.*"
    return another(request.config.cache, [OWN], "numpy-old", numpy, NEEDED)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The caller's version of Python without any packages."""
    return make_venv(tmp_path_factory.mktemp("bare") / "venv", pythons()[OWN])


@pytest.fixture(scope="module")
def server(older):
    """Keeps a fork server, so that each test need not start one."""
    backend = ea.ProcessBackend(python=older)
    with ea.spawn(MAKE, backend=backend, env_vars=PATH) as actor:
        actor.parent().result(SOON)
        yield backend


@pytest.fixture
def spawn(server):
    return lambda make=MAKE, **options: ea.spawn(make, **{"backend": server, "env_vars": PATH, **options})


class TestConformance(BackendConformance):
    """What every backend must pass, with other versions of Python and NumPy."""

    @pytest.fixture(autouse=True)
    def _backend(self, server):
        self._made = server

    def make_backend(self):
        return self._made

    def spawn(self, factory=EchoEnv, **options):
        return super().spawn(factory, env_vars=PATH, **options)  # as the fixture, so that the server is the same

    def make_envs(self, count=4, **options):
        return super().make_envs(count, env_vars=PATH, **options)


@pytest.mark.soak
class TestConformanceOfTheSameVersion(TestConformance):
    """Likewise, with the caller's version, which also runs what is pickled by value."""

    @pytest.fixture(autouse=True)
    def _backend(self, same):
        self._made = ea.ProcessBackend(python=same)


# Where workers run, and what they find ---------------------------------------------------------------------


def test_the_worker_runs_in_the_other_interpreter_with_its_path_and_this_package(older):
    with ea.spawn(MAKE, backend=ea.ProcessBackend(python=Path(older)), env_vars=PATH) as actor:
        version, numpy, executable, package, path = actor.where().result(SOON)
    assert version != OWN
    assert numpy.startswith(f"{NUMPY}.")
    assert executable == older
    assert package == ea.__file__
    assert path[0] == HERE
    assert not {*sys.path} & {*path[1:]}
    assert all(path)  # not the working directory
    assert Path(ea.__file__).parent.parent not in map(Path, path)


def test_another_envactors_there_is_not_used(spawn, tmp_path):
    (tmp_path / "envactors").mkdir()
    (tmp_path / "envactors/__init__.py").write_text("raise ImportError('of another version')")
    with spawn(env_vars={"PYTHONPATH": os.pathsep.join([str(tmp_path), HERE])}) as actor:
        assert actor.where().result(SOON)[3] == ea.__file__


def test_actors_share_a_server_that_preloads_modules_and_ends_with_them(older):
    backend = ea.ProcessBackend(python=older, preload=["colorsys", "elsewhere", "no_such_module"])
    options = {"backend": backend, "restart": MANY}
    with ea.spawn(MAKE, env_vars=PATH, **options) as first, ea.spawn(MAKE, env_vars=PATH, **options) as second:
        server = psutil.Process(first.parent().result(SOON))
        assert second.parent().result(SOON) == server.pid
        assert Path(server.cmdline()[0]) == Path(older)
        assert first.imported("colorsys").result(SOON)
        with ea.spawn(MAKE, env_vars={**PATH, "FLAVOUR": "sour"}, **options) as third:
            assert third.parent().result(SOON) != server.pid
            assert third.variable("FLAVOUR").result(SOON) == "sour"
        server.kill()
        wait_until(lambda: is_gone(server.pid))
        assert first.echo(1).result(SOON) == 1
        first.renew().result(SOON)
        server = psutil.Process(first.parent().result(SOON))
        assert server.cmdline()[0] == older
    wait_until(lambda: is_gone(server.pid))


def test_workers_end_with_a_caller_that_is_killed(older):
    code = """
        import os, sys
        import envactors as ea

        backend = ea.ProcessBackend(python=sys.argv[1])
        actors = [ea.spawn("envactors.testing:EchoEnv", backend=backend) for _ in range(2)]
        for actor in actors:
            actor.echo(0).result(30)
        print(*(actor.pid for actor in actors), flush=True)
        sys.stdin.read()
        """
    command = [sys.executable, "-c", textwrap.dedent(code), older]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as caller:
        workers = {*map(int, caller.stdout.readline().split())}
        assert len(workers) == 2
        pids = workers | {child.pid for child in psutil.Process(caller.pid).children(recursive=True)}
        assert len(pids) >= 3
        caller.kill()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))


# Values -----------------------------------------------------------------------------------------------


VALUES = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    np.arange(10)[::2],
    np.zeros((0, 3)),
    np.zeros(1 << 17),
    np.array(["ab", "c"]),
    np.array([1, None, "a"], object),
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    np.rec.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    np.ma.array([1, 2], mask=[0, 1]),
    np.float32(2.5),
    np.bool_(True),
    np.datetime64("2020-01-01"),
    np.dtype("f4"),
    np.float64,
    np.random.SeedSequence(3),
    np.random.default_rng(3),
    {"nested": [np.arange(3), (np.int8(1), {4})]},
    range(4),
    complex(1, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_values_cross_between_the_versions(spawn, value, server):
    with spawn() as actor:
        back = actor.echo(value).result(SOON)
    assert type(back) is type(value)
    if isinstance(value, np.ndarray):
        assert back.dtype == value.dtype
        assert back.flags.writeable
        assert np.array_equal(back, value)
    elif isinstance(value, np.random.SeedSequence):
        assert back.entropy == value.entropy
    elif isinstance(value, np.random.Generator):
        assert back.random() == value.random()
    else:
        assert repr(back) == repr(value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ufunc", TypeError),
        ("memory", MemoryError),
        ("axis", ValueError),
        ("attribute", AttributeError),
        ("import", ModuleNotFoundError),
        ("unicode", UnicodeDecodeError),
        ("own", elsewhere.Own),
    ],
)
def test_exceptions_cross_between_the_versions(spawn, kind, expected):
    if kind == "axis" and not hasattr(np, "exceptions"):
        pytest.skip("this NumPy is too old to have the exception's module")
    with spawn() as actor:
        error = actor.fail(kind).exception(SOON)
        assert isinstance(error, expected)
        assert isinstance(error.__cause__, ea.RemoteTraceback)
        if kind == "own":
            assert (error.args, error.number) == (("told",), 3)
        assert actor.echo(1).result(SOON) == 1


def test_code_crosses_in_neither_direction(spawn):
    with pytest.raises(ea.SerializationError, match=r"code of cpython-3\d+, .*'module:callable'"):
        spawn(lambda: elsewhere.Elsewhere())  # noqa: PLW0108 # by value
    with spawn() as actor:
        for future in (actor.echo(lambda: 1), actor.code()):
            error = future.exception(SOON)
            assert isinstance(error, ea.SerializationError)
            assert "was pickled by value, as code of cpython-3" in str(error)
        assert actor.echo(1).result(SOON) == 1


def test_a_snapshot_function_by_value_is_rejected_too(server):
    snapshot = ea.SnapshotPolicy(lambda env: env.steps, lambda env, steps: setattr(env, "steps", steps))
    with pytest.raises(ea.SerializationError, match="snapshot functions of actor 'env-0'"):
        ea.VectorEnv([MAKE], backend=server, env_vars=PATH, snapshot=snapshot)


def test_code_pickled_by_value_runs_in_the_same_python_version(same):
    class Mine(EchoEnv):
        def triple(self, value):
            return 3 * value

    with ea.spawn(lambda: Mine(4), backend=ea.ProcessBackend(python=same)) as actor:
        assert actor.triple(2).result(SOON) == 6
        assert actor.echo(lambda: 5).result(SOON)() == 5


def test_code_of_another_version_is_never_loaded():
    _, *arguments = pickling.ValuePickler(io.BytesIO()).reducer_override((lambda: 1).__code__)[1]
    assert eval(pickling.load_code_by_value(sys.implementation.cache_tag, *arguments)) == 1
    with pytest.raises(
        TypeError, match=r"<lambda> \(.*test_other_python.py:\d+\) was pickled by value, as code of cp-1"
    ):
        pickling.load_code_by_value("cp-1", *arguments)


# Vectors ----------------------------------------------------------------------------------------------------


def test_infos_can_be_read_with_an_older_numpy(spawn):
    info = {"flag": np.bool_(True), "count": np.int32(3), "share": np.float32(0.5), "both": np.array([True, False])}
    with spawn() as actor:
        back = actor.decode(encode(info, [])).result(SOON)
    assert repr(back) == repr(info)


def test_a_vector_steps_through_shared_memory(server):
    with ea.VectorEnv([MAKE] * 4, envs_per_actor=2, backend=server, env_vars=PATH) as envs:
        assert envs._engine is not None
        obs, infos = envs.reset(seed=1)
        assert obs[:, 1].tolist() == [infos[0]["version"][1]] * 4
        for number in range(1, 30):
            obs, rewards, terminated, _, infos = envs.step(np.arange(4))
            assert obs[:, 0].tolist() == rewards.tolist() == [number] * 4
            assert not terminated.any()
            assert [info["noise"].tolist() for info in infos] == [[i] * 3 for i in range(4)]
        assert envs.stats().steps == [29] * 4


def test_crashed_envs_are_replayed_on_standbys(server):
    options = {"on_failure": "replay", "standbys": 1, "restart": MANY, "backend": server, "env_vars": PATH}
    with ea.VectorEnv([MAKE] * 2, **options) as envs:
        envs.reset(seed=1)
        for number in range(1, 12):
            if number % 5 == 0:
                os.kill(envs.actors[0].pid, signal.SIGKILL)
            assert envs.step([0, 0])[0][:, 0].tolist() == [number] * 2
        assert envs.actors[0].incarnation >= 2


def test_deadlines_stacks_and_output_work_in_another_interpreter(spawn):
    with spawn(restart=MANY) as actor:
        sleeping, late = actor.sleep(), actor.options(deadline=0.2).sleep()
        wait_until(lambda: "in sleep" in actor.stacks(SOON))
        assert sleeping.abort()
        error = late.exception(SOON)
        assert isinstance(error, ea.ActorTimeoutError)
        assert "elsewhere.py" in error.stacks
        error = actor.exit().exception(SOON)
        assert isinstance(error, ea.ActorDiedError)
        assert (error.exitcode, error.stderr_tail) == (3, "leaving")


def test_log_records_of_env_code_arrive(spawn, caplog):
    arrived = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: arrived.set()
    logging.getLogger("simulator").addHandler(handler)
    try:
        with spawn() as actor:
            actor.log(np.float32(2)).result(SOON)
            assert arrived.wait(SOON)
    finally:
        logging.getLogger("simulator").removeHandler(handler)


def test_nodes_run_workers_in_another_interpreter(older):
    backend = ea.RemoteBackend(LocalNodes(1), python=Path(older))
    with ea.spawn(MAKE, backend=backend, env_vars=PATH) as actor:
        version, numpy, *_ = actor.where().result(30.0)
        assert version != OWN
        assert numpy.startswith(f"{NUMPY}.")
        assert actor.echo(np.arange(3)).result(SOON).tolist() == [0, 1, 2]
    with ea.spawn(lambda: elsewhere.Elsewhere(), backend=backend, env_vars=PATH) as actor:  # noqa: PLW0108
        error = actor.echo(1).exception(30.0)
    assert isinstance(error, ea.ActorStartError)
    assert "was pickled by value, as code of cpython-3" in str(error)


# Names of factories -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_every_backend_takes_a_name(backend):
    with ea.spawn("elsewhere:Factories.make", backend=backend) as actor:
        assert actor.echo(1).result(SOON) == 1
    with ea.VectorEnv([MAKE, elsewhere.Elsewhere], backend=backend) as envs:
        assert envs.reset()[0].shape == (2, 2)
    with ea.ActorPool(MAKE, 2, backend=backend) as pool:
        assert list(pool.map("echo", range(3))) == [0, 1, 2]


def test_the_caller_does_not_import_it(tmp_path, monkeypatch):
    (tmp_path / "only_there.py").write_text("from envactors.testing import EchoEnv")
    monkeypatch.syspath_prepend(tmp_path)
    with ea.spawn("only_there:EchoEnv") as actor:
        assert actor.echo(1).result(SOON) == 1
    assert "only_there" not in sys.modules


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "module", "module:", ":make", "a:b:c", "a.:b", "ale_py:ALE/Pong-v5", ""]
)
def test_factory_strings_without_a_colon_raise_immediately(name):
    with pytest.raises(ValueError, match=r"the factory of actor 'me' is .*: expected a callable .*'module:callable'"):
        ea.spawn(name, name="me")
    with pytest.raises(ValueError, match="'module:callable'"):
        adapted(StableBaselinesEnvAdapter, name)


def test_drop_ins_accept_factories_by_name(spawn):
    with spawn(adapted(StableBaselinesEnvAdapter, MAKE)) as actor:
        assert actor.envactors_has("steps").result(SOON)


@pytest.mark.parametrize(
    ("name", "cause", "text"),
    [
        ("no_such_module:make", ModuleNotFoundError, r"No module named 'no_such_module' \(in {python}, Python 3\.\d+"),
        ("elsewhere:nothing", AttributeError, r"module 'elsewhere' has no attribute 'nothing' \(in {python}, Python 3"),
        ("elsewhere:Factories.number", TypeError, "'elsewhere:Factories.number' is 3: expected a callable"),
        ("elsewhere:broken", LookupError, "no such env"),
    ],
)
def test_a_name_that_leads_nowhere(spawn, older, name, cause, text):
    with spawn(name) as actor:
        error = actor.echo(1).exception(SOON)
    assert isinstance(error, ea.ActorStartError)
    assert isinstance(error.__cause__, cause)
    with pytest.raises(type(error), match=text.format(python=older)):
        raise error
    assert ("env_vars={'PYTHONPATH': ...}" in str(error)) == (cause is ModuleNotFoundError)


# Unsuitable interpreters ------------------------------------------------------------------------------


def refusal(python, env_vars=None):
    """Returns what the start of an actor in an interpreter fails with, which is not tried again."""
    backend = ea.ProcessBackend(python=python)
    with ea.spawn(MAKE, backend=backend, restart=MANY, env_vars=env_vars) as actor:
        error = actor.echo(1).exception(SOON)
    assert type(error) is ea.ActorStartError
    assert actor.incarnation == 0
    return str(error)


def test_a_missing_interpreter_is_rejected(tmp_path):
    assert "no-python' cannot be run (No such file or directory): expected a Python interpreter" in refusal(
        tmp_path / "no-python"
    )


def test_a_file_that_is_not_an_interpreter_is_rejected(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    assert "cannot be run (Permission denied)" in refusal(plain)
    assert "is not a Python interpreter: it printed ''" in refusal("true")
    assert "cannot run workers: " in refusal("false")


def test_an_interpreter_without_packages(bare):
    text = refusal(bare)
    assert "it cannot import numpy (No module named 'numpy')" in text
    assert f"run {bare} -m pip install 'numpy=={MAJOR}.*' 'cloudpickle>=3.0'" in text


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        ({"numpy": np.__version__}, "it cannot import cloudpickle"),
        ({"numpy": f"{MAJOR}.99.0rc1", "cloudpickle": "2.2.1"}, "its cloudpickle is 2.2.1: run "),
    ],
)
def test_an_interpreter_with_old_packages(bare, tmp_path, packages, text):
    for name, version in packages.items():
        (tmp_path / f"{name}.py").write_text(f"__version__ = {version!r}")
    assert text in refusal(bare, {"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("version", [{"1": "2.0.0rc1", "2": "1.26.4"}[MAJOR], f"{int(MAJOR) + 9}.0"])
def test_an_interpreter_with_another_major_version_of_numpy_is_rejected(bare, tmp_path, version):
    (tmp_path / "numpy.py").write_text(f"__version__ = {version!r}")
    text = refusal(bare, {"PYTHONPATH": str(tmp_path)})
    assert f"its NumPy is {version} and the caller's is {np.__version__}, of another major version: " in text
    assert f"run {bare} -m pip install 'numpy=={MAJOR}.*' 'cloudpickle>=3.0'" in text


@pytest.mark.parametrize("version", [(2, 7), (3, 6), (3, 7), (3, 9)])
def test_an_interpreter_that_is_too_old_is_rejected(version):
    if version not in pythons():
        pytest.skip("it is not found")
    assert f"it is Python {version[0]}.{version[1]}: expected 3.10 or newer" in refusal(pythons()[version])


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("sys.maxsize = 2**31 - 1", "64 bit"),
        ("sys.byteorder = 'middle'", "it is cpython, middle-endian"),
        ("sys.implementation.name = 'other'", "it is other"),
        ("import os; del os.eventfd", "it was built without epoll, eventfd"),
    ],
)
def test_an_interpreter_of_another_kind(older, tmp_path, mistake, text):
    (tmp_path / "sitecustomize.py").write_text(f"import sys; {mistake}")
    assert text in refusal(older, {"PYTHONPATH": str(tmp_path)})


def test_an_interpreter_is_checked_again_after_a_rejection(bare, tmp_path):
    assert "its NumPy is 0.9" in refusal(bare, {"PYTHONPATH": str(tmp_path), **_write(tmp_path, "0.9")})
    assert "cannot import cloudpickle" in refusal(
        bare, {"PYTHONPATH": str(tmp_path), **_write(tmp_path, np.__version__)}
    )


def _write(folder, version):
    (folder / "numpy.py").write_text(f"__version__ = '{version}'")
    return {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("option", [{"python": "py"}, {"preload": ["colorsys"]}])
def test_what_needs_a_fork_server_is_refused_without_one(option):
    ((name, value),) = option.items()
    expected = re.escape(f"{name} is {value!r} with start_method='loky': expected 'forkserver' (on Linux)")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        ea.ProcessBackend("loky", **option)


def test_a_python_that_is_not_a_path_is_a_type_error():
    with pytest.raises(TypeError, match=r"^python is 3: expected str or PathLike or None"):
        ea.ProcessBackend(python=3)


def test_its_name_is_shown():
    assert repr(ea.ProcessBackend(python="py")).endswith("spin=True, python='py')")
