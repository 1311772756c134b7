"""What the stand-in for other platforms cannot do: the only tests that are skipped with ENVACTORS_SYSTEM=portable."""

from __future__ import annotations

import re

# Regular expressions of test ids, and why these tests are for Linux alone.
LINUX_ONLY = {
    r"forkserver|test_fork_server\.py|test_code_blocks_run\[start-method": "there are no fork servers",
    r"test_the_import_of_torch_is_done_once": "there are no fork servers, which would import it",
    r"test_a_caller_whose_own_layout_is_fixed": "memory layouts stay as they are",
    r"test_left_behind\.py(?!.*holds_no_descriptors)": "processes that have left their worker's group are not found",
}


def why_not_portable(nodeid: str) -> str | None:
    """Return why a test does not apply under the stand-in; None if it does."""
    return next((reason for pattern, reason in LINUX_ONLY.items() if re.search(pattern, nodeid)), None)
