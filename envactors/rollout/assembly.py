"""Make a `Rollout` from a trajectory and from everything that has no array there."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.mailbox.info_codec import INLINE_INFO, PLAIN, Infos, decode, decode_alike
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import Spec, flatten, unflatten
from envactors.rollout.env_plan import KIND_STEP, KIND_TRUNCATED
from envactors.rollout.results import Rollout
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.rollout.trajectory import Trajectory
from envactors.vector.results import failure_info, step_error

# A step of an env: its index, and that of the env.
StepKey: TypeAlias = tuple[int, int]


@dataclasses.dataclass(eq=False)
class Sidecar:
    """Everything of a rollout that has no array in its trajectory.

    Attributes:
        infos: Infos of steps, except for empty ones.
        objects: Object leaves of the observation before each step, if the spec has some.
        errors_by_step: Errors of envs that raised or crashed, also of those that continued.
        errors_by_env: Errors to raise, by env.
        policy_errors: The exceptions that policies raised, by the first env of their actors.
    """

    infos: dict[StepKey, Any] = dataclasses.field(default_factory=dict)
    objects: dict[StepKey, list[Any]] = dataclasses.field(default_factory=dict)
    errors_by_step: dict[StepKey, BaseException] = dataclasses.field(default_factory=dict)
    errors_by_env: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    policy_errors: dict[int, BaseException] = dataclasses.field(default_factory=dict)


def assemble(
    trajectory: Trajectory, envs: range, sidecar: Sidecar, versions: npt.NDArray[np.int64], *, copies: bool
) -> tuple[Rollout | None, BaseException | None]:
    """Return the result of consecutive envs, or the error to raise in its place.

    Args:
        trajectory: The trajectory that the actors have written to.
        envs: The envs.
        sidecar: Everything that has no array in the trajectory.
        versions: How often the user had given parameters since the policy was set; one per actor.
        copies: Whether to copy the arrays.
    """
    for first_env, policy_error in sidecar.policy_errors.items():
        if first_env in envs:
            return None, policy_error
    layout, mine = trajectory.layout, slice_of(envs)
    steps = layout.steps

    def view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array[:steps, mine].copy() if copies else array[:steps, mine]

    was_run = np.arange(steps)[:, None] < trajectory.steps_done[mine]
    observations = _observations(trajectory, sidecar)
    spec = layout.learned or layout.observation
    rollout = Rollout(
        env_ids=np.arange(envs.start, envs.stop),
        obs=unflatten(spec, map(view, observations)),
        actions=None if layout.action is None else unflatten(layout.action, map(view, trajectory.actions)),
        rewards=view(trajectory.rewards),
        terminated=view(trajectory.terminated),
        truncated=view(trajectory.truncated),
        starts=view(trajectory.starts),
        extras={name: view(array) for (name, _), array in zip(layout.extras, trajectory.extras, strict=True)},
        last_obs=unflatten(spec, (array[steps, mine].copy() for array in observations)),
        infos=[(*key, sidecar.infos[key]) for key in sorted(sidecar.infos) if key[1] in envs],
        failures=[(*key, sidecar.errors_by_step[key]) for key in sorted(sidecar.errors_by_step) if key[1] in envs],
        policy_version=versions,
        valid=was_run & (trajectory.kinds[:, mine] == KIND_STEP),
    )
    errors_by_env = {index: error for index, error in sidecar.errors_by_env.items() if index in envs}
    if errors_by_env:
        return None, step_error(errors_by_env, rollout, len(envs), "rollout")
    return rollout, None


def _observations(trajectory: Trajectory, sidecar: Sidecar) -> list[npt.NDArray[Any]]:
    """Return an array per leaf of the observations; leaves without an array become arrays of objects."""
    layout = trajectory.layout
    count = sum(array is None for array in trajectory.observations)
    objects = [np.full((layout.steps + 1, layout.envs), None, object) for _ in range(count)]
    for key, leaves in sidecar.objects.items():
        for array, leaf in zip(objects, leaves, strict=True):
            array[key] = leaf
    if layout.learned is not None:
        return _arrays_of(layout.learned, objects[0])
    others = iter(objects)
    return [next(others) if array is None else array for array in trajectory.observations]


def _arrays_of(spec: Spec, objects: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return an array per leaf of observations that are in an array of objects; None stands for no observation."""
    arrays: list[npt.NDArray[Any]] = [
        np.zeros((*objects.shape, *leaf.shape), leaf.dtype) if leaf.batchable else np.full(objects.shape, None, object)
        for leaf in flatten(spec, spec)
    ]
    for cell, obs in np.ndenumerate(objects):
        if obs is not None:
            for array, value in zip(arrays, flatten(spec, obs), strict=True):
                array[cell] = value
    return arrays


def add_infos(sidecar: Sidecar, envs: RolloutEnvs) -> None:
    """Add the infos and object leaves of an actor's steps to the sidecar of their rollout.

    Raises:
        BaseException: Whatever unpickling raises.
    """
    trajectory, layout = envs.trajectory, envs.trajectory.layout
    first, mine = envs.indices.start, slice_of(envs.indices)
    if not trajectory.is_whole:
        for key, encoded in envs.encoded_by_step.items():
            sidecar.objects[key] = [] if encoded is None else decode(encoded)[1]
    encodings = trajectory.info_encoding.reshape(-1, layout.envs)[:, mine]
    if not encodings.any():
        return
    steps, positions = (encodings != PLAIN).nonzero()
    is_done = steps < trajectory.steps_done[mine][positions]
    steps = steps[is_done]
    indices = positions[is_done] + first
    cells = steps * layout.envs + indices
    reader = Infos(trajectory)
    # Infos of one size are most often of one layout, too, and are then decoded together.
    sizes = trajectory.inline_info_sizes[cells] * (trajectory.info_encoding[cells] == INLINE_INFO)
    for size in np.unique(sizes):
        alike_at = np.flatnonzero(sizes == size)
        keys = list(zip(steps[alike_at].tolist(), indices[alike_at].tolist(), strict=True))
        alike = decode_alike(trajectory.inline_infos[cells[alike_at], :size]) if size else None
        if alike is not None:
            sidecar.infos.update(zip(keys, alike, strict=True))
            continue
        for cell, (step, index) in zip(cells[alike_at].tolist(), keys, strict=True):
            info, leaves = reader.decode(cell, envs.large_infos.get(cell))
            if leaves:
                sidecar.objects[step + 1, index] = leaves
            if not (isinstance(info, dict) and not info):
                sidecar.infos[step, index] = info


def add_failure_infos(sidecar: Sidecar, envs: RolloutEnvs, errors_by_step: dict[StepKey, BaseException]) -> None:
    """Add the failures of an actor's envs to the sidecar: to the infos of their steps, too, if they continued."""
    infos, trajectory = sidecar.infos, envs.trajectory
    sidecar.errors_by_step.update(errors_by_step)
    for (step, index), error in errors_by_step.items():
        if trajectory.kinds[step, index] == KIND_TRUNCATED and trajectory.steps_done[index] > step:
            before = None
            if trajectory.starts[step + 1, index]:  # of a reset in the next process
                objects = iter(sidecar.objects.get((step, index), ()))
                arrays = trajectory.observations
                leaves = (next(objects) if array is None else array[step, index].copy() for array in arrays)
                obs = unflatten(trajectory.layout.observation, leaves)
                first = envs.encoded_by_step[0, index]
                last_info = {} if first is None else decode(first)[0]
                before = obs, infos.get((step - 1, index), {}) if step else last_info
            infos[step, index] = failure_info(infos.get((step, index), {}), error, before)
