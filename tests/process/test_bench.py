"""`envactors bench`: the installed command, run as users run it, and its figures."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import FORK_SERVER, is_gone
from hypothesis import given
from hypothesis import strategies as st

import envactors as ea
from envactors.cli import main
from envactors.cli.bench import registry
from envactors.cli.bench.figures import Comparison, Spread, in_words, rates, ratio_text, ratios, spread
from envactors.cli.bench.libraries import GymnasiumLoop
from envactors.cli.bench.registry import BASELINES, choose_entries, our_entries
from envactors.cli.bench.sides import LoopsApart, PlainLoop
from envactors.cli.source import EnvSource
from envactors.testing import EchoEnv, workloads
from envactors.tuning.measuring import Round, Workload

COMMAND = Path(sys.executable).with_name("envactors")
SMALL = ("--rounds", "2", "--seconds", "0.05")
ECHO = "envactors.testing:EchoEnv"
LOOPS_APART = f"{min(2, len(os.sched_getaffinity(0)))} loops apart"


def sample(env: str, num_envs: int) -> Workload:
    return Workload.sample(EnvSource(env), env, num_envs)


OURS = ["envactors", "envactors-packed", "envactors-recv", "envactors-rollout"]


def our_side(name: str, workload: Workload):
    (entry,) = [entry for entry in our_entries(workload.num_envs, 2) if entry.name == name]
    return entry.make(workload)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    # Here Rich would mistake the pipe for a terminal.
    environment = {**os.environ, "FORCE_COLOR": "1"}
    return subprocess.run(
        [COMMAND, "bench", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        cwd=cwd,
        env=environment,
    )


@pytest.fixture(scope="module")
def measured(helper_processes, tmp_path_factory):
    """A run in this process, whose sides a fork server starts; other tests run the command, and start fresh sides."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    sizes = ("--num-envs", "2", "--envs-per-actor", "2", "--against", "loop,pipe, gymnasium")
    files = ("--json", str(path), "--plot", str(path.with_suffix(".svg")))
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        pytest.MonkeyPatch.context() as patches,
    ):
        patches.setenv("FORCE_COLOR", "1")
        patches.setattr(ea, "ProcessBackend", lambda _: FORK_SERVER)
        status = main(["bench", "CartPole-v1", *SMALL, *sizes, *files])
    done = subprocess.CompletedProcess((), status, out.getvalue(), errors.getvalue())
    return done, json.loads(path.read_text()), path.with_suffix(".svg").read_text()


def test_the_table_and_the_words(measured):
    done, _, _ = measured
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.split("\n\n")[1].splitlines())) <= 80
    for title in (
        "envactors 0",
        "envactors, 2 per process",
        "envactors, recv",
        "loop",
        LOOPS_APART,
        "gymnasium 1",
        "pipe",
    ):
        assert re.search(rf"^{title}.*: started in [\d.]+ s$", done.stdout, re.MULTILINE)
        assert re.search(rf"^{title}.* [\d,]+ +[\d,]+ to [\d,]+ +[\d.]+ +[\d.]+ *$", done.stdout, re.MULTILINE)
    assert "round 2 of 2 done" in done.stdout
    assert re.search(r"^A step of this env takes about [\d.]+ [µm]s in the loop\. In multiples of ", done.stdout, re.M)
    assert re.search(r"^The fastest of the others is (pipe|gymnasium [\d.]+): .* its steps\.$", done.stdout, re.M)


