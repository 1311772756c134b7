"""Build the `Rollout` that a user receives from a trajectory, and from infos and steps outside of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.envs.results import is_empty
from envactors.errors import ActorError, VectorStepError
from envactors.mailbox.info_codec import INLINE_INFO, PLAIN, Infos, decode_alike
from envactors.mailbox.specs import unflatten
from envactors.rollout.buffers import Views
from envactors.rollout.part import ActorPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import STEP, Trajectory


def assemble(trajectory: Trajectory, parts: Sequence[ActorPart], views: Views, contents: Sequence[Contents]) -> Rollout:
    """Return the result of one or more actors with consecutive envs.

    Args:
        trajectory: Trajectory that the actors have written to.
        parts: The part of each actor.
        views: What the result shows of the trajectory.
        contents: What `read_contents` has returned for each part.
    """
    layout = trajectory.layout
    first, stop, steps = parts[0].first, parts[-1].stop, layout.steps
    done = trajectory.done[first:stop]
    valid = trajectory.ops[:, first:stop] == STEP
    if min(done.tolist()) < steps:
        valid &= np.arange(steps)[:, None] < done
    # Leaves without a place in the trajectory become object arrays of steps + 1 rows.
    beside = _batch_objects(trajectory, contents, first, stop)
    unplaced, last_unplaced = (batch[:steps] for batch in beside), (batch[steps].copy() for batch in beside)
    obs = (next(unplaced) if array is None else array for array in views.observations)
    last_obs = (
        next(last_unplaced) if array is None else array[steps, first:stop].copy() for array in trajectory.observations
    )
    return Rollout(
        np.arange(first, stop),
        unflatten(layout.observation, obs),
        None if layout.action is None else unflatten(layout.action, iter(views.actions)),
        views.rewards,
        views.terminated,
        views.truncated,
        views.starts,
        views.extras,
        unflatten(layout.observation, last_obs),
        sorted(info for content in contents for info in content.infos),  # no two have one step and env
        sorted(((*at, error) for part in parts for at, error in part.failures.items()), key=operator.itemgetter(0, 1)),
        np.array([part.version for part in parts]),
        valid,
    )


class Contents(NamedTuple):
    """What the steps of an actor have besides arrays.

    Attributes:
        infos: ``(step, env, info)`` of all non-empty infos.
        objects: Leaves of observations without a place in the trajectory, by (step, env).
    """

    infos: list[tuple[int, int, dict[str, Any]]]
    objects: dict[tuple[int, int], list[Any]]


def read_contents(part: ActorPart) -> Contents:
    """Read what the steps of an actor that has ended its part have besides arrays.

    Raises:
        Exception: Whatever unpickling an info raises.
    """
    trajectory, objects = part.trajectory, dict(part.progress.objects)
    infos = [(*at, info) for at, info in part.infos.items()]
    envs = trajectory.layout.envs
    encodings = trajectory.info_encoding.reshape(-1, envs)[:, part.first : part.stop]
    steps, offsets = (encodings != PLAIN).nonzero()
    if len(steps):
        is_done = steps < trajectory.done[part.first : part.stop][offsets]
        steps, indices = steps[is_done], offsets[is_done] + part.first
        decoded, leaves = _decode(trajectory, steps * envs + indices, part.progress.large_infos)
        written = zip(steps.tolist(), indices.tolist(), decoded, strict=True)
        infos += [(step, env, info) for step, env, info in written if not is_empty(info)]
        objects.update({(int(steps[at]) + 1, int(indices[at])): content for at, content in leaves.items()})
    return Contents(infos, objects)


def _decode(
    trajectory: Trajectory, rows: npt.NDArray[np.int64], large: dict[int, memoryview]
) -> tuple[list[Any], dict[int, list[Any]]]:
    """Return the info of each row, and by their positions the object leaves of those that have any.

    Infos of one size are most often of one layout, too.
    """
    reader = Infos(trajectory)
    infos: list[Any] = [None] * len(rows)
    objects: dict[int, list[Any]] = {}
    sizes = trajectory.inline_info_sizes[rows] * (trajectory.info_encoding[rows] == INLINE_INFO)
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size).tolist()
        alike = decode_alike(trajectory.inline_infos[rows[places], :size]) if size else None
        for place, info in zip(places, alike or (), strict=alike is not None):
            infos[place] = info
        for place in places if alike is None else ():
            row = int(rows[place])
            infos[place], leaves = reader.decode(row, large.get(row))
            if leaves:
                objects[place] = leaves
    return infos, objects


def _batch_objects(
    trajectory: Trajectory, contents: Sequence[Contents], first: int, stop: int
) -> list[npt.NDArray[Any]]:
    """Return one object array of shape (t + 1, n) for each leaf without a place in the trajectory."""
    count = sum(array is None for array in trajectory.observations)
    batches = [np.full((trajectory.layout.steps + 1, stop - first), None, object) for _ in range(count)]
    for (step, index), leaves in (item for content in contents for item in content.objects.items()):
        for batch, leaf in zip(batches, leaves, strict=True):
            batch[step, index - first] = leaf
    return batches


def error_of(parts: Sequence[ActorPart], rollout: Rollout) -> BaseException | None:
    """Return the error to raise in place of a rollout, or None."""
    for part in parts:
        if part.error is not None and not isinstance(part.error, ActorError):
            return part.error  # raised by the policy
    failures = {index: error for part in parts for index, error in part.errors.items()}
    for part in parts:
        if part.error is not None:
            failures.update(dict.fromkeys(range(part.first, part.stop), part.error))
    if not failures:
        return None
    env_id, first = next(iter(failures.items()))
    count = f"{len(failures)} of {len(rollout.env_ids)}"
    text = f"{count} envs failed in rollout; env {env_id}: {type(first).__name__}: {first}"
    error = VectorStepError(text, failures=failures, batch=rollout)
    error.__cause__ = first
    return error
