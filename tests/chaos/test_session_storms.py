"""The session workload passes, and it finds planted defects."""

from __future__ import annotations

import pytest

from chaos.__main__ import main
from chaos.sessions import SessionStorm


@pytest.mark.parametrize("nodes", [0, 2])
def test_sessions_under_faults_each_end_once_with_the_right_kind(nodes, helper_processes):
    report = SessionStorm(40, seed=3, size=6, nodes=nodes).run()
    assert report.wrong == []
    assert report.outcomes.total() == 40
    assert 0 < report.outcomes["completed"] < 40


def test_state_that_leaks_into_the_next_session_is_found(helper_processes, monkeypatch):
    monkeypatch.setattr("chaos.sessions._SHARES", {})
    monkeypatch.setattr("envactors.actor.handle.ActorHandle.renew", lambda actor: actor.echo(None))
    report = SessionStorm(20, size=2).run()
    assert any("has seen the state of" in text for text in report.wrong)


def test_the_command_prints_the_outcomes(helper_processes, capsys):
    assert main(["--sessions", "20", "--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "20 sessions, 0 wrong"
