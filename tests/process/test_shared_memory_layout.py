"""The memory that a vector env shares with its workers: its layout, and errors if there is too little."""

from __future__ import annotations

import numpy as np
import pytest
from budget import examples
from gymnasium import spaces
from helpers import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.mailbox.slab import Layout, Slab
from envactors.mailbox.specs import flatten, leaves, spec_of_space, unflatten
from envactors.testing import EchoEnv

nested = st.recursive(
    st.builds(
        lambda shape, dtype: spaces.Box(0, 1, tuple(shape), dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    ),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts)))
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict)
    ),
    max_leaves=5,
)


@given(nested, nested, st.integers(1, 5))
@settings(max_examples=examples(60))
def test_the_arrays_of_a_slab_lie_apart(observation, action, count):
    layout = Layout(spec_of_space(observation), spec_of_space(action), ea.ArraySpec((), np.float64), count)
    memory = bytearray(layout.size)
    slab = Slab(layout, memory)
    arrays = [
        slab.posted_ids,
        slab.written_ids,
        slab.when,
        slab.ops,
        slab.seeds,
        slab.info_encoding,
        slab.terminated,
        slab.truncated,
        slab.rewards,
    ]
    arrays += [*slab.actions, *slab.observations]
    for number, array in enumerate(arrays):
        array[...] = number % 2
    for number, array in enumerate(arrays):
        assert (array == number % 2).all()
        assert array.flags.aligned
    assert [array.shape[2:] for array in slab.observations] == [leaf.shape for leaf in leaves(layout.observation)]


@given(nested)
@settings(max_examples=examples(60))
def test_flattening_keeps_a_value(space):
    spec, value = spec_of_space(space), space.sample()
    again = unflatten(spec, iter(flatten(spec, value)))
    assert frozen(again) == frozen({key: value[key] for key in spec} if isinstance(spec, dict) else value)


def test_too_little_memory_is_an_error_at_construction(run_warm):
    done = run_warm(
        """
        import resource
        import numpy as np
        import envactors as ea
        from envactors.testing import Space

        class Large:
            observation_space, action_space = Space((1000, 1000), np.float64), Space((), np.int64)

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))
        try:
            ea.VectorEnv([Large] * 2)
        except ea.VectorEnvError as error:
            print(error)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bytes of shared memory for 2 envs (" in done.stdout
    assert "use fewer envs" in done.stdout


@pytest.mark.parametrize("option", ["copy", "seed_episodes"])
def test_flags_are_checked(option):
    with pytest.raises(ValueError, match=f"{option} is 'yes': expected True or False"):
        ea.VectorEnv([EchoEnv], **{option: "yes"})
