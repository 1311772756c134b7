"""Rows on their way between two slabs: whatever is asked and answered, the copies are equal."""

from __future__ import annotations

import mmap

import numpy as np
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.mailbox.info_codec import PLAIN, Infos
from envactors.mailbox.slab import BUFFER, INLINE_INFO_ROOM, RESET, SEED, Layout, Slab
from envactors.mailbox.specs import ArraySpec
from envactors.remote.rows import MirroredRows

ENVS = 6
OBSERVATION = {"image": ArraySpec((3, 2), np.dtype(np.uint8)), "state": ArraySpec((5,), np.dtype(np.float32))}
LAYOUT = Layout(OBSERVATION, ArraySpec((2,), np.dtype(np.float64)), ArraySpec((), np.dtype(np.float64)), ENVS)
INFOS = st.sampled_from([{}, {"x": np.float32(1.5)}, {"text": "a" * 100}, {"text": "b" * (INLINE_INFO_ROOM - 200)}])
some_rows = st.lists(st.integers(0, ENVS - 1), min_size=1, max_size=ENVS, unique=True)


def make_slab():
    return Slab(LAYOUT, mmap.mmap(-1, LAYOUT.size))


def with_buffers(slab):
    return [slab.checksums, slab.terminated, slab.truncated, slab.rewards, *slab.observations]


def contents(slab, rows):
    buffers = slab.ops[rows] & BUFFER
    columns = [array[buffers, rows] for array in with_buffers(slab)]
    infos = Infos(slab)
    return [slab.written_ids[rows], *columns], [infos.decode(row, None) for row in rows]


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(some_rows, st.lists(INFOS, min_size=ENVS, max_size=ENVS)), min_size=1, max_size=6), st.randoms()
)
def test_requests_and_results_are_those_of_the_other_side(turns, random):
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    writer = Infos(node)
    rng = np.random.default_rng(random.randrange(1 << 32))
    for number, (rows, infos) in enumerate(turns, 1):
        caller.posted_ids[rows] = number
        caller.ops[rows] = rng.choice([0, BUFFER, RESET, RESET | SEED | BUFFER], len(rows))
        caller.seeds[rows] = rng.integers(0, 1 << 64, len(rows), np.uint64)
        caller.actions[0][rows] = rng.random((len(rows), 2))
        assert far.apply_requests(near.pack_requests(rows)) == rows
        for ours, theirs in (
            (caller.posted_ids, node.posted_ids),
            (caller.ops, node.ops),
            (caller.seeds, node.seeds),
            (caller.actions[0], node.actions[0]),
        ):
            np.testing.assert_array_equal(ours[rows], theirs[rows])
        assert far.complete(rows) == []
        for row in rows:  # as a worker does
            buffer = node.ops[row] & BUFFER
            for array in with_buffers(node):
                array[buffer, row] = rng.integers(0, 200, array.shape[2:]) % (2 if array.dtype == bool else 200)
            if infos[row]:
                assert writer.put(row, writer.pack(infos[row], [])) is None
            else:
                writer.encodings[row] = PLAIN
            node.written_ids[row] = node.posted_ids[row]
        assert far.complete(rows) == rows
        untouched = [row for row in range(ENVS) if row not in rows]
        before = contents(caller, untouched)
        near.apply_results(far.pack_results(rows))
        np.testing.assert_equal(contents(caller, rows), contents(node, rows))
        np.testing.assert_equal(contents(caller, untouched), before)
        assert (caller.written_ids[rows] == number).all()


def test_results_leave_the_other_buffer_untouched():
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    for array in with_buffers(caller):
        array[:] = 7
    caller.posted_ids[:3] = 1
    caller.ops[:3] = BUFFER, 0, BUFFER
    far.apply_requests(near.pack_requests([0, 1, 2]))
    node.written_ids[:3] = 1
    near.apply_results(far.pack_results([0, 1, 2]))
    for array in with_buffers(caller):
        for row, buffer in enumerate([1, 0, 1]):
            assert (array[buffer, row] == 0).all()
            assert (array[1 - buffer, row] == array.dtype.type(7)).all()


def test_a_result_that_the_caller_never_had_does_not_answer_the_next_request():
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    caller.posted_ids[:] = 1
    far.apply_requests(near.pack_requests([0, 1]))
    node.written_ids[:2] = 1
    # The worker is lost before its results are sent, and the next one is asked.
    caller.written_ids[:] = 1
    caller.posted_ids[:] = 2
    assert far.apply_requests(near.pack_requests([0, 1])) == [0, 1]
    assert far.complete([0, 1]) == []


def test_the_requests_of_an_ended_worker_are_not_posted_any_more():
    caller, node = make_slab(), make_slab()
    near, far = MirroredRows(caller), MirroredRows(node)
    caller.posted_ids[:] = 1
    far.apply_requests(near.pack_requests([0, 1, 2]))
    node.written_ids[1] = 1
    far.take_back([0, 2])
    assert (node.posted_ids == node.written_ids).all()
