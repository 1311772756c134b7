"""Specs of spaces and values; batching, splitting and refusing against Gymnasium's own batching."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import gymnasium.spaces as gs
import numpy as np
import pytest
from budget import examples
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.mailbox.specs import (
    OBJECT,
    batches_alike,
    conform,
    flatten,
    flattener,
    row_splitter,
    spec_of_space,
    spec_of_value,
    split_batch,
    stack,
)

quick = settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])

# Strategies ----------------------------------------------------------------------------------------------

NUMBERS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
counts = st.integers(1, 4)
seeds = st.integers(0, 2**32 - 1)
keys = st.text("abcxyz_0", min_size=1, max_size=3)

boxes = st.builds(lambda shape, dtype: gs.Box(0, 7, shape, np.dtype(dtype)), shapes, st.sampled_from(NUMBERS))
endless_boxes = st.builds(lambda shape: gs.Box(-np.inf, np.inf, shape, np.float32), shapes)
discretes = st.builds(lambda n, start: gs.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5))
multi_discretes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(gs.MultiDiscrete)
multi_binaries = (st.integers(1, 4) | st.lists(st.integers(1, 3), min_size=2, max_size=2)).map(gs.MultiBinary)
array_spaces = st.one_of(boxes, endless_boxes, discretes, multi_discretes, multi_binaries)
odd_spaces = st.sampled_from(
    [
        gs.Text(5),
        gs.Sequence(gs.Discrete(3)),
        gs.Sequence(gs.Box(0, 1, (2,)), stack=True),
        gs.Graph(gs.Box(0, 1, (2,)), gs.Discrete(3)),
        gs.OneOf([gs.Discrete(3), gs.Box(0, 1, (2,))]),
    ]
)


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(gs.Dict)
            | st.lists(inner, min_size=1, max_size=3).map(gs.Tuple)
        ),
        max_leaves=5,
    )


batchable_spaces = nested(array_spaces)
all_spaces = nested(array_spaces | odd_spaces)


def samples_of(space, count, seed):
    space.seed(seed)
    return [space.sample() for _ in range(count)]


# Walking trees -------------------------------------------------------------------------------------------


def leaves_of(spec, value, path=()):
    """Every leaf of a spec with its value and the way there."""
    if isinstance(spec, ea.ArraySpec):
        yield path, spec, value
        return
    assert len(value) == len(spec)
    for key in spec if isinstance(spec, dict) else range(len(spec)):
        yield from leaves_of(spec[key], value[key], (*path, key))


def replaced(value, path, new):
    """A copy of a tree with another leaf at the end of the path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: replaced(value[key], rest, new)}
    return tuple(replaced(one, rest, new) if k == key else one for k, one in enumerate(value))


def assert_same(spec, got, expected):
    """Two values of one spec: of one structure, equal to the bit and of one dtype; odd ones the same objects."""
    assert isinstance(got, dict) is isinstance(spec, dict)
    for (_, leaf, one), (_, _, other) in zip(leaves_of(spec, got), leaves_of(spec, expected), strict=True):
        if leaf.batchable:
            one, other = np.asarray(one), np.asarray(other)  # noqa: PLW2901 # scalars are arrays here
            assert one.dtype == other.dtype == leaf.dtype
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()
        else:
            assert one is other


# Specs of spaces -----------------------------------------------------------------------------------------


@quick
@given(boxes | endless_boxes)
def test_spec_of_a_box_has_bounds(space):
    spec = spec_of_space(space)
    assert (spec.shape, spec.dtype) == (space.shape, space.dtype)
    assert np.array_equal(spec.low, space.low)
    assert np.array_equal(spec.high, space.high)


@quick
@given(st.one_of(boxes, discretes, multi_discretes), seeds)
def test_samples_are_within_the_bounds(space, seed):
    spec = spec_of_space(space)
    assert spec.shape == space.shape
    for value in samples_of(space, 20, seed):
        assert (spec.low <= value).all()
        assert (value <= spec.high).all()


