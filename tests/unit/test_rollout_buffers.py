"""Memory of rollouts: results that are not copied, and the generators of policies."""

from __future__ import annotations

import numpy as np
import pytest

from envactors.backends.local import LocalMemory
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec
from envactors.rollout import buffers
from envactors.rollout.buffers import TrajectoryBuffers
from envactors.rollout.context import PolicyContext, StepGenerators, generator_of
from envactors.rollout.trajectory import TrajectoryLayout

OBSERVATION = ArraySpec((3,), np.dtype(np.float32))
ACTION = ArraySpec((), np.dtype(np.int64))


def layout_of(steps):
    return TrajectoryLayout(OBSERVATION, ACTION, PLAIN_REWARD, (), envs=2, steps=steps, is_learnt=False)


@pytest.fixture
def pool():
    return TrajectoryBuffers(LocalMemory())


def test_two_buffers_alternate_if_no_result_is_kept(pool):
    first, second = pool.take(layout_of(4), []), pool.take(layout_of(4), [])
    assert first is not second
    assert [pool.take(layout_of(4), []) for _ in range(4)] == [first, second, first, second]


def test_a_buffer_in_flight_is_not_taken(pool):
    first = pool.take(layout_of(4), [])
    second = pool.take(layout_of(4), [first])
    assert pool.take(layout_of(4), [first, second]) not in (first, second)


def test_a_lent_buffer_is_taken_again_once_its_last_view_is_gone(pool):
    lent, other = pool.take(layout_of(4), []), pool.take(layout_of(4), [])
    view = pool.lend(lent).rewards[1:3]
    assert pool.take(layout_of(4), []) not in (lent, other)
    assert lent.is_lent
    del view
    assert not lent.is_lent
    assert pool.take(layout_of(4), []) is lent


def test_a_view_is_the_array_of_the_trajectory(pool):
    buffer = pool.take(layout_of(4), [])
    array = buffer.trajectory.observations[0][:4]
    (view,) = pool.lend(buffer).observations
    array[...] = np.arange(array.size).reshape(array.shape)
    np.testing.assert_array_equal(view, array)
    assert view.flags.writeable
    view[2, 0, 1] = 77
    assert array[2, 0, 1] == 77


def test_no_more_than_two_results_are_lent(pool):
    kept = [pool.lend(pool.take(layout_of(4), [])) for _ in range(3)]
    assert [loan is None for loan in kept] == [False, False, True]
    del kept[0]
    assert pool.lend(pool.take(layout_of(4), [])) is not None


def test_a_buffer_that_a_forked_child_may_read_is_not_taken(pool, monkeypatch):
    lent, other = pool.take(layout_of(4), []), pool.take(layout_of(4), [])
    pool.lend(lent)
    monkeypatch.setattr(buffers, "_forks", buffers._forks + 1)
    assert not lent.is_lent
    taken = [pool.take(layout_of(4), []) for _ in range(3)]
    assert lent not in taken
    assert other in taken


def test_another_number_of_steps_takes_another_buffer(pool):
    first, second = pool.take(layout_of(4), []), pool.take(layout_of(5), [])
    assert first.trajectory.layout.steps == 4
    assert second.trajectory.layout.steps == 5


# Generators ----------------------------------------------------------------------------------------------


def draws(rng):
    return [*rng.integers(0, 9, size=3, dtype=np.uint32), *rng.random(5), rng.normal()]


def use(generators, step):
    return draws(PolicyContext(None, None, step, generators).rng)


def test_generators_draw_what_the_formula_says():
    generators = StepGenerators(2**100 + 7, 6)
    for rollout in (0, 3):
        generators.rollout = rollout
        for step in (0, 1, 2, 1):
            assert use(generators, step) == draws(generator_of(2**100 + 7, step, rollout, 6))


def test_a_generator_without_references_is_reused():
    generators = StepGenerators(1, 0)
    use(generators, 0)
    first = generators._generator
    use(generators, 1)
    assert generators._generator is not first  # this test keeps it
    second = id(generators._generator)
    use(generators, 2)
    assert id(generators._generator) == second


@pytest.mark.parametrize("part", ["rng", "bit_generator", "context"])
def test_a_generator_that_the_policy_keeps_continues(part):
    generators = StepGenerators(1, 0)
    context = PolicyContext(None, None, 0, generators)
    kept = {"rng": context.rng, "bit_generator": context.rng.bit_generator, "context": context}[part]
    del context
    use(generators, 1)
    rng = {"rng": lambda: kept, "bit_generator": lambda: np.random.Generator(kept), "context": lambda: kept.rng}[part]()
    assert draws(rng) == draws(generator_of(1, 0, 0, 0))
