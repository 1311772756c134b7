"""Make a `Rollout` from a trajectory and from the results that have no array there."""

from __future__ import annotations

import dataclasses
from typing import Any

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


@dataclasses.dataclass(eq=False)
class ResultsWithoutArrays:
    """All results of consecutive actors in a rollout that have no array in its trajectory.

    Keys are pairs of a step and the index of an env, both from 0; *by env*, only the index. If env 3 returns the info
    ``{"n": 7}`` in its first step, ``infos`` is ``{(0, 3): {"n": 7}}``.

    Attributes:
        infos: Infos of steps, except for empty ones.
        objects: Object leaves of observations, by the step that follows them; also those after the last step.
        accepted_steps: How many steps of each env are accepted, by env.
        errors_by_step: Errors of all failed steps, also of those that were answered with a truncation.
        errors_to_raise: The errors of the envs that did not continue, by env.
        policy_error: The first exception that a policy raised, or that its output has caused; None without one.
    """

    infos: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    objects: dict[tuple[int, int], list[Any]] = dataclasses.field(default_factory=dict)
    accepted_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    errors_by_step: dict[tuple[int, int], BaseException] = dataclasses.field(default_factory=dict)
    errors_to_raise: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    policy_error: BaseException | None = None

    def add_part(self, part: RolloutPart) -> None:
        """Add the results of one actor. Runs code of users.

        After an error, this first clears the steps that were not accepted in the memory of the trajectory, without the
        lock.

        The infos of truncated steps come last. Each contains the error of its step and, if the step has reset the env,
        the info before it. All are made before any is added: a ``final_info`` is as the worker sent it, without errors.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        envs = part.envs
        if envs.errors_to_raise:  # the memory after the accepted steps may have those of an earlier rollout
            envs.drop_unaccepted()
            envs.trajectory.clear_incomplete(envs.indices)
        self.accepted_steps.update(envs.accepted_steps)
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
        if not steps.size:
            return
        is_accepted = steps < np.array([*envs.accepted_steps.values()])[indices - envs.indices.start]
        steps, indices = steps[is_accepted], indices[is_accepted]
        cells = steps * trajectory.layout.num_envs + indices

        # Infos of one size are most often of one layout, too, and are then decoded together. Large ones, which are not
        # in the trajectory, have size 0 here.
        sizes = np.where(trajectory.info_encoding[cells] == INLINE_INFO, trajectory.inline_info_sizes[cells], 0)
        for size in np.unique(sizes):
            these = np.flatnonzero(sizes == size)
            keys = list(zip(steps[these].tolist(), indices[these].tolist(), strict=True))
            alike = decode_alike(trajectory.inline_infos[cells[these], :size]) if size else None
            if alike is not None:
                self.infos.update(zip(keys, alike, strict=True))
            else:
                self._read_one_by_one(envs, keys)

    def _read_one_by_one(self, envs: RolloutEnvs, keys: list[tuple[int, int]]) -> None:
        """Read the infos and object leaves of some steps, which cannot be decoded together."""
        for step, index in keys:
            content = envs.content_before(step + 1, index)
            assert content is not None, "a step is accepted only once all of it has come"
            info, objects = decode(content)
            if objects:
                self.objects[step + 1, index] = objects
            if not isinstance(info, dict) or info:
                self.infos[step, index] = info

    def _failure_info(self, step: int, index: int, envs: RolloutEnvs) -> dict[str, Any]:
        """Return the info of a step that failed and was answered with a truncation."""
        trajectory, failure = envs.trajectory, ReadyOutcome(None, self.errors_by_step[step, index])
        if not trajectory.starts[step + 1, index]:
            return failure_info({}, failure)

        # The next process has reset the env as the result of this step, so the info also has the result before it.
        objects, arrays = iter(self.objects.get((step, index), ())), trajectory.observations
        leaves_before = (next(objects) if array is None else array[step, index].copy() for array in arrays)
        obs_before = unflatten(trajectory.layout.observation, leaves_before)
        info_before = self._info_before(step, index, envs)
        return failure_info(self.infos.get((step, index), {}), failure, (obs_before, info_before))

    def _info_before(self, step: int, index: int, envs: RolloutEnvs) -> Any:
        """Return the info that came with the observation before a step; empty without one."""
        if step > 0:
            return self.infos.get((step - 1, index), {})
        content = envs.content_before(0, index)
        return {} if content is None else decode(content)[0]


def assemble(
    trajectory: Trajectory,
    indices: range,
    results: ResultsWithoutArrays,
    versions: npt.NDArray[np.int64],
    *,
    copies: bool,
) -> tuple[Rollout | None, BaseException | None]:
    """Return the result of consecutive envs, or the error to raise in its place.

    Args:
        trajectory: The trajectory that the actors have written to.
        indices: The envs.
        results: The results that have no array in the trajectory.
        versions: How often the user had given parameters since the policy was set; one per actor.
        copies: Whether to copy the arrays.
    """
    if results.policy_error is not None:
        return None, results.policy_error
    layout, mine = trajectory.layout, slice_of(indices)
    steps = layout.steps

    def view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array[:steps, mine].copy() if copies else array[:steps, mine]

    was_run = np.arange(steps)[:, None] < [results.accepted_steps[index] for index in indices]
    observations = _observations(trajectory, results)
    spec = layout.inferred or layout.observation
    rollout = Rollout(
        env_ids=np.arange(indices.start, indices.stop),
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
        return None, step_error(results.errors_to_raise, rollout, len(indices), "rollout")
    return rollout, None


def _observations(trajectory: Trajectory, results: ResultsWithoutArrays) -> list[npt.NDArray[Any]]:
    """Return an array per leaf of the observations; new arrays for leaves that have none in the trajectory."""
    shape, inferred = trajectory.starts.shape, trajectory.layout.inferred
    specs = leaves(trajectory.layout.observation if inferred is None else inferred)
    in_trajectory = trajectory.observations if inferred is None else [None for _ in specs]
    arrays, new_arrays = [], []
    for spec, array in zip(specs, in_trajectory, strict=True):
        if array is None:
            new = np.zeros((*shape, *spec.shape), spec.dtype) if spec.batchable else np.full(shape, None, object)
            new_arrays.append(new)
        arrays.append(new if array is None else array)
    for key, objects in results.objects.items():
        values = objects if inferred is None else flatten(inferred, *objects)
        for array, value in zip(new_arrays, values, strict=True):
            array[key] = value
    return arrays


def _exceptions_of(outcomes: dict[Any, Outcome]) -> dict[Any, BaseException]:
    """Return the exceptions in outcomes. Runs code of users."""
    return {key: error for key, outcome in outcomes.items() if (error := outcome.read()[1]) is not None}