def test_bounds_of_discrete_spaces():
    discrete = spec_of_space(gs.Discrete(4, start=-2))
    assert (discrete.shape, discrete.dtype, discrete.low, discrete.high) == ((), np.int64, -2, 1)
    multi = spec_of_space(gs.MultiDiscrete([3, 5], start=[1, -1]))
    assert (multi.shape, multi.low.tolist(), multi.high.tolist()) == ((2,), [1, -1], [3, 3])
    binary = spec_of_space(gs.MultiBinary([2, 3]))
    assert (binary.shape, binary.dtype) == ((2, 3), np.int8)


@quick
@given(odd_spaces)
def test_spaces_that_cannot_be_batched_are_objects(space):
    assert spec_of_space(space) == OBJECT
    assert not spec_of_space(space).batchable


def test_nested_spaces_give_nested_specs():
    space = gs.Dict({"b": gs.Tuple([gs.Discrete(2), gs.Text(3)]), "a": gs.Dict({"c": gs.Box(0, 1, (2,))})})
    spec = spec_of_space(space)
    assert spec.keys() == {"a", "b"}
    assert spec["b"] == (spec_of_space(gs.Discrete(2)), OBJECT)
    assert spec["a"]["c"] == spec_of_space(gs.Box(0, 1, (2,)))


def test_space_of_another_library_is_recognized_by_its_attributes():
    other = SimpleNamespace(shape=[2, 3], dtype="float32")
    assert spec_of_space(other) == ea.ArraySpec((2, 3), np.float32)
    named_alike = type("Dict", (), {"spaces": {"a": other}})()
    assert spec_of_space(named_alike) == {"a": ea.ArraySpec((2, 3), np.float32)}
    assert spec_of_space(SimpleNamespace(shape=None, dtype=None)) == OBJECT


def test_spec_of_a_spec_is_the_spec():
    spec = {"a": (ea.ArraySpec((2,), np.float32), OBJECT)}
    assert spec_of_space(spec) is spec
    assert spec_of_space(spec["a"][0]) is spec["a"][0]


@quick
@given(all_spaces)
def test_unpickled_specs_are_equal(space):
    spec = spec_of_space(space)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    for (_, one, _), (_, other, _) in zip(leaves_of(spec, spec), leaves_of(again, again), strict=True):
        assert hash(one) == hash(other)


# Batches -------------------------------------------------------------------------------------------------


@quick
@given(all_spaces, seeds)
def test_a_flattener_returns_the_leaves_of_flatten(space, seed):
    spec, [value] = spec_of_space(space), samples_of(space, 1, seed)
    ours, theirs = flattener(spec)(value), flatten(spec, value)
    assert len(ours) == len(theirs)
    assert all(one is other for one, other in zip(ours, theirs, strict=True))


@quick
@given(batchable_spaces, counts, seeds)
def test_batches_equal_those_of_gymnasium(space, count, seed):
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    batch = stack(spec, values)
    assert_same(spec, batch, concatenate(space, values, create_empty_array(space, count)))
    assert batch in batch_space(space, count)
    rows = split_batch(spec, batch, count, "x")
    for row, expected in zip(rows, iterate(batch_space(space, count), batch), strict=True):
        assert_same(spec, row, expected)


@quick
@given(all_spaces, counts, seeds)
def test_split_batch_returns_what_was_stacked(space, count, seed):
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    rows = split_batch(spec, stack(spec, values), count, "x")
    assert len(rows) == count
    unchecked = row_splitter(spec)(stack(spec, values), count)
    for row, other, value in zip(rows, unchecked, values, strict=True):
        assert_same(spec, row, value)
        assert_same(spec, other, value)


@quick
@given(all_spaces, counts, seeds)
def test_list_of_values_splits_like_its_batch(space, count, seed):
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    for row, value in zip(split_batch(spec, values, count, "x"), values, strict=True):
        assert_same(spec, row, value)


@quick
@given(batchable_spaces, counts, seeds)
def test_stack_copies(space, count, seed):
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    batch = stack(spec, values)
    for value in values:
        for (_, _, one), (_, _, other) in zip(leaves_of(spec, batch), leaves_of(spec, value), strict=True):
            assert not np.shares_memory(one, other)


@quick
@given(batchable_spaces)
def test_empty_batch_has_the_shapes_of_its_spec(space):
    spec = spec_of_space(space)
    for _, leaf, batch in leaves_of(spec, stack(spec, [])):
        assert (batch.shape, batch.dtype) == ((0, *leaf.shape), leaf.dtype)


