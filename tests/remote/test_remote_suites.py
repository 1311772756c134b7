"""The tests of other modules once more, with actors on two nodes; the long run has all of them."""

from __future__ import annotations

import functools

import pytest
import test_evaluation
import test_packed
import test_renewal
import test_replay
import test_rollouts
import test_standbys
from conformance import BackendConformance
from nodes import preloading_backend, standing

import envactors as ea
from envactors import backends
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv

SUITES = [test_evaluation, test_packed, test_renewal, test_replay, test_rollouts, test_standbys]
# What everybody runs.
CHOSEN = {
    *(
        "test_a_crash_in_a_step_is_reported_within_a_second",
        "test_exceptions_and_unpicklable_values_fail_only_their_own_call",
    ),
    *("test_a_failure_through_submit", "test_disabled_autoreset_waits_for_a_reset_by_hand"),
    *("test_a_run_with_kills_gives_the_same_trajectories", "test_an_env_that_was_never_seeded_is_renewed"),
    *("test_a_raised_failure_contains_the_steps_before_it", "test_kills_at_any_moment_change_nothing_under_replay"),
    *("test_two_rollouts_may_be_in_flight_and_nothing_else", "test_nested_spaces_and_large_infos"),
    *("test_rewards_are_added_as_a_loop_adds_them",),
    *("test_a_standby_is_brought_to_where_the_env_was_lost", "test_with_raise_a_reset_continues_in_the_standby"),
}
LOCAL = {
    # It is about the order in which a machine's processes start.
    *("test_only_so_many_processes_start_at_a_time", "test_a_start_deadline_does_not_count_while_waiting"),
    *("test_a_start_that_hangs_blocks_others_up_to_its_deadline", "test_the_limit_follows_the_cores_and_is_checked"),
    "test_what_waits_for_its_start_is_closed_killed_and_replaced_at_once",
    # A node's fork server for such variables ends with the last actor of all.
    "test_the_same_env_vars_for_all_are_a_standbys_too",
    # A caller whose workers are on nodes has its rollouts in memory that it shares with nobody.
    "test_rollouts_take_two_buffers_of_shared_memory_and_a_policy_none",
}


def copy(test, marks):
    @functools.wraps(test)
    def again(**arguments):
        test(**arguments)

    again.pytestmark = marks
    return again


def adopt(suite):
    """Makes copies of a module's tests, which have marks of their own."""
    for name, test in vars(suite).items():
        if name.startswith("test_") and callable(test) and name not in LOCAL:
            marks = [suite.pytestmark] if hasattr(suite, "pytestmark") else []
            marks += [*getattr(test, "pytestmark", []), *([] if name in CHOSEN else [pytest.mark.soak])]
            globals()[f"{name}_{suite.__name__.removeprefix('test_')}"] = copy(test, marks)


for suite in SUITES:
    adopt(suite)


@pytest.fixture(scope="module")
def nodes(helper_processes):
    """Nodes that stay."""
    backend = preloading_backend(LocalNodes(2), *[module.__name__ for module in SUITES])
    with standing(backend):
        yield backend


@pytest.fixture(autouse=True)
def on_nodes(nodes, quick_starts, nothing_left_behind, monkeypatch):
    resolve = backends.resolve
    for module in SUITES:
        monkeypatch.setattr(module, "FORK_SERVER", nodes, raising=False)
    monkeypatch.setattr(backends, "resolve", lambda name: nodes if name == "process" else resolve(name))


class TestLocalNodes(BackendConformance):
    @pytest.fixture(autouse=True)
    def use(self, nodes):
        self.backend = nodes

    def make_backend(self):
        return self.backend


def test_these_tests_run_on_nodes():
    with ea.VectorEnv([EchoEnv]) as envs, test_packed.packed(2) as packed:
        envs.reset()
        packed.reset()
        assert None not in [actor.node for actor in (*envs.actors, *packed.actors)]


@pytest.mark.parametrize("autoreset", ["next_step", pytest.param("same_step", marks=pytest.mark.soak)])
@pytest.mark.parametrize("envs_per_actor", [pytest.param(1, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Blackjack-v1"])
def test_equal_seeds_and_actions_give_the_results_of_sync_vector_env(env_id, nodes, envs_per_actor, autoreset):
    parity = pytest.importorskip("test_gymnasium_parity")
    parity.test_equal_seeds_and_actions_give_equal_results(env_id, nodes, envs_per_actor, autoreset)
