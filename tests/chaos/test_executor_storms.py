"""The executor workload passes, and it finds planted defects."""

from __future__ import annotations

import functools

import envactors as ea
from chaos.__main__ import main
from chaos.executor import ExecutorStorm


def test_functions_under_faults_each_end_once_in_their_own_way(helper_processes):
    report = ExecutorStorm(300, seed=1, faults=0.1).run()
    assert report.wrong == []
    assert report.outcomes.total() == 300
    assert 200 < report.outcomes["return"] < 300


def test_a_call_that_runs_twice_is_found(helper_processes, monkeypatch):
    monkeypatch.setattr("chaos.executor.ea.Executor", functools.partial(ea.Executor, retries=1))
    monkeypatch.setattr("chaos.executor._FAULTS", ("exit",))
    report = ExecutorStorm(20, faults=0.5).run()
    assert any("has run" in text for text in report.wrong)


def test_the_command_prints_the_outcomes(helper_processes, capsys):
    assert main(["--calls", "60", "--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "60 calls, 0 wrong"