def test_values_without_a_spec_split_into_one_per_env():
    assert split_batch(None, ["a", {}, None], 3, "actions") == ["a", {}, None]
    assert split_batch(None, np.arange(2), 2, "actions") == [0, 1]


# Conforming ----------------------------------------------------------------------------------------------


@quick
@given(all_spaces, seeds)
def test_conforming_values_are_not_copied(space, seed):
    spec, (value,) = spec_of_space(space), samples_of(space, 1, seed)
    fitting = conform(spec, value, "x")
    assert_same(spec, fitting, value)
    for (_, leaf, one), (_, _, other) in zip(leaves_of(spec, fitting), leaves_of(spec, value), strict=True):
        assert one is other or leaf.shape == (), "numbers are immutable"


@quick
@given(shapes, st.sampled_from(["i1", "i4", "i8", "u1"]), st.sampled_from(["f2", "f4", "f8"]), seeds)
def test_dtypes_are_cast_within_their_kind(shape, given_dtype, spec_dtype, seed):
    value = np.random.default_rng(seed).integers(0, 100, shape).astype(given_dtype)
    cast = conform(ea.ArraySpec(shape, spec_dtype), value, "x")
    assert (cast.dtype, cast.shape) == (np.dtype(spec_dtype), shape)
    assert np.array_equal(cast, value)


def test_byte_orders_are_cast():
    cast = conform(ea.ArraySpec((2,), ">f8"), np.arange(2.0), "x")
    assert (cast.dtype, cast.tolist()) == (np.dtype(">f8"), [0.0, 1.0])


def test_lists_and_numbers_become_arrays():
    assert conform(ea.ArraySpec((), np.int64), 3, "x") == np.array(3)
    as_list = conform(ea.ArraySpec((2,), np.float32), [1, 2.5], "x")
    assert (as_list.dtype, as_list.tolist()) == (np.float32, [1.0, 2.5])
    assert conform((ea.ArraySpec((), np.int64), OBJECT), [1, "text"], "x") == (1, "text")


# Refusals ------------------------------------------------------------------------------------------------


@quick
@given(all_spaces, counts, seeds, st.integers(-1, 2))
def test_wrong_number_of_values_raises(space, count, seed, more):
    expected = count + more + (more >= 0)
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    # A tuple of spaces wants a tuple of batches; a list has one value an env.
    for given_values in (values, stack(spec, values)):
        with pytest.raises(ea.SpaceMismatchError) as caught:
            split_batch(spec, given_values, expected, "actions")
        assert f"{count} actions" in str(caught.value)
        assert f"for {expected} envs" in str(caught.value)


def test_error_names_the_leaf_and_the_number_of_values():
    spec = {"a": (ea.ArraySpec((2,), np.float32),)}
    with pytest.raises(ea.SpaceMismatchError) as caught:
        split_batch(spec, {"a": (np.zeros((4, 2), np.float32),)}, 3, "actions")
    assert str(caught.value) == "4 actions['a'][0] for 3 envs: expected one per env"


@quick
@given(batchable_spaces, counts, seeds, st.data())
def test_wrong_shape_raises(space, count, seed, data):
    """Also one that NumPy would broadcast: nothing is stretched silently."""
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    batch = stack(spec, values)
    path, leaf, array = data.draw(st.sampled_from(list(leaves_of(spec, batch))))
    wrong = [array[..., np.newaxis], np.stack([array] * 2, axis=1)]
    if leaf.shape and leaf.shape[-1] > 1:
        wrong.append(array[..., :1])
    if leaf.shape:
        wrong.append(array[..., 0])
    other = data.draw(st.sampled_from(wrong))
    with pytest.raises(ea.SpaceMismatchError) as caught:
        split_batch(spec, replaced(batch, path, other), count, "actions")
    assert_says(caught, "actions", path, f"shape {other.shape}", f"expected {array.shape}, dtype {leaf.dtype}")

    value = values[0]
    with pytest.raises(ea.SpaceMismatchError) as caught:
        conform(spec, replaced(value, path, other[0]), "the observation")
    assert_says(caught, "the observation", path, f"shape {other.shape[1:]}", f"expected {leaf.shape}")


