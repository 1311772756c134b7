"""Make a `Rollout` from a trajectory and from the results that have no array there."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.actor.future import Outcome, ReadyOutcome
from envactors.mailbox.info_codec import INLINE_INFO, decode, decode_alike
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import flatten, leaves, unflatten
from envactors.rollout.env_plan import KIND_STEP
from envactors.rollout.part import RolloutPart
from envactors.rollout.results import Rollout
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.rollout.trajectory import Trajectory
from envactors.vector.results import failure_info, step_error

# A step of an env: its index, and that of the env.
StepKey: TypeAlias = tuple[int, int]


@dataclasses.dataclass(eq=False)
class ResultsWithoutArrays:
    """All results of consecutive actors in a rollout that have no array in its trajectory.

    Attributes:
        infos: Infos of steps, except for empty ones.
        objects: Object leaves of the observation before each step, if the spec has some.
        complete_steps: How many steps of each env are complete, by env.
        errors_by_step: Errors of all failed steps, also of those that were answered with a truncation.
        errors_to_raise: The errors of the envs that did not continue, by env.
        policy_error: The first exception that a policy raised, or that its output has caused; None without one.
    """

    infos: dict[StepKey, Any] = dataclasses.field(default_factory=dict)
    objects: dict[StepKey, list[Any]] = dataclasses.field(default_factory=dict)
    complete_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    errors_by_step: dict[StepKey, BaseException] = dataclasses.field(default_factory=dict)
    errors_to_raise: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    policy_error: BaseException | None = None

    def add_part(self, part: RolloutPart) -> None:
        """Add the results of one actor. Runs code of users.

        The infos of truncated steps come last. Each contains the error of its step and, if the step has reset the env,
        the info before it. All of them are made before one is added, since they contain infos of the worker only.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        envs = part.envs
        if envs.errors_to_raise:
            envs.drop_unaccepted()
            envs.trajectory.clear_unwritten(envs.indices)
        self.complete_steps.update(envs.accepted_steps)
        self._read_infos(envs)
        self.errors_by_step.update(_exceptions_of(envs.errors_by_step))
        self.errors_to_raise.update(_exceptions_of(envs.errors_to_raise))
        if part.policy_error is not None and self.policy_error is None:
            self.policy_error = part.policy_error.read()[1]
        truncated = [(step, index) for step, index in envs.errors_by_step if envs.accepted_steps[index] > step]
        self.infos.update({key: self._failure_info(*key, envs) for key in truncated})

    def _read_infos(self, envs: RolloutEnvs) -> None:
        """Read the infos and object leaves of an actor's steps."""
        trajectory = envs.trajectory
        if not trajectory.has_all_leaves:
            for index in envs.indices:
                if (content := envs.content_before(0, index)) is not None:
                    self.objects[0, index] = decode(content)[1]
        steps, indices = trajectory.steps_with_infos(envs.indices, 0, envs.steps)
        is_complete = steps < np.array([envs.accepted_steps[index] for index in indices.tolist()], np.int64)
        steps, indices = steps[is_complete], indices[is_complete]
        cells = steps * trajectory.layout.envs + indices
        # Infos of one size are most often of one layout, too, and are then decoded together.
        sizes = trajectory.inline_info_sizes[cells] * (trajectory.info_encoding[cells] == INLINE_INFO)
        for size in np.unique(sizes):
            alike_at = np.flatnonzero(sizes == size)
            keys = list(zip(steps[alike_at].tolist(), indices[alike_at].tolist(), strict=True))
            alike = decode_alike(trajectory.inline_infos[cells[alike_at], :size]) if size else None
            if alike is not None:
                self.infos.update(zip(keys, alike, strict=True))
                continue
            for step, index in keys:
                content = envs.content_before(step + 1, index)
                assert content is not None, "a step is complete only once all of it has come"
                info, objects = decode(content)
                if objects:
                    self.objects[step + 1, index] = objects
                if not (isinstance(info, dict) and not info):
                    self.infos[step, index] = info

    def _failure_info(self, step: int, index: int, envs: RolloutEnvs) -> dict[str, Any]:
        """Return the info of a step that failed and was answered with a truncation."""
        trajectory, failure = envs.trajectory, ReadyOutcome(None, self.errors_by_step[step, index])
        if not trajectory.starts[step + 1, index]:
            return failure_info({}, failure)
        # The next process has reset the env within the step.
        objects, arrays = iter(self.objects.get((step, index), ())), trajectory.observations
        before = (next(objects) if array is None else array[step, index].copy() for array in arrays)
        content = envs.content_before(0, index) if step == 0 else None
        info = self.infos.get((step - 1, index), {}) if content is None else decode(content)[0]
        obs = unflatten(trajectory.layout.observation, before)
        return failure_info(self.infos.get((step, index), {}), failure, (obs, info))


def assemble(
    trajectory: Trajectory, envs: range, results: ResultsWithoutArrays, versions: npt.NDArray[np.int64], *, copies: bool
) -> tuple[Rollout | None, BaseException | None]:
    """Return the result of consecutive envs, or the error to raise in its place.

    Args:
        trajectory: The trajectory that the actors have written to.
        envs: The envs.
        results: The results that have no array in the trajectory.
        versions: How often the user had given parameters since the policy was set; one per actor.
        copies: Whether to copy the arrays.
    """
    if results.policy_error is not None:
        return None, results.policy_error
    layout, mine = trajectory.layout, slice_of(envs)
    steps = layout.steps

    def view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array[:steps, mine].copy() if copies else array[:steps, mine]

    was_run = np.arange(steps)[:, None] < [results.complete_steps[index] for index in envs]
    observations = _observations(trajectory, results)
    spec = layout.inferred or layout.observation
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
        infos=[(*key, results.infos[key]) for key in sorted(results.infos)],
        failures=[(*key, results.errors_by_step[key]) for key in sorted(results.errors_by_step)],
        policy_version=versions,
        valid=was_run & (trajectory.kinds[:, mine] == KIND_STEP),
    )
    if results.errors_to_raise:
        return None, step_error(results.errors_to_raise, rollout, len(envs), "rollout")
    return rollout, None


def _observations(trajectory: Trajectory, results: ResultsWithoutArrays) -> list[npt.NDArray[Any]]:
    """Return an array per leaf of the observations; leaves that cannot be batched are in arrays of objects."""
    layout, shape = trajectory.layout, (trajectory.layout.steps + 1, trajectory.layout.envs)
    pairs = zip(leaves(layout.observation), trajectory.observations, strict=True)
    without_array = (
        [leaf for leaf, array in pairs if array is None] if layout.inferred is None else leaves(layout.inferred)
    )
    others = [
        np.zeros((*shape, *leaf.shape), leaf.dtype) if leaf.batchable else np.full(shape, None, object)
        for leaf in without_array
    ]
    for key, objects in results.objects.items():
        values = objects if layout.inferred is None else flatten(layout.inferred, *objects)
        for array, value in zip(others, values, strict=True):
            array[key] = value
    if layout.inferred is not None:
        return others
    remaining = iter(others)
    return [next(remaining) if array is None else array for array in trajectory.observations]


def _exceptions_of(outcomes: dict[Any, Outcome]) -> dict[Any, BaseException]:
    """Return the exceptions in outcomes. Runs code of users."""
    return {key: error for key, outcome in outcomes.items() if (error := outcome.read()[1]) is not None}