def test_trace_file_has_every_event(measured):
    done, record, _ = measured
    assert record["arguments"] == {
        "env": "CartPole-v1",
        "num_envs": 2,
        "envs_per_actor": 2,
        "against": ["loop", "pipe", "gymnasium"],
        "seconds": 0.05,
        "rounds": 2,
    }
    environment = record["environment"]
    assert environment["cores"] == len(psutil.Process().cpu_affinity())
    assert set(environment["versions"]) == {"envactors", "gymnasium"}
    assert len(environment["load_average"]["before"]) == 3
    assert record["in_words"] == [line for line in record["in_words"] if line in done.stdout]
    sides = {side["name"]: side for side in record["sides"]}
    assert list(sides) == [
        "envactors",
        "envactors-packed",
        "envactors-recv",
        "envactors-rollout",
        "loop",
        "apart",
        "gymnasium",
        "pipe",
    ]
    for side in sides.values():
        assert side["error"] is None
        assert [one["seconds"] >= 0.05 and one["steps"] > 0 for one in side["rounds"]] == [True, True]
        own = [one["env_steps_per_second"] for one in side["rounds"]]
        assert side["env_steps_per_second"]["median"] == pytest.approx(statistics.median(own))
        loops = [one["env_steps_per_second"] for one in sides["loop"]["rounds"]]
        paired = statistics.median(one / loop for one, loop in zip(own, loops, strict=True))
        assert side["side_to_loop"]["median"] == pytest.approx(paired)
    assert sides["envactors"]["envactors_to_side"]["median"] == sides["loop"]["side_to_loop"]["median"] == 1.0


def test_the_chart_has_every_side_of_the_table(measured):
    _, record, chart = measured
    assert "CartPole-v1, 2 envs" in chart
    for side in record["sides"]:
        assert side["title"] in chart
        assert f"{side['env_steps_per_second']['median']:,.0f}" in chart


