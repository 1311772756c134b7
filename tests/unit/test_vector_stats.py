"""The line that says where the time of a vector env goes."""

from __future__ import annotations

import pytest

from envactors.mailbox.durations import Durations
from envactors.vector_stats import VectorStats


def stats_of(totals, envs_per_process, resets=(0.0, 0.0, 0.0)):
    """Statistics of three envs whose caller has waited for 6 s and done other things for 2 s."""
    return VectorStats(
        steps=[5, 5, 5],
        episodes=[0, 1, 2],
        actors=[],
        batches=5,
        wait_seconds=6.0,
        caller_seconds=2.0,
        step_seconds=[Durations(5, total, p99=total / 4) for total in totals],
        reset_seconds=[Durations(1, total) for total in resets],
        _envs_per_process=envs_per_process,
    )


@pytest.mark.parametrize(
    ("envs_per_process", "resets", "shares"),
    [
        ([1, 1, 1], (0.0, 0.0, 0.0), "envs 50 %, caller 25 %, envactors 25 %"),
        ([2, 1], (0.0, 0.0, 0.0), "envs 62 %, caller 25 %, envactors 12 %"),
        ([1, 1, 1], (3.5, 0.0, 0.0), "envs 56 %, caller 25 %, envactors 19 %"),
        ([3], (2.0, 2.0, 2.0), "envs 75 %, caller 25 %, envactors 0 %"),
    ],
    ids=["one by one", "in turns", "with resets", "measured longer than waited"],
)
def test_the_caller_waits_for_the_busiest_actor(envs_per_process, resets, shares):
    assert str(stats_of((1.0, 4.0, 2.0), envs_per_process, resets)) == f"{shares}; slowest env 1 (p99 1e+03 ms)"


def test_nothing_was_timed_before_the_first_request():
    assert str(VectorStats([2, 3], [1, 0], [])) == "5 steps, 1 episodes; nothing was timed yet"
