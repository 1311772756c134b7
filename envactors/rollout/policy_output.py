"""The return value of a policy, actions or (actions, extras): check it, and write it to a trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import ArraySpec, flatten, reader, split_batch
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout


def write_output(trajectory: Trajectory, envs: range, step: int, output: Any) -> TrajectoryLayout | None:
    """Write the actions and extras of one step, or nothing if the trajectory has no room for them.

    Steps without extras get zeros. Every backend calls this for each output, so the rules of extras are checked here.

    Args:
        trajectory: Trajectory to write to.
        envs: The envs that the policy has acted for.
        step: The step.
        output: Return value of the policy.

    Returns:
        None if everything is written. Otherwise the layout to make room for: then write the same output again.

    Raises:
        SpaceMismatchError: The actions do not conform to the action spec.
        TypeError: The extras are not numbers, or differ from those of an earlier step.
        ValueError: An extra does not have one row per env.
    """
    layout, count, mine = trajectory.layout, len(envs), slice_of(envs)
    actions, extras = _split(layout.action, output, count)
    action = _spec_of_actions(actions, count) if layout.action is None else layout.action
    expected = layout.extras or _specs_of_extras(extras)  # the first extras of any actor decide which there are
    if layout.action is None or expected != layout.extras:
        return layout._replace(action=action, extras=expected)
    found = {name: (values.shape[1:], values.dtype) for name, values in extras.items()}
    known = {name: (spec.shape, spec.dtype) for name, spec in expected}
    if extras and found != known:
        raise TypeError(f"the policy returned the extras {found} per env: expected {known}, as in an earlier step")
    for (name, _), array in zip(expected, trajectory.extras, strict=True):
        array[step, mine] = extras.get(name, 0)  # the trajectory may have those of an earlier rollout
    values = split_batch(action, actions, count, "the policy's actions")
    if isinstance(action, ArraySpec) and action.batchable:
        trajectory.actions[0][step, mine] = values
        return None
    for index, value in zip(envs, values, strict=True):
        for array, leaf in zip(trajectory.actions, flatten(action, value), strict=True):
            array[step, index] = leaf
    return None


def actions_at(trajectory: Trajectory, step: int) -> Any:
    """Return the actions of a step, to be indexed by env."""
    if isinstance(trajectory.layout.action, ArraySpec):
        return trajectory.actions[0][step]
    return _NestedActions(trajectory, step)


class _NestedActions:
    """Actions of several leaves in one step, by env.

    Args:
        trajectory: The trajectory that has them.
        step: The step.
    """

    def __init__(self, trajectory: Trajectory, step: int) -> None:
        self._spec: Any = trajectory.layout.action
        self._arrays = [array[step] for array in trajectory.actions]

    def __getitem__(self, index: int) -> Any:
        return reader(self._spec, self._arrays, index)()


def _split(action: Any, output: Any, count: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Return the actions and the extras in the return value of a policy.

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
        return output, {}  # the actions themselves are a pair
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