@quick
@given(batchable_spaces, counts, seeds, st.data())
def test_wrong_kind_of_dtype_raises(space, count, seed, data):
    spec, values = spec_of_space(space), samples_of(space, count, seed)
    batch = stack(spec, values)
    path, leaf, array = data.draw(st.sampled_from(list(leaves_of(spec, batch))))
    worse = ["c16", "U8", "O"] + (["f4", "f8"] if leaf.dtype.kind in "iu" else [])
    other = array.astype(data.draw(st.sampled_from(worse)))
    with pytest.raises(ea.SpaceMismatchError) as caught:
        split_batch(spec, replaced(batch, path, other), count, "actions")
    assert_says(caught, "actions", path, f"dtype {other.dtype}", f"expected {leaf.dtype}")


def refusal_of(function, *args):
    """What was given and what was expected, as the error says it."""
    with pytest.raises(ea.SpaceMismatchError) as caught:
        function(*args)
    given_part, _, expected_part = str(caught.value).partition(": expected ")
    return given_part, expected_part


def test_wrong_structure_raises():
    pair = ea.ArraySpec((2,), np.float32)
    for spec, value, given_text, expected_text in [
        ({"a": OBJECT, "b": OBJECT}, {"a": 1}, "the structure of x is a dict with the keys ['a']", "['a', 'b']"),
        ({"a": OBJECT}, [1], "the structure of x is a list of 1", "['a']"),
        ((OBJECT, OBJECT), (1,), "the structure of x is a tuple of 1", "a tuple of 2"),
        ((OBJECT,), (1, 2), "the structure of x is a tuple of 2", "a tuple of 1"),
        ((OBJECT,), {"a": 1}, "the structure of x is a dict with the keys ['a']", "a tuple of 1"),
        ((OBJECT,), 5, "the structure of x is int", "a tuple of 1"),
        (pair, [[1], [2, 3]], "x cannot be converted to an array", "shape (2,), dtype float32"),
        (pair, None, "x has shape ()", "(2,), dtype float32"),
        (ea.ArraySpec((), np.float32), "seven", "x has dtype <U5", "float32"),
        (ea.ArraySpec((), np.int64), 2**70, "x has dtype object", "int64"),
        (ea.ArraySpec((), np.int64), 0.5, "x has dtype float64", "int64"),
        (ea.ArraySpec((), np.bool_), 1, "x has dtype int64", "bool"),
    ]:
        given_part, expected_part = refusal_of(conform, spec, value, "x")
        assert given_part == given_text
        assert expected_text in expected_part


def test_keys_that_the_spec_lacks_are_dropped_unless_it_must_be_exact():
    spec = {"a": OBJECT, "n": {"b": OBJECT}}
    value = {"extra": 0, "a": 1, "n": {"b": 2, "extra": 3}}
    assert conform(spec, value, "x") == {"a": 1, "n": {"b": 2}}
    with pytest.raises(ea.SpaceMismatchError, match="the keys"):
        conform(spec, {"a": 1, "n": {"b": 2, "extra": 3}}, "x", is_exact=True)


def test_wrong_structure_of_a_batch_raises():
    number = ea.ArraySpec((), np.int64)
    for spec, values, given_text, expected_text in [
        (number, 3, "actions are 3", "2 of shape (), one per env"),
        (number, "01", "actions are '01'", "2 of shape (), one per env"),
        (number, {0: 1, 1: 0}, "actions are {0: 1, 1: 0}", "2 of shape (), one per env"),
        (
            {"a": OBJECT},
            {"b": [1, 2]},
            "the structure of actions is a dict with the keys ['b']",
            "a dict with the keys ['a']",
        ),
        (
            {"a": OBJECT},
            {"a": [1, 2], "b": [1, 2]},
            "the structure of actions is a dict with the keys ['a', 'b']",
            "a dict with the keys ['a']",
        ),
        ((OBJECT, OBJECT), ([1, 2],), "the structure of actions is a tuple of 1", "a tuple of 2"),
        ((OBJECT,), ([1, 2], [3, 4]), "the structure of actions is a tuple of 2", "a tuple of 1"),
        (OBJECT, {"a": 1, "b": 2}, "actions are dict", "a sequence of 2, one per env"),
        (None, "ab", "actions are str", "a sequence of 2, one per env"),
        (None, iter([1, 2]), "actions are list_iterator", "a sequence of 2, one per env"),
        (None, 5, "actions are int", "a sequence of 2, one per env"),
    ]:
        assert refusal_of(split_batch, spec, values, 2, "actions") == (given_text, expected_text)