@pytest.fixture
def own_module(tmp_path):
    (tmp_path / "ray.py").write_text("raise RuntimeError('no cluster today')")
    code = """
    import os
    from envactors.testing import EchoEnv

    class envs:
        echo = EchoEnv

    class Fragile(EchoEnv):
        def step(self, action):
            os._exit(3)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    return tmp_path


def test_a_factory_of_ones_own_and_a_side_that_fails(own_module, monkeypatch, capsys):
    # The env knows nothing of Gymnasium; its loop is a plain one.
    monkeypatch.setattr(registry, "our_entries", lambda *sizes: our_entries(*sizes)[:1])  # each has its processes
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(own_module)
    arguments = ("own:envs.echo", *SMALL, "--num-envs", "1", "--against", "ray", "--json", "figures.json")
    assert main(["bench", *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ray.* failed: RuntimeError: no cluster today$", printed, re.MULTILINE)
    assert re.search(r"^ray.* failed *$", printed, re.MULTILINE)
    record = json.loads((own_module / "figures.json").read_text())
    sides = {side["name"]: side for side in record["sides"]}
    assert "Traceback" in sides["ray"]["error"]["details"]
    assert (sides["ray"]["rounds"], sides["ray"]["side_to_loop"]) == ([], None)
    assert len(sides["envactors"]["rounds"]) == len(sides["loop"]["rounds"]) == 2


def test_an_env_that_takes_its_process_along(own_module):
    done = run("own:Fragile", *SMALL, "--num-envs", "1", "--against", "loop", cwd=own_module)
    assert (done.returncode, done.stderr) == (1, "")
    assert "loop (Python) failed: ActorDiedError: " in done.stdout
    assert re.search("^envactors [^,]* failed: VectorStepError: ", done.stdout, re.MULTILINE)


ENDLESS = (COMMAND, "bench", ECHO, "--num-envs", "1", "--against", "loop", "--rounds", "1000", "--seconds", "0.05")


@contextlib.contextmanager
def endless_run(**options):
    # A new session, so that the signal reaches the same processes as from a terminal, but not pytest.
    with subprocess.Popen(ENDLESS, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_at_a_terminal():
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
    with endless_run(stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        screen = b""
        while b" of 1000: " not in screen:
            screen += os.read(ours, 1 << 16)
        descendants = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)
        # The last one who has the other end leaves: EIO.
        with contextlib.suppress(OSError):
            while os.read(ours, 1 << 16):
                pass
        errors = process.stderr.read()
        process.wait()
    os.close(ours)
    assert (process.returncode, errors) == (130, b"envactors: interrupted\n")
    for text in ("starting envactors", "━", "1 env, 5 sides: 1,000 rounds of 0.05 s each"):
        assert text in screen.decode(errors="ignore")
    assert_all_gone(descendants, 1)


def test_no_process_is_left_when_the_command_is_killed():
    with endless_run(stdout=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("round 1 "):
            pass
        descendants = workers_of(process)
    assert_all_gone(descendants, 10)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) >= 4 + 1 + 1 + 1
    return descendants


def assert_all_gone(processes: list[psutil.Process], patience: float) -> None:
    _, left = psutil.wait_procs(processes, timeout=patience)
    # Orphans that have ended are reaped by the system's first process, whenever it likes.
    assert [process for process in left if not is_gone(process.pid)] == []


class Mute(EchoEnv):
    action_space = None


def refused(capsys, *arguments: str) -> str:
    try:
        status = main(["bench", *arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    return captured.err


@pytest.fixture
def path_restored(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


@pytest.mark.usefixtures("path_restored")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (ECHO, "--against", "pipe,rey"),
            "unknown: 'rey'; known: loop, apart, gymnasium, stable-baselines3, tianshou, ray, ",
        ),
        ((ECHO, "--against", ""), "unknown: ''; known: loop, "),
        ((ECHO, "--against", "gymnasium"), f"--against gymnasium: {ECHO} is not a gymnasium.Env"),
        ((ECHO, "--num-envs", "0"), "0 is less than 1"),
        ((ECHO, "--envs-per-actor", "0"), "0 is less than 1"),
        ((ECHO, "--rounds", "0"), "0 is less than 1"),
        ((ECHO, "--seconds", "nan"), "nan is not a positive number of seconds"),
        ((ECHO, "--json", "/nowhere/figures.json"), "/nowhere/figures.json cannot be written"),
        ((ECHO, "--json", "/tmp"), "/tmp cannot be written"),
        ((ECHO, "--plot", "/tmp/chart.txt"), "/tmp/chart.txt: give it one of the suffixes pdf, png, svg"),
        (("NoSuchEnv-v0",), "NoSuchEnv-v0 could not be made: NameNotFound: "),
        (("nowhere:make",), "nowhere:make could not be made: ModuleNotFoundError: No module named 'nowhere'"),
        (("envactors.testing:nobody",), "could not be made: AttributeError: "),
        (("test_bench:Mute",), "test_bench:Mute makes a Mute without an action_space to sample from: give the env one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_bench_arguments_exit_before_anything_starts(arguments, text, capsys):
    assert text in refused(capsys, *arguments)


@pytest.mark.usefixtures("path_restored")
def test_a_peer_that_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    errors = refused(capsys, ECHO, "--against", "dask,pipe")
    assert "envactors bench: --against dask: not installed: pip install distributed\n" in errors
    # Without the option, it is left out.
    entries, skipped = choose_entries(None, sample(ECHO, 2), ECHO, 1)
    assert skipped["dask"] == "not installed: pip install distributed"
    assert {"pipe", "loky"} <= {entry.name for entry in entries}
    assert "dask" not in {entry.name for entry in entries}


def test_a_chart_without_matplotlib_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(capsys, ECHO, "--plot", "chart.svg") == (
        "envactors bench --plot needs matplotlib: pip install 'envactors[plot]'\n"
    )


@pytest.mark.usefixtures("path_restored")
@pytest.mark.parametrize(
    ("missing", "env", "text"),
    [
        ("rich", ECHO, "envactors bench needs rich: pip install 'envactors[cli]'\n"),
        ("psutil", ECHO, "envactors bench needs psutil: pip install 'envactors[cli]'\n"),
        (
            "gymnasium",
            "CartPole-v1",
            "envactors bench: CartPole-v1 is made by gymnasium: pip install 'envactors[gymnasium]'",
        ),
    ],
)
def test_missing_extras_are_named(missing, env, text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert refused(capsys, env).startswith(text)


def test_a_peer_is_imported_only_when_it_takes_part():
    peers = ["gymnasium", *(baseline.module for baseline in BASELINES if baseline.module not in (None, "loky"))]
    modules = "sys, envactors.cli.bench.registry, envactors.testing.workloads"
    code = f"import {modules}; print({{*{peers}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_help_names_everybody(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    described = capsys.readouterr().out
    for text in (*(baseline.name for baseline in BASELINES), "--against", "--json", "--envs-per-actor", "exit status"):
        assert text in described


# The sides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PlainLoop, GymnasiumLoop, *OURS[:2]])
def test_all_sides_make_the_same_steps_and_do_not_count_resets(kind):
    # CartPole's episodes are over sooner or later, depending on the seed and every action.
    workload = sample("CartPole-v1", 3)
    side = our_side(kind, workload) if isinstance(kind, str) else kind(workload)
    side.start()
    try:
        for _ in range(2):
            side.reset(7)
            made = [side.step() for _ in range(80)]
            assert made == expected_steps(workload, 7, 80)
            assert min(made) < 3
    finally:
        side.close()


def expected_steps(workload, seed, turns):
    return list(itertools.islice(steps_per_turn(workload, seed, range(workload.num_envs)), turns))


def steps_per_turn(workload, seed, env_ids):
    envs = {env_id: workload.factory() for env_id in env_ids}
    ended = dict.fromkeys(env_ids, False)
    for env_id, env in envs.items():
        env.reset(seed=seed + env_id)
    for actions in itertools.cycle(workload.actions):
        yield list(ended.values()).count(False)
        for env_id, env in envs.items():
            if ended[env_id]:
                env.reset()
                ended[env_id] = False
            else:
                _, _, terminated, truncated, _ = env.step(actions[env_id])
                ended[env_id] = terminated or truncated


def test_loops_apart_count_whole_rounds_over_their_envs():
    # Wherever a slice of time ends, each process has made a whole number of rounds over its envs.
    workload = sample("CartPole-v1", 3)
    side = LoopsApart(workload)
    side.start()
    try:
        for _ in range(2):
            side.reset(7)
            parts = side._piped.call("run", [0.02] * side._count)
            envs_of = [part.tolist() for part in np.array_split(np.arange(3), len(parts))]
            for made, envs in zip(parts, envs_of, strict=True):
                sums = itertools.accumulate(steps_per_turn(workload, 7, envs))
                assert made == next(total for total in sums if total >= made) > 0
            assert side.step() > 0
    finally:
        side.close()


def test_the_asynchronous_side_counts_what_the_envs_count():
    side = our_side("envactors-recv", sample(ECHO, 3))
    side.start()
    try:
        for _ in range(2):
            side.reset(0)
            made = sum(side.step() for _ in range(20))
            made += side.settle()
            assert made == sum(side._envs.get_attr("steps"))
            assert side.settle() == 0
    finally:
        side.close()


def test_rollouts_play_back_the_actions_and_count_what_the_envs_count():
    workload = sample(ECHO, 3)
    side = our_side("envactors-rollout", workload)
    side.start()
    try:
        side.reset(0)
        first, *others = [side.step() for _ in range(9)]
        assert first + sum(others) == sum(side._envs.get_attr("steps"))
        assert 0 < first < others[-1]  # the rollouts become longer
        for _ in range(2):
            side.reset(0)
            rollout = side._envs.rollout(5, parameters=0)
            assert rollout.actions.tolist() == workload.actions[:5]
    finally:
        side.close()


# The workloads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "image", "busy_100us", "busy_1ms", "sleeping", "pong", "humanoid"])
def test_workloads(name):
    if name == "pong":
        pytest.importorskip("ale_py")
        pytest.importorskip("cv2")
    if name == "humanoid":
        pytest.importorskip("mujoco")
    source = EnvSource(f"envactors.testing.workloads:{name}")
    env = source()
    obs, _ = env.reset(seed=1)
    assert env.observation_space.contains(obs)
    obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)
    assert (terminated, truncated) == (False, False)
    shape = {"image": (4, 84, 84), "pong": (4, 84, 84), "humanoid": (348,)}.get(name, (4,))
    assert obs.shape == shape
    env.close()


def test_work_is_an_amount_and_waits_follow_the_seed(monkeypatch):
    turns, waits = [], []
    monkeypatch.setattr(workloads, "compute", turns.append)
    for make in (workloads.busy_100us, workloads.busy_1ms):
        env = make()
        env.reset()
        env.step(0)
    assert turns == [workloads._TURNS_PER_100_US, 10 * workloads._TURNS_PER_100_US]
    monkeypatch.setattr(workloads.time, "sleep", waits.append)
    env = workloads.sleeping()
    for _ in range(2):
        env.reset(seed=3)
        for _ in range(200):
            env.step(0)
    assert waits[:200] == waits[200:]
    assert np.mean(waits) == pytest.approx(0.002, rel=0.3)


# The figures --------------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-6, 1e6)
SIDES = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1, max_size=20)


@given(st.lists(POSITIVE, min_size=1, max_size=30))
def test_a_spread_has_its_values_in_order(values):
    found = spread(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.lower_quartile <= found.median + slack
    assert found.median <= found.upper_quartile + slack <= max(values) + 2 * slack
    assert found.median == pytest.approx(statistics.median(values))
    assert found == spread(values[::-1])


@given(SIDES)
def test_ratios_do_not_depend_on_the_length_of_rounds(rounds):
    slow = [(Round(one, seconds), Round(other, seconds)) for one, other, seconds in rounds]
    quick = [(Round(one, 1.0), Round(other, 1.0)) for one, other, _ in rounds]
    (ours, theirs), (our_counts, their_counts) = (zip(*sides, strict=True) for sides in (slow, quick))
    assert ratios(ours, theirs).median == pytest.approx(ratios(our_counts, their_counts).median)
    assert ratios(ours, ours).median == 1.0
    assert rates(our_counts) == spread([one for one, _, _ in rounds])


def compared(**to_loop: float) -> list[Comparison]:
    """Sides by name, of which each makes this multiple of the loop's 200,000 steps per second."""

    def one(value: float) -> Spread:
        return Spread(value, value, value)

    ratios_of = {"loop": 1.0, **{name.replace("_", "-"): ratio for name, ratio in to_loop.items()}}
    default = ratios_of["envactors"]
    return [
        Comparison(name, name, name in OURS, one(200_000 * ratio), one(ratio), one(default / ratio))
        for name, ratio in ratios_of.items()
    ]


