"""Rows on their way between two slabs: whatever is asked and answered, the copies are equal."""

from __future__ import annotations

import mmap

import numpy as np
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.arrays.slab import INLINE_INFO_ROOM, Layout, Slab
from envactors.arrays.specs import ArraySpec
from envactors.remote.rows import MirroredRows
from envactors.wire.info_codec import InfoReader, InfoWriter

ENVS = 6
OBSERVATION = {"image": ArraySpec((3, 2), np.dtype(np.uint8)), "state": ArraySpec((5,), np.dtype(np.float32))}
LAYOUT = Layout(OBSERVATION, ArraySpec((2,), np.dtype(np.float64)), ArraySpec((), np.dtype(np.float64)), ENVS)
INFOS = st.sampled_from([{}, {"x": np.float32(1.5)}, {"text": "a" * 100}, {"text": "b" * (INLINE_INFO_ROOM - 200)}])
some_rows = st.lists(st.integers(0, ENVS - 1), min_size=1, max_size=ENVS, unique=True)


def make_slab():
    return Slab(LAYOUT, mmap.mmap(-1, LAYOUT.size))


def contents(slab, rows):
    halves = slab.completed[rows] & 1
    arrays = [slab.completed, slab.terminated, slab.truncated, slab.rewards]
    observations = [array[halves, rows] for array in (slab.checks, *slab.observations)]
    infos = InfoReader(slab)
    return [array[rows] for array in arrays] + observations, [infos.decode(row, None) for row in rows]


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(some_rows, st.lists(INFOS, min_size=ENVS, max_size=ENVS)), min_size=1, max_size=6), st.randoms()
)
def test_requests_and_results_are_those_of_the_other_side(turns, random):
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    writer = InfoWriter(node)
    rng = np.random.default_rng(random.randrange(1 << 32))
    for rows, infos in turns:
        caller.requested[rows] += 1
        caller.ops[rows] = rng.integers(0, 2, len(rows))
        caller.actions[0][rows] = rng.random((len(rows), 2))
        assert far.apply_requests(near.pack_requests(rows)) == rows
        for ours, theirs in (
            (caller.requested, node.requested),
            (caller.ops, node.ops),
            (caller.actions[0], node.actions[0]),
        ):
            np.testing.assert_array_equal(ours[rows], theirs[rows])
        assert (node.completed[rows] == node.requested[rows] - 1).all()
        for row in rows:  # as a worker does
            half = int(node.requested[row]) & 1
            for array in (node.checks, *node.observations):
                array[half, row] = rng.integers(0, 200, array.shape[2:])
            node.rewards[row], node.terminated[row], node.truncated[row] = rng.random(3) > 0.5
            if infos[row]:
                assert writer.encode(row, infos[row], []) is None
            else:
                writer.plain_marker(row)()
            node.completed[row] = node.requested[row]
        untouched = [row for row in range(ENVS) if row not in rows]
        before = contents(caller, untouched)
        near.apply_results(far.pack_results(rows))
        np.testing.assert_equal(contents(caller, rows), contents(node, rows))
        np.testing.assert_equal(contents(caller, untouched), before)
        assert (caller.completed[rows] == caller.requested[rows]).all()


def test_a_result_that_the_caller_never_had_does_not_answer_the_next_request():
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    caller.requested[:] = 1
    far.apply_requests(near.pack_requests([0, 1]))
    node.completed[:2] = 1
    # The worker is lost, the caller takes its requests back and asks another one.
    assert far.apply_requests(near.pack_requests([0, 1])) == [0, 1]
    assert node.completed[:2].tolist() == [0, 0]