def assert_says(caught, what, path, *parts):
    """The error names the leaf, what it was and what it should have been."""
    message = str(caught.value)
    assert message.startswith(what + "".join(f"[{key!r}]" for key in path))
    for part in parts:
        assert part in message


# Values without a space ----------------------------------------------------------------------------------


@quick
@given(batchable_spaces, seeds)
def test_spec_of_a_value_equals_that_of_its_space(space, seed):
    (value,) = samples_of(space, 1, seed)
    assert batches_alike(spec_of_value(value), spec_of_space(space))
    assert conform(spec_of_value(value), value, "x") is not None


def test_spec_of_numbers_and_arrays_has_shape_and_dtype():
    for value, shape, dtype in [
        (True, (), bool),
        (3, (), np.int64),
        (2.5, (), np.float64),
        (1j, (), np.complex128),
        (np.float32(1), (), np.float32),
        (np.zeros((2, 0), np.uint8), (2, 0), np.uint8),
    ]:
        assert spec_of_value(value) == ea.ArraySpec(shape, np.dtype(dtype))


def test_spec_of_other_values_is_object():
    for value in ("text", b"bytes", None, [1, 2], {1}, np.array(["text"]), np.array([None]), object()):
        spec = spec_of_value(value)
        assert spec == OBJECT
        assert conform(spec, value, "x") is value
        assert stack(spec, [value, value])[1] is value


def test_spec_of_nested_values_is_nested():
    spec = spec_of_value({"a": (np.zeros(2), 1), "b": {"c": "text"}})
    assert spec == {"a": (ea.ArraySpec((2,), np.float64), ea.ArraySpec((), np.int64)), "b": {"c": OBJECT}}


# Whether specs go into one batch -------------------------------------------------------------------------


@quick
@given(all_spaces, all_spaces)
def test_specs_batch_alike_when_structure_shapes_and_dtypes_agree(one, other):
    def outline(spec):
        return [(path, leaf.shape, leaf.dtype) for path, leaf, _ in leaves_of(spec, spec)]

    ours, theirs = spec_of_space(one), spec_of_space(other)
    assert batches_alike(ours, ours)
    assert batches_alike(ours, theirs) is (sorted(outline(ours), key=str) == sorted(outline(theirs), key=str))


def test_bounds_do_not_matter_for_a_batch():
    wide, narrow = spec_of_space(gs.Discrete(5)), spec_of_space(gs.Discrete(3, start=1))
    assert wide != narrow
    assert batches_alike(wide, narrow)
    assert not batches_alike(wide, spec_of_space(gs.Box(0, 5, (), np.int32)))
    assert not batches_alike((wide,), {"a": wide})
    assert not batches_alike(wide, None)
    assert batches_alike(None, None)


def test_arrays_without_axes_raise_a_readable_error():
    for spec in (None, OBJECT, ea.ArraySpec((), np.int64)):
        with pytest.raises(ea.SpaceMismatchError):
            split_batch(spec, np.array(3), 2, "actions")  # TypeError: len() of unsized object
    with pytest.raises(ea.SpaceMismatchError):
        split_batch(OBJECT, {1, 2}, 2, "actions")  # TypeError: 'set' object is not subscriptable


def test_casts_that_change_values_raise():
    """Same kind, and another number: 300 becomes 44."""
    with pytest.raises(ea.SpaceMismatchError):
        conform(ea.ArraySpec((), np.int8), 300, "the action")
    with pytest.raises(ea.SpaceMismatchError):
        conform(ea.ArraySpec((), np.int64), 2**63, "the action")


def test_a_list_of_small_ints_goes_into_uint8():
    """Python's ints have no dtype: [1, 2, 3] for Box(0, 255, (3,), uint8)."""
    assert conform(ea.ArraySpec((3,), np.uint8), [1, 2, 3], "the action").dtype == np.uint8
