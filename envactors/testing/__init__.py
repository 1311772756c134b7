"""Testing kit: envs that fail on command, an echo env that exposes wrong results, and conformance suites.

Nothing here needs Gymnasium. The suites are classes with ``test_`` methods: subclass them, and pytest runs the tests.
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
