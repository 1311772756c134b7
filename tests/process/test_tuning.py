"""`tune`: the settings that it tries, the fastest ones, and the line to paste."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import promised
from hypothesis import given
from hypothesis import strategies as st

import envactors as ea
from envactors.cli import main
from envactors.cli.source import EnvSource
from envactors.testing import EchoEnv
from envactors.tuning import measure
from envactors.tuning.candidates import Candidate, placements, variants
from envactors.tuning.measure import Actions
from envactors.tuning.tuner import Measured, Tuner, Tuning


class Discrete:
    """An action space."""

    shape, dtype = (), np.dtype(np.int64)

    def sample(self):
        return 1


class Sleeper(EchoEnv):
    """Steps take so long that only processes or threads side by side are fast."""

    action_space = Discrete()

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


@given(st.integers(1, 65), st.integers(1, 16))
def test_placements_are_distinct_and_run_all_envs(num_envs, cores):
    tried = placements(num_envs, cores)
    assert len(set(tried)) == len(tried)
    assert {candidate.backend for candidate in tried} == {"inline", "thread", "process"}
    assert all(1 <= candidate.envs_per_actor <= num_envs for candidate in tried)
    assert Candidate("process", 1) in tried
    assert Candidate("process", -(-num_envs // min(cores, num_envs))) in tried


@given(st.integers(1, 65), st.integers(1, 16), st.data())
def test_variants_are_new(num_envs, cores, data):
    tried = placements(num_envs, cores)
    winner = data.draw(st.sampled_from(tried))
    best = data.draw(st.none() | st.sampled_from([candidate for candidate in tried if candidate.backend == "process"]))
    further = variants(winner, best, num_envs, cores)
    assert not {*further} & {*tried}
    assert len(set(further)) == len(further)


@pytest.mark.parametrize(
    ("candidate", "line", "label"),
    [
        (Candidate("process", 1), "envs = ea.VectorEnv([make] * 8)", "8 processes"),
        (Candidate("process", 8), "envs = ea.VectorEnv([make] * 8, envs_per_actor=8)", "1 process"),
        (
            Candidate("inline", 8, copy=False),
            "envs = ea.VectorEnv([make] * 8, envs_per_actor=8, backend='inline', copy=False)",
            "in-process, copy=False",
        ),
        (
            Candidate("process", 4, min_envs=4),
            "envs = ea.VectorEnv([make] * 8, envs_per_actor=4)  # with send, and recv(min_envs=4)",
            "2 processes, recv(min_envs=4)",
        ),
        (
            Candidate("process", 4, in_workers=True),
            "envs = ea.VectorEnv([make] * 8, envs_per_actor=4)  # with set_policy and rollout",
            "2 processes, rollout",
        ),
    ],
)
def test_the_line_makes_the_vector_that_was_measured(candidate, line, label):
    assert candidate.line("make", 8) == line
    assert candidate.label(8) == label
    names = {"ea": ea, "make": EchoEnv}
    exec(line, names)  # what a user pastes
    with names["envs"] as envs:
        assert len(envs.actors) == -(-8 // candidate.envs_per_actor)
        assert repr(envs.actors[0]._actor.config.backend).startswith(
            {"inline": "InlineBackend", "process": "ProcessBackend"}[candidate.backend]
        )


def test_the_plainest_of_those_that_are_as_fast_wins():
    plain, without_copies, far_off = Candidate("inline", 8), Candidate("inline", 8, copy=False), Candidate("process", 1)
    results = [Measured(without_copies, 100.0), Measured(plain, 96.0), Measured(far_off, 50.0)]
    assert Tuning(8, results, "make").best == plain
    results[1] = Measured(plain, 90.0)
    assert Tuning(8, results, "make").best == without_copies


def test_the_reason_compares_with_the_loop_and_with_processes():
    inline, process = Candidate("inline", 8), Candidate("process", 4)
    results = [Measured(inline, 100.0), Measured(process, 50.0)]
    loop = "In a plain loop, a step takes 5,000.0 µs. The setting below, in-process, makes 0.50 times as many steps."
    assert Tuning(8, results, "make", 200.0).reason == (
        f"{loop} The best setting with processes makes 0.25 times as many. No setting is faster than the loop: use "
        "processes only to survive crashes and hangs."
    )
    results = [Measured(process, 300.0), Measured(inline, 100.0)]
    assert Tuning(8, results, "make", 200.0).reason.endswith(
        " The setting below, 2 processes, makes 1.50 times as many steps."
    )
    assert "the plain loop failed" in Tuning(8, results, "make").reason


def test_a_drop_in_gets_the_best_step_since_it_has_no_recv():
    recv, step = Candidate("process", 1, min_envs=4), Candidate("process", 4)
    tuning = Tuning(8, [Measured(recv, 100.0), Measured(step, 50.0)], "make")
    assert tuning.best == recv
    assert tuning.drop_in_line == "envs = ActorVectorEnv([make] * 8, envs_per_actor=4)"
    assert Tuning(8, [Measured(recv, 100.0)], "make").drop_in_line is None


def test_the_plain_loop_is_measured_and_its_resets_are_not_counted():
    tuning = ea.tune(ShortEpisodes, 2, seconds=0.1)
    assert tuning.loop_rate > 0
    assert tuning.record()["loop_env_steps_per_second"] == tuning.loop_rate
    envs = [ShortEpisodes(), ShortEpisodes()]
    for env in envs:
        env.reset()
    rate = measure.measure_loop(envs, Actions.sample(EchoWithSpace, "EchoWithSpace", 2), 0.0)
    assert (rate > 0, [env.made for env in envs]) == (True, [1, 1])


def test_rollouts_have_a_line_of_their_own_where_they_win():
    rollout, step = Candidate("process", 4, in_workers=True), Candidate("process", 4)
    tuning = Tuning(8, [Measured(rollout, 100.0), Measured(step, 50.0)], "make")
    assert (tuning.best, tuning.best_rollout) == (step, rollout)
    lines = str(tuning).splitlines()
    assert lines.index(rollout.line("make", 8)) < lines.index(step.line("make", 8))
    tuning = Tuning(8, [Measured(step, 100.0), Measured(rollout, 50.0)], "make")
    assert tuning.best_rollout is None
    assert "set_policy" not in str(tuning)


def test_a_setting_that_failed_is_not_recommended():
    rollout, step = Candidate("process", 4, in_workers=True), Candidate("process", 4)
    tuning = Tuning(8, [Measured(rollout, 100.0), Measured(step, 0.0, failure=ValueError("no"))], "make")
    assert tuning.best == rollout
    lines = str(tuning).splitlines()
    assert [line.split() for line in lines if line.startswith("2 processes  ")] == [
        ["2", "processes", "failed", "ValueError"]
    ]
    assert lines[-1] == tuning.line == rollout.line("make", 8)


def test_rollouts_are_measured():
    tuning = ea.tune(EchoWithSpace, 4, seconds=0.1)
    rollouts = [result for result in tuning.results if result.candidate.in_workers]
    assert rollouts
    assert all(result.failure is None and result.rate > 0 for result in rollouts)


@pytest.mark.parametrize(
    "candidate",
    [Candidate("inline", 3), Candidate("inline", 3, min_envs=2), Candidate("inline", 3, in_workers=True)],
    ids=["step", "recv", "rollout"],
)
def test_a_rate_counts_the_steps_of_the_envs_and_no_resets(candidate, monkeypatch):
    monkeypatch.setattr(measure, "_rate", lambda run, _: sum(run() for _ in range(20)))
    actions = Actions.sample(EchoWithSpace, "EchoWithSpace", 3)
    with ea.VectorEnv([ShortEpisodes] * 3, **candidate.settings) as envs:
        envs.set_policy(actions.make_policy)
        envs.reset(seed=0)
        counted = candidate.measure(envs, actions, 0.0)
        made = sum(envs.get_attr("made"))
    # Ended episodes are subtracted before the steps that reset their envs, and some results come after the measurement.
    assert made - 2 * 3 <= counted <= made


def test_envs_that_wait_are_run_side_by_side():
    tuning = ea.tune(Sleeper, 4, seconds=4.0)
    assert tuning.best.backend != "inline"
    assert tuning.best.envs_per_actor == 1 or tuning.best.backend == "thread"
    rates = {result.candidate: result.rate for result in tuning.results}
    assert rates[Candidate("process", 1)] > 2 * rates[Candidate("inline", 4)]
    assert tuning.line in str(tuning).splitlines()
    assert "Sleeper" in tuning.line
    with ea.VectorEnv([Sleeper] * 4, **tuning.settings) as envs:
        envs.reset()


def test_tune_respects_its_time_limit_and_reports_progress():
    told, begun = [], time.monotonic()
    Tuner(EchoWithSpace, 2, 2.0, lambda what, share: told.append((what, share))).run()
    assert time.monotonic() - begun < promised(8)
    assert all(0 <= share <= 1 for _, share in told)
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert {"plain loop", "starting in-process", "in-process", "2 processes"} <= {what for what, _ in told}


class EchoWithSpace(EchoEnv):
    action_space = Discrete()


class ShortEpisodes(EchoWithSpace):
    """Counts its steps."""

    def __init__(self):
        super().__init__(episode_length=2)
        self.made = 0

    def step(self, action):
        self.made += 1
        return super().step(action)


class Elsewhere(EchoWithSpace):
    """Steps in processes only."""

    def step(self, action):
        from envactors.worker import context

        if context.of_process is None:
            raise ValueError("not in the caller's process")
        return super().step(action)


def test_tune_reports_a_setting_that_fails_and_tries_the_others():
    tuning = ea.tune(Elsewhere, 2, seconds=0.1)
    failed = {result.candidate.backend for result in tuning.results if result.failure is not None}
    assert failed == {"inline", "thread"}
    assert tuning.best.backend == "process"
    assert re.search(r"^plain loop, no envactors +failed$", str(tuning), flags=re.MULTILINE)


class Hopeless(EchoWithSpace):
    def step(self, action):
        raise ValueError("never")


def test_an_env_that_fails_everywhere_raises_its_error():
    with pytest.raises(ea.VectorStepError, match="never"):
        ea.tune(Hopeless, 2, seconds=1.0)


@pytest.mark.parametrize(
    ("num_envs", "seconds", "error"),
    [
        (0, 1.0, "num_envs is 0"),
        (2, 0.0, "seconds > 0"),
        (2, -1.0, "seconds >= 0$"),
        (2, float("inf"), "seconds > 0"),
        ("2", 1.0, "num_envs is '2'"),
    ],
)
def test_tune_rejects_invalid_arguments(num_envs, seconds, error):
    with pytest.raises(ValueError, match=error):
        ea.tune(EchoWithSpace, num_envs, seconds=seconds)


def test_the_lines_name_a_factory_as_it_was_given(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for factory, name in (
        ("test_tuning:EchoWithSpace", "'test_tuning:EchoWithSpace'"),
        (EchoWithSpace, "EchoWithSpace"),
    ):
        tuning = ea.tune(factory, 1, seconds=0.1)
        assert tuning.line.startswith(f"envs = ea.VectorEnv([{name}] * 1")


class Mute(EchoEnv):
    action_space = None


def test_an_env_without_an_action_space_is_rejected_by_name():
    with pytest.raises(ValueError, match="Mute makes a Mute without an action_space to sample from"):
        ea.tune(Mute, 2, seconds=1.0)


def test_the_command(capfd, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # restores the path, to which the command adds
    assert main(["tune", "test_tuning:EchoWithSpace", "--num-envs", "2", "--seconds", "0.1"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["steps/s", "of", "best", "start", "(s)"]
    assert lines[1].startswith("plain loop, no envactors ")
    assert "In a plain loop, a step takes " in out
    assert "envs = ea.VectorEnv(['test_tuning:EchoWithSpace'] * 2" in out


def test_the_lines_of_the_command_can_be_pasted(capfd):
    pytest.importorskip("gymnasium")
    assert main(["tune", "CartPole-v1", "--num-envs", "2", "--seconds", "0.1"]) == 0
    code = capfd.readouterr().out.partition("import gymnasium")
    vector, drop_in = "".join(code[1:]).split("# Or,")
    for pasted in (vector, "# Or," + drop_in):
        names = {}
        exec(pasted, names)
        with contextlib.closing(names["envs"]) as envs:
            assert envs.num_envs == 2
            envs.reset(seed=0)
    assert type(envs).__name__ == "ActorVectorEnv"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["no_such_module:make"], "no_such_module"),
        (["test_tuning:Hopeless", "--num-envs", "1", "--seconds", "0.5"], "never"),
        (["sys:exit"], "SystemExit"),
        (["builtins:dict"], "builtins:dict makes a dict without an action_space"),
    ],
    ids=["no module", "no step", "exits", "no actions"],
)
def test_the_command_says_what_is_wrong(arguments, error, capfd, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # restores the path, to which the command adds
    assert main(["tune", *arguments]) == 1
    printed = capfd.readouterr()
    assert error in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--num-envs", "0"], "0 is less than 1"),
        (["--seconds", "nan"], "nan is not a positive number of seconds"),
        (["--json", "/nowhere/figures.json"], "/nowhere/figures.json cannot be written"),
        (["--json", "/tmp"], "/tmp cannot be written"),
    ],
    ids=" ".join,
)
def test_the_command_refuses_arguments_before_anything_starts(arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "envactors.testing:EchoEnv", *arguments])
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("rich", "envactors tune needs rich: pip install 'envactors[cli]'\n"),
        ("gymnasium", "envactors tune: CartPole-v1 is made by gymnasium: pip install 'envactors[gymnasium]'"),
    ],
)
def test_the_command_names_missing_extras(missing, error, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["tune", "CartPole-v1"]) == 2
    assert capsys.readouterr().err.startswith(error)


def test_names_that_gymnasium_makes_and_factories():
    assert [EnvSource(name).is_factory for name in ("CartPole-v1", "ale_py:ALE/Pong-v5", "own:make", "a.b:c.d")] == [
        False, False, True, True,
    ]  # fmt: skip
