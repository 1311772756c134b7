"""Old names work, and warn where they are used."""

from __future__ import annotations

import pytest
from helpers import Counter

import envactors as ea


def points_here(warning):
    return warning.filename == __file__


def test_a_timeout_among_options_is_a_deadline_and_warns():
    with ea.spawn(Counter, backend="inline") as actor:
        with pytest.warns(
            DeprecationWarning, match=r"^options\(timeout=2\.5\) .* write options\(deadline=2\.5\)$"
        ) as caught:
            options = actor.options(timeout=2.5, retries=1)
        assert points_here(caught[0])
        assert (options._deadline, options._retries) == (2.5, 1)
