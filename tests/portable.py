"""Tests of what the portable system cannot do; no others are skipped with ENVACTORS_SYSTEM=portable."""

from __future__ import annotations

import re

# Regular expressions of test ids, and why these tests need Linux.
LINUX_ONLY = {
    r"forkserver|test_helper\.py|test_code_blocks_run\[(start-method|other-packages)": "helpers fork nothing",
    r"test_the_import_of_torch_is_done_once": "no helper imports it",
    r"test_other_python\.py::(TestConf|test_(?!every_backend|the_caller_does_not|factory_strings|code_of_another))": (
        "other interpreters need a helper that forks"
    ),
    r"test_the_line_makes_the_vector\w+\[.*loky": "loky is the default, which the line leaves out",
    r"test_the_soft_limit_is_raised|test_two_hundred_actors_fit": "workers have their caller's limit of open files",
    r"test_sb3\.py.*test_training_through_kills_is": "a start takes longer than the time between its kills",
    r"test_node_helpers\.py": "processes that have left their group are not found",
    r"test_nothing_is_left_of_a_call_whose_grandchild_ignores_sigterm\[steps[1-3]": "nor are they here",
    r"test_left_behind\.py(?!.*keeps_no_descriptors)": "processes that have left their worker's group are not found",
}


def why_not_portable(nodeid: str) -> str | None:
    """Return why a test does not apply to the portable system; None if it does."""
    return next((reason for pattern, reason in LINUX_ONLY.items() if re.search(pattern, nodeid)), None)