@pytest.mark.parametrize(
    ("to_loop", "verdict"),
    [
        ({"envactors": 0.4, "envactors_packed": 1.3}, "The fastest is envactors-packed."),
        ({"envactors": 1.8, "envactors_packed": 1.7}, "The fastest is envactors."),
        ({"envactors": 0.4, "envactors_rollout": 1.02}, "Processes cost more than they give: use backend='inline', "),
    ],
    ids=["packed pays", "processes pay", "nothing pays"],
)
def test_the_words_follow_the_figures(to_loop, verdict):
    (sentence,) = in_words(compared(**to_loop), 2, 0.1)
    assert sentence.startswith("A step of this env takes about 5 µs in the loop. ")
    assert f"on 2 cores: envactors: {ratio_text(to_loop['envactors'])[:3]}" in sentence
    assert verdict in sentence


def test_the_fastest_of_the_others_is_named():
    _, sentence = in_words(compared(envactors=2.0, pipe=1.6, ray=0.2, apart=9.0), 2, 0.1)
    assert sentence == "The fastest of the others is pipe: the default makes 1.2 times its steps."


def test_a_comparison_without_the_plain_loop_gives_no_advice():
    assert in_words([one for one in compared(envactors=2.0) if one.name != "loop"], 2, 0.1) == []


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.00384, "0.0038"),
        (0.0999, "0.10"),
        (0.254, "0.25"),
        (0.999, "1.00"),
        (1.26, "1.26"),
        (9.996, "10"),
        (123.4, "123"),
    ],
)
def test_ratios_have_two_digits_that_count(ratio, text):
    assert ratio_text(ratio) == text


def test_bench_warns_about_a_busy_machine():
    words = in_words(compared(envactors=2.5), 2, 7.0)
    assert len(words) == 2
    assert "load average was 7.0" in words[1]


def test_names_that_gymnasium_makes_and_factories():
    assert [EnvSource(name).is_factory for name in ("CartPole-v1", "ale_py:ALE/Pong-v5", "own:make", "a.b:c.d")] == [
        False, False, True, True,
    ]  # fmt: skip
