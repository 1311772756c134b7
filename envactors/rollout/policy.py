"""The policy of one actor: the context that it receives besides the observations, and its output.

The output is the actions, or (actions, extras). It is checked here, on every backend, and written to a trajectory.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import ArraySpec, conform, flatten, reader, split_batch
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout

# A generator, or a function that returns the generator of a step.
Rng: TypeAlias = "np.random.Generator | Callable[[int], np.random.Generator]"


class PolicyContext:
    """Describes the step that a policy chooses actions for.

    Args:
        env_ids: Ids of the envs whose observations the policy gets; int64, shape (n,).
        starts: Whether each observation is the first of its episode; bool, shape (n,).
        step: Step within the rollout, from 0.
        rng: Generator, or a function that returns the generator of a step.

    Attributes:
        env_ids: As above.
        starts: As above.
        step: As above.
    """

    __slots__ = ("_rng", "env_ids", "starts", "step")

    def __init__(self, env_ids: npt.NDArray[np.int64], starts: npt.NDArray[np.bool_], step: int, rng: Rng) -> None:
        self.env_ids: npt.NDArray[np.int64] = env_ids
        self.starts: npt.NDArray[np.bool_] = starts
        self.step: int = step
        self._rng = rng

    @property
    def rng(self) -> np.random.Generator:
        """Generator that draws the same numbers whenever this step of this rollout is repeated."""
        if not isinstance(self._rng, np.random.Generator):
            self._rng = self._rng(self.step)
        return self._rng

    def __repr__(self) -> str:
        return f"PolicyContext(env_ids={self.env_ids!r}, starts={self.starts!r}, step={self.step})"


class ActorPolicy:
    """The policy of one actor. To make it and to call its methods runs code of users.

    Args:
        make_policy: Function that makes the policy, pickled.
        seed: Seed of its random numbers.
        indices: Indices of the actor's envs.

    Attributes:
        indices: As above.
        can_load: Whether it can load parameters.
        version: Version of the parameters that it loaded last; 0 for none.
        rollout_index: Index of the current rollout, on which the random numbers depend.
    """

    def __init__(self, make_policy: bytes, seed: int, indices: range) -> None:
        self.indices = indices
        self._policy = pickle.loads(make_policy)()
        if not callable(self._policy):
            raise TypeError(f"make_policy returned a {type(self._policy).__name__}: expected a function (obs, context)")
        self.can_load: bool = hasattr(self._policy, "load")
        self.version: int = 0
        self.rollout_index: int = 0
        self._seed = seed
        self._env_ids = np.arange(indices.start, indices.stop, dtype=np.int64)

    def load(self, version: int, pickled: bytes, arrays: Sequence[bytes | memoryview]) -> None:
        """Have the policy load parameters.

        Args:
            version: Their version.
            pickled: The parameters without the contents of their arrays.
            arrays: These contents, which the policy views, read-only.
        """
        self._policy.load(pickle.loads(pickled, buffers=arrays))
        self.version = version

    def choose(self, step: int, obs: Any, starts: npt.NDArray[np.bool_]) -> Any:
        """Return the output of the policy for one step."""
        return self._policy(obs, PolicyContext(self._env_ids, starts, step, self._generator_of))

    def _generator_of(self, step: int) -> np.random.Generator:
        """Return the generator of one step.

        It takes about 7 us to make, which only steps of policies that use ``context.rng`` pay.
        """
        counter = [0, step, self.rollout_index, self.indices.start]
        return np.random.Generator(np.random.Philox(key=self._seed, counter=counter))


def write_output(trajectory: Trajectory, indices: range, step: int, output: Any) -> TrajectoryLayout | None:
    """Write the actions and extras of one step, or nothing if the trajectory has no room for them.

    Steps without extras get zeros.

    Args:
        trajectory: Trajectory to write to.
        indices: The envs that the policy has acted for.
        step: The step.
        output: Return value of the policy.

    Returns:
        None if everything is written. Otherwise the layout to make room for: then write the same output again.

    Raises:
        SpaceMismatchError: The actions do not conform to the action spec.
        TypeError: The extras are not numbers, or differ from those of an earlier step.
        ValueError: An extra does not have one row per env.
    """
    layout, count, mine = trajectory.layout, len(indices), slice_of(indices)
    actions, extras = _split(layout.action, output, count)
    action = _spec_of_actions(actions, count) if layout.action is None else layout.action
    # The first extras of any actor decide which there are.
    needed = layout._replace(action=action, extras=layout.extras or _specs_of_extras(extras))
    if layout.action is None or needed.extras != layout.extras:
        return needed
    _write_extras(trajectory, step, mine, extras)
    action_of_each = split_batch(action, actions, count, "actions of the policy")
    if isinstance(action, ArraySpec) and action.batchable:
        trajectory.actions[0][step, mine] = action_of_each
        return None
    for index, value in zip(indices, action_of_each, strict=True):
        for array, leaf in zip(trajectory.actions, flatten(action, value), strict=True):
            array[step, index] = leaf
    return None


def _write_extras(trajectory: Trajectory, step: int, mine: slice, extras: dict[str, npt.NDArray[Any]]) -> None:
    """Write the extras of a step, or zeros if it has none: the memory may have those of an earlier rollout.

    Raises:
        TypeError: They differ from those of an earlier step.
    """
    found = {name: (values.shape[1:], values.dtype) for name, values in extras.items()}
    known = {name: (spec.shape, spec.dtype) for name, spec in trajectory.layout.extras}
    if extras and found != known:
        raise TypeError(f"the policy returned the extras {found} per env: expected {known}, as in an earlier step")
    for name, array in zip(known, trajectory.extras, strict=True):
        array[step, mine] = extras.get(name, 0)


def actions_at(trajectory: Trajectory, step: int, indices: range) -> Any:
    """Return the actions of a step, to be indexed by env: at least those of some envs."""
    action: Any = trajectory.layout.action
    if isinstance(action, ArraySpec):
        return trajectory.actions[0][step]
    arrays = [array[step] for array in trajectory.actions]
    return {index: reader(action, arrays, index)() for index in indices}


def _split(action: Any, output: Any, count: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Return the actions and the extras in the return value of a policy.

    A pair whose second part is a dict is (actions, extras), unless it consists of actions:

    - Actions are tuples, and the first part is neither a tuple nor a list: the pair is a batch, in which the second
      part of the actions is a dict.
    - Actions are dicts, and the first part is one action: there are two envs, and the pair has the action of each.

    Args:
        action: Spec of one env's action; None if it is not known.
        output: The return value.
        count: Number of envs.

    Raises:
        ValueError: An extra does not have one row per env.
    """
    if type(output) is not tuple or len(output) != 2 or not isinstance(output[1], dict):
        return output, {}
    if isinstance(action, tuple) and not isinstance(output[0], (tuple, list)):
        return output, {}
    if isinstance(action, dict) and count == 2 and output[1].keys() == action.keys():
        with contextlib.suppress(SpaceMismatchError):
            conform(action, output[0], "an action", is_exact=True)
            return output, {}
    extras = {name: np.asarray(values) for name, values in output[1].items()}
    for name, values in extras.items():
        if values.shape[:1] != (count,):
            raise ValueError(
                f"the policy returned the extra {name!r} of shape {values.shape}: expected {count} along the first "
                "axis, one per env"
            )
    return output[0], extras


def _specs_of_extras(extras: dict[str, npt.NDArray[Any]]) -> tuple[tuple[str, ArraySpec], ...]:
    """Return the names and specs of extras, for one env.

    Raises:
        TypeError: They are not numbers.
    """
    specs = tuple((name, ArraySpec(array.shape[1:], array.dtype)) for name, array in extras.items())
    if not all(spec.batchable for _, spec in specs):
        raise TypeError(f"the policy returned the extras {extras}: expected arrays of numbers")
    return specs


def _spec_of_actions(actions: Any, count: int) -> ArraySpec:
    """Return the spec of one action of envs that have no action space.

    Raises:
        SpaceMismatchError: The actions are not numbers or arrays of one shape, one per env.
    """
    try:
        array = np.asarray(actions)
    except ValueError:  # ragged
        array = np.empty(0, object)
    spec = ArraySpec(array.shape[1:], array.dtype)
    if not spec.batchable or array.shape[:1] != (count,):
        raise SpaceMismatchError(
            f"the policy returned the actions {actions!r}: expected numbers or arrays of one shape, one per env "
            f"({count}), because the envs have no action space"
        )
    return spec
