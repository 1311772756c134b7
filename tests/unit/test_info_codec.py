"""What comes with a result besides arrays: encoded by the worker, decoded by the parent, in both of its variants."""

from __future__ import annotations

import enum
import functools
import pickle
import threading
import types

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from envactors.mailbox.info_codec import OVERFLOW, PLAIN, Infos, decode, decode_alike, encode
from envactors.mailbox.messages import Failure, Fault
from envactors.mailbox.pickling import copy_value, pack_failure, unpack_failure
from envactors.mailbox.slab import INLINE_INFO_ROOM, Layout, Slab
from envactors.mailbox.specs import ArraySpec

ENVS = 3
SCALAR = ArraySpec((), np.dtype(np.float64))
quick = settings(max_examples=examples(80))


def make_codec():
    layout = Layout(SCALAR, SCALAR, SCALAR, ENVS)
    memory = bytearray(layout.size)
    slab, other = Slab(layout, memory), Slab(layout, memory)
    return Infos(slab), Infos(other)


def write(infos, index, info, object_leaves=()):
    """Returns the overflow."""
    return infos.put(index, infos.pack(info, list(object_leaves)))


def show(value):
    """A text that is equal for equal values of equal types; not a number is equal to itself."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tolist()}"
    if isinstance(value, dict):
        return f"{type(value)}{[(key, show(content)) for key, content in value.items()]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value)}{[show(content) for content in value]}"
    return f"{type(value)}{value!r}"


arrays = st.builds(
    lambda shape, code: np.arange(int(np.prod(shape))).astype(code).reshape(shape),
    st.sampled_from([(), (2, 3), (0,), (40, 40)]),
    st.sampled_from(["f8", "u1", "?", "U3"]),
)
numbers = st.sampled_from(
    [np.float32(1.1), np.int64(-3), np.uint64(2**64 - 1), np.bool_(True), np.float64("nan"), 2**70, 1, 2.5, False]
)
# The characters that texts have by default: hypothesis takes ten times as long to list those.
text = functools.partial(st.text, st.characters(exclude_categories=["Cs"]))
leaves = st.one_of(numbers, arrays, st.none(), text(max_size=4), st.binary(max_size=6000))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)
infos = st.dictionaries(text(max_size=5), values, max_size=5)
# Per result: which env, what it says, and its object leaves.
results = st.lists(st.tuples(st.integers(0, ENVS - 1), infos, st.lists(values, max_size=2)), max_size=6)


@quick
@given(written=results)
def test_decode_returns_what_was_encoded(written):
    encoder, decoder = make_codec()
    said = {index: ({}, []) for index in range(ENVS)}
    for index, info, object_leaves in written:
        overflow = None
        if info or object_leaves:
            overflow = write(encoder, index, info, object_leaves)
        else:
            encoder.encodings[index] = PLAIN
        assert (decoder.encodings[index] >= OVERFLOW) == (overflow is not None)
        assert not decoder.failed(index)
        said[index] = info, object_leaves
        assert show(decoder.decode(index, overflow)) == show((info, object_leaves))
        assert decoder.all_plain() == all(content == ({}, []) for content in said.values())


def test_marker_makes_an_info_empty():
    encoder, decoder = make_codec()
    write(encoder, 1, {"a": 1})
    assert not decoder.all_plain()
    encoder.encodings[1] = PLAIN
    assert decoder.all_plain()
    assert decoder.decode(1, None) == ({}, [])


def test_each_empty_info_is_a_new_dict():
    _, decoder = make_codec()
    decoder.decode(0, None)[0]["mine"] = 1
    assert decoder.decode(0, None) == ({}, [])


def test_failure_is_decoded_until_the_next_result():
    encoder, decoder = make_codec()
    overflow = encoder.fail(2, pack_failure(KeyError("gone"), Fault.RAISED))
    assert decoder.failed(2)
    assert not decoder.all_plain()
    failure = decoder.failure(overflow)
    assert isinstance(failure, Failure)
    assert repr(unpack_failure(failure)) == "KeyError('gone')"
    encoder.encodings[2] = PLAIN
    assert not decoder.failed(2)


class Loud(Exception):
    """Unpickling it runs code, which must not run under the lock of a vector."""

    def __setstate__(self, state):
        raise AssertionError("it ran")


def test_to_read_a_failure_runs_no_code_of_users():
    """Env code may have overwritten the encoding, so that the info of a result counts as a failure."""
    encoder, decoder = make_codec()
    info = {"error": Loud("x" * INLINE_INFO_ROOM)}
    info["error"].state = 1
    overflow = write(encoder, 1, info)
    assert overflow is not None
    assert decoder.failure(overflow) == (Fault.RESULT, None, "its description cannot be read: UnpicklingError", "")


@pytest.mark.parametrize(("size", "fits"), [(INLINE_INFO_ROOM // 2, True), (INLINE_INFO_ROOM, False)])
def test_infos_larger_than_the_room_overflow(size, fits):
    encoder, decoder = make_codec()
    overflow = write(encoder, 1, {"text": "x" * size})
    assert (overflow is None) == fits
    assert decoder.decode(1, overflow) == ({"text": "x" * size}, [])


def test_encode_raises_for_values_that_do_not_pickle():
    encoder, _ = make_codec()
    with pytest.raises(TypeError, match="pickle"):
        write(encoder, 0, {"lock": threading.Lock()})


@pytest.mark.parametrize(
    "value",
    [
        np.str_("a"),
        np.complex128(1 + 2j),
        np.longdouble(1) / 3,
        np.datetime64("2026-01-01"),
        np.array(["a"]),
        np.array([object]),
        np.arange(3, dtype=">i4"),
        np.ma.array([1.0], mask=[True]),
        np.zeros((2, 3), order="F"),
        np.zeros(5000),
        np.array(1.5),
    ],
    ids=repr,
)
def test_a_value_keeps_its_type_and_layout(value):
    encoder, decoder = make_codec()
    info, _ = decoder.decode(1, write(encoder, 1, {"x": value, "y": np.float64(1)}))
    arrived = info["x"]
    assert repr(arrived) == repr(value)
    assert (type(arrived), arrived.dtype, arrived.shape) == (type(value), value.dtype, value.shape)
    assert arrived.flags.f_contiguous == value.flags.f_contiguous


def test_infos_that_differ_from_the_last_one_are_decoded_as_they_are():
    encoder, decoder = make_codec()
    infos = [{"a": 1, "b": 2.0}, {"a": 2**70, "b": 3.0}, {"a": 4, "b": 5.0}, {"b": 6.0, "a": 7}, {"a": 8.0, "b": 9}]
    for info in [infos[0], *infos, infos[0]]:
        assert write(encoder, 1, info) is None
        assert show(decoder.decode(1, None)) == show((info, []))


def as_rows(contents):
    return np.array([np.frombuffer(content, np.uint8) for content in contents])


@pytest.mark.parametrize(
    "numbers",
    [
        {"": np.float32(0.1), "0": 0.1, "b": np.int64(-3)},
        {"a": True, "b": np.bool_(False), "c": -(2**63), "d": np.uint64(2**64 - 1), "e": np.int8(-5)},
        {"nan": float("nan"), "infinity": np.float64("-inf")},
        {"'": 1.0, '"': True, "\\": 2, "\n{x}": 3.0, "value_0": 4.0},
        {"a": np.arange(3.0), "b": np.float64(2), "c": np.ones((2, 3), np.uint8), "d": np.array([True])},
    ],
    ids=["types", "integers", "floats", "odd keys", "arrays"],
)
def test_infos_without_pickled_values_are_decoded_together_as_one_by_one(numbers):
    ones = {key: np.ones_like(value) if np.ndim(value) else type(value)(1) for key, value in numbers.items()}
    infos = [numbers, ones]
    contents = [encode(info, []) for info in infos]
    assert show(decode_alike(as_rows(contents))) == show([decode(content)[0] for content in contents])
    assert show([decode(content)[0] for content in contents]) == show(infos)


@pytest.mark.parametrize(
    "infos",
    [
        [{"a": 1.0}, {"b": 1.0}],
        [{"a": 1.0}, {"a": np.uint8(1)}],
        [{"a": 1.0, "text": "x"}, {"a": 1.0, "text": "y"}],
        [{"a": 2**64}, {"a": 2**65}],
        [{"a": np.zeros(6)}, {"a": np.zeros((2, 3))}],
        [{"a": np.zeros(6)}, {"a": np.zeros(6, np.int64)}],
        [{"a": np.array(1.0)}, {"a": np.array(2.0)}],
    ],
    ids=["other keys", "other types", "text", "more than 64 bits", "other shapes", "other dtypes", "without axes"],
)
def test_other_infos_are_not_decoded_together(infos):
    contents = [encode(info, []) for info in infos]
    size = max(map(len, contents))
    assert decode_alike(as_rows([content.ljust(size, b"x") for content in contents])) is None
    assert show([decode(content) for content in contents]) == show([(info, []) for info in infos])


class Key(str, enum.Enum):
    LENGTH = "length"


def test_keys_keep_their_types_whatever_the_info_before_had():
    writer, reader = make_codec()
    infos = [{"length": 1.0}, {Key.LENGTH: 1.0}]
    for index, info in enumerate(infos):
        assert write(writer, index, info) is None
    assert [type(key) for index in range(2) for key in reader.decode(index, None)[0]] == [str, Key]


def test_arrays_of_an_info_are_writable_copies():
    encoder, decoder = make_codec()
    write(encoder, 1, {"x": np.arange(3)})
    decoder.decode(1, None)[0]["x"][:] = 7
    assert decoder.decode(1, None)[0]["x"].tolist() == [0, 1, 2]


def test_arrays_of_infos_that_are_decoded_together_are_writable_and_share_no_memory():
    rows = as_rows([encode({"x": np.arange(3)}, [])] * 2)
    first, second = (info["x"] for info in decode_alike(rows))
    first[:] = 7
    assert second.tolist() == [0, 1, 2]


# Copies --------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, content):
        self.content = content


def test_copy_raises_for_values_that_cannot_be_copied():
    with pytest.raises(TypeError, match="pickle"):
        copy_value({"lock": threading.Lock()})


def test_what_only_cloudpickle_can_copy_is_copied():
    value = {"module": threading, "keys": {"a": 1}.keys(), "proxy": types.MappingProxyType({"a": [1]})}
    copied = copy_value(value)
    assert copied["module"] is threading
    assert list(copied["keys"]) == ["a"]
    assert copied["proxy"] == value["proxy"]
    assert copied["proxy"]["a"] is not value["proxy"]["a"]


def test_copies_share_no_mutable_objects():
    value = {
        "list": [1, [2]],
        "array": np.arange(3),
        "set": {1},
        "bytes": bytearray(b"ab"),
        "tuple": ([1], 2),
        "object": Holder([1]),
        "objects": np.array([[1], None], object),
    }
    copied = copy_value(value)
    value["list"][1].append(3)
    value["array"][0] = 9
    value["set"].add(2)
    value["bytes"] += b"c"
    value["tuple"][0].append(2)
    value["object"].content.append(2)
    value["objects"][0].append(2)
    assert copied["list"] == [1, [2]]
    assert copied["array"].tolist() == [0, 1, 2]
    assert (copied["set"], copied["bytes"], copied["tuple"]) == ({1}, b"ab", ([1], 2))
    assert copied["object"].content == [1]
    assert copied["objects"].tolist() == [[1], None]


def test_immutable_values_are_not_copied():
    for value in (None, "text", b"bytes", 10**30, 1.5, np.float32(2), len):
        assert copy_value(value) is value


def test_copy_of_a_value_that_contains_itself_contains_itself():
    value = [1]
    value.append(value)
    copied = copy_value(value)
    assert copied is not value
    assert copied[1][1][1] is copied[1]


@quick
@given(values)
def test_copy_is_equal_and_has_the_same_types(value):
    assert show(copy_value(value)) == show(value) == show(pickle.loads(pickle.dumps(value)))
