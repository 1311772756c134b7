"""Seeds that the parent and the worker derive in the same way."""

from __future__ import annotations

import numpy as np


def renewed_seed(root_seed: int, incarnation: int) -> int:
    """Return the seed of a renewed env's first reset: different for each incarnation, the same in every run."""
    return int(np.random.SeedSequence(root_seed, spawn_key=(incarnation,)).generate_state(1)[0])
