"""Testing kit: envs that fail on command, an echo env that exposes any wrong result, and conformance suites.

Nothing here needs Gymnasium; the suites are classes of plain ``test_`` methods for pytest to collect from your own
subclasses.
"""

from __future__ import annotations

from envactors.testing.conformance import BackendConformance, EnvConformance
from envactors.testing.envs import FAULTS, EchoEnv, FaultyEnv, Space, expected_checksum

__all__ = [
    "FAULTS",
    "BackendConformance",
    "EchoEnv",
    "EnvConformance",
    "FaultyEnv",
    "Space",
    "expected_checksum",
]
