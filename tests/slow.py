"""Which variants of tests are slow, and which cheaper ones stay that fail for the same reasons.

`pytest -m slow` runs them, as `.ci/full` does.
"""

from __future__ import annotations

import re

# Regular expressions of test ids, and what stays.
SLOW = {
    r"test_backends\.py::TestLoky::(?!test_calls_run_in_order|test_crashes|test_a_factory_by_name)": "three with loky",
    r"test_the_number_of_threads_is_each_actors_own\[numbers1-": "numbers0",
    r"test_promises\.py::test_close_may_come_from_anywhere\[(__del__|atexit after|twice)\]": "three others",
    r"test_system\.py::test_workers_end_with_a_caller_that_is_killed\[a loop in Python\]": "a loop in C, nothing",
    r"test_other_python\.py::TestConformance::(?!test_(calls_run|deaths|a_fac|a_rollout))": "four",
    r"test_(promises|left_behind)\.py::\w+\[loky\]": "forkserver; test_backends.py and test_scripts.py have loky",
    r"test_scripts\.py::test_ctrl_c_gives\w+\[loky\]": "forkserver",
    r"test_backends\.py::test_(workers_have|an_actors|a_worker_has)\w+\[(MT19937-)?loky\]": "forkserver",
    r"test_two_hundred_actors_fit_where_the_usual_limit": "test_the_soft_limit_is_raised_when_it_is_needed",
    # Hangs in C: the tests of deadlines have them, with every start method.
    r"test_(renewal|standbys)\.py::.*hang_in_c(\]|-\w+_step\])": "a kill, an exit, an exception",
    # Starting afresh: what is the same for all start methods is tested with forked workers, and once with loky.
    r"test_output\.py::test_every_line_comes\w+\[loky\]": "forkserver",
    r"test_scripts\.py::test_workers_have_no_terminal\w+\[loky\]": "forkserver",
    r"test_backends\.py::test_(a_crash_is_noticed|the_number_of_threads)\w+\[(numbers0-)?loky\]": "forkserver",
    # Modes of autoreset crossed with other choices: each mode and each choice stays.
    r"test_episode_seeds\.py::test_a_long_run_with_kills\w+\[1-(same_step|disabled)\]": "the others",
    r"test_episode_seeds\.py::test_recycled_envs_and_standbys\w+\[(0-same|1-next)_step\]": "the others",
    r"test_episode_seeds\.py::test_a_renewed_env_continues\w+\[(1-same_step|2-(next_step|disabled))\]": "the others",
    r"test_episode_seeds\.py::test_one_fault_does\w+\[.*(next_step-raise|same_step-exit)": "the others",
    r"test_(replay|remote_suites)\.py::test_a_run_with_kills_gives\w+\[(next_step-1|same_step-2|disabled-1)": "others",
    r"test_running\.py::test_no_more_\w+_crash\[(raise-.*-1|renew-(next_step|.*-2)|replay-(same_step|.*-2))": "others",
    r"test_running\.py::test_no_more_\w+_any_method\[(?!shared|in-process|packed-).*same_step\]": "next_step",
    r"test_recycling\.py::test_after_so_many\w+\[(next_step-renew|same_step-replay|disabled-raise)": "the others",
    r"test_standbys\.py::test_the_results_are_those\w+\[.*(1-same|4-next)_step\]": "the others",
    r"test_shared_memory_steps\.py::test_results_are_the_same\w+\[(nested|partly text)-same_step\]": "next_step",
    r"test_gymnasium_parity\.py::test_equal_seeds\w+\[.*-(thread|inline)-3-": "one env an actor; three in processes",
    r"test_gymnasium_parity\.py::test_equal_seeds\w+\[(?!CartPole).*-(thread|inline)-1-same_step": "next_step",
    r"test_shared_memory_faults\.py::test_a_step_counts_whose\w+\[.*killed-": "killed from outside",
    r"test_ding\.py::.*\[(killed|raised|sleep|sleep in C)-SyncActorEnvManager\]": "AsyncActorEnvManager; a hang",
    r"test_a_long_run_with_kills_is_the_undisturbed_one.*\[2-(disabled|next_step)\]": "one env each",
    r"test_a_replay_makes_the_steps_of_the_present_episode.*(next_step|disabled)\]": "same_step",
    r"test_other_machines_give_the_same_trajectories\[(same_step|disabled)\]": "next_step",
    r"test_an_episode_that_could_not_begin.*(renew|disabled)": "raise, with the other modes",
    r"test_crashed_envs_are_restored_from_their_last_snapshot\[options[12]\]": "the plain one",
    r"test_the_steps_after_a_snapshot_come_again\[(raise-options[12]|replay-options[02])\]": "the other of each pair",
    # Tests that run programs.
    r"test_docs\.py::test_code_blocks_run_alone\[(?!chaos)": "all pages in one process",
    r"test_chaos\.py::test_a_run_with_all_kinds_of_fault\[2\]": "one env an actor",
    r"test_chaos\.py::test_a_run_with_rollouts\[replay-1\]": "renew-2; test_rollouts.py has each fault with replay",
    r"test_chaos\.py::test_ctrl_c_ends_the_command": "test_scripts.py has Ctrl-C",
    r"test_tuning\.py::test_(envs_that_wait|tune_respects)": "test_the_command",
    r"test_chaos\.py::test_faults_do_not_change_a_run_with_replay\[CartPole\]": "echo",
    r"test_chaos\.py::test_a_run_over_a_users_env": "test_an_env_of_ones_own_by_name",
    r"test_notebooks\.py::test_the_workers_end_with_the_kernel\[immediate\]": "graceful",
    r"test_other_python\.py::test_nodes_run_workers_in_another_interpreter": "in processes of this machine",
    r"test_(alf|ding)\.py::test_any_backend": "backends have the same conformance suite",
    r"test_ding\.py::.*\[(loky-loky|(fork|spawn)-\w+)\]": "forkserver",
    r"test_gymnasium_dropin\.py::test_a_policy_learns_the_same": "test_a_lost_node_is_replayed compares the steps",
    # Faults of a network: one of each kind.
    r"test_a_fault_is_a_lost_node_and_two_processes.*\[cut there\]": "cut back",
    r"test_a_fault_is_a_lost_node_and_two_processes.*\[stopped\]": "test_remote.py has a stopped agent; cut back",
    r"test_envs_on_nodes_step_like_local_ones\[(disabled|next_step)\]": "same_step",
    r"test_a_drained_node_is_left_at_the_end_of_episodes\[2\]": "one env an actor",
    r"test_a_short_cut_loses_nothing\[back\]": "there",
    r"test_running\.py::test_workers_on_other_nodes|test_pettingzoo\.py::test_on_other_nodes": "test_remote.py",
    r"test_node_errors\.py::.*\[1\]": "without retries",
    r"test_slow_links\.py::.*4 MB-(there-tls|back-plain)": "the other way with each",
    r"test_logging\.py::.*\[loky\]": "forkserver, node",
    r"test_rollouts\.py::test_with_renew_a_failure\w+\[(1-same|3-next)_step-": "the others",
    r"test_remote_suites\.py::test_kills_at_any_moment\w+_rollouts\[1\]": "four an actor; one each in processes",
    r"test_remote_suites\.py::test_a_raised_failure_contains\w+_rollouts\[(1-raise|3-die|3-hang)\]": "the others",
    r"test_remote_vectors\.py::test_a_step_on_a_lost_node_(raises|is_truncated\w+)\[1\]": "the other",
    r"test_remote_vectors\.py::test_a_step_on_a_lost_node_is_replayed\[0\]": "the other",
    r"test_sessions\.py::test_a_run_yields\w+\[(run coroutines|arun)\]": "the others",
    r"test_slow_results\.py::test_a_(result|submitted_step)\w+_no_deadline\[(slow_error|8)\]": "slow, 7",
    r"test_promises\.py::test_close_may_come_from_anywhere\[never\]": "atexit before, global __del__",
    r"test_rollouts\.py::test_kills_at_any_moment_change_nothing\w+\[4\]": "one env an actor; two in rollout spaces",
    r"test_lost_helper\.py::test_nothing_survives_a_caller\w+\[loky-stopped\]": "replaced",
    r"test_remote_vectors\.py::test_a_reset_that_may_have_begun\w+\[1\]": "the other",
    r"test_node_errors\.py::test_an_agent_without_memory_for_a_payload\w+\[there\]": "back",
    r"test_remote_network\.py::test_corrupted_bytes\w+\[repeated\]": "garbled back",
    r"test_sigpipe\.py::\w+\[closed\]": "killed, monitor",
    r"test_rollouts\.py::test_the_first_two_rollouts_in_flight\w+\[True\]": "False",
    r"test_evaluation\.py::test_a_failed_episode_is_repeated\w+\[3-(raise|renew)-": "one env an actor; replay",
    r"test_rollouts\.py::test_with_replay_a_failure\w+\[(3-next|1-same)_step-": "each with the other mode",
    r"test_rollouts\.py::test_a_rollout_is_the_loop_of_steps\[.*(replay|seed_ep|thread).*same_step\]": "next_step",
    r"test_gymnasium_parity\.py::test_equal_seeds\w+\[(?!Cart).*-process-(3-next|1-same)_step": "the other mode",
}


_ANY = re.compile("|".join(SLOW))


def is_slow(nodeid: str) -> bool:
    """Return whether a cheaper variant of a test stays."""
    return _ANY.search(nodeid) is not None
