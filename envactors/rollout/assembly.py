"""Build the `Rollout` that a user receives from a trajectory, and from infos and steps outside of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.errors import ActorError, VectorStepError
from envactors.mailbox.info_codec import INLINE_INFO, PLAIN, InfoReader, decode_alike
from envactors.mailbox.specs import unflatten
from envactors.rollout.part import ActorPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import STEP, Trajectory


class Views(NamedTuple):
    """What a `Rollout` shows of a trajectory. Views of memory can be made before the workers have written to it.

    Attributes:
        observations: Arrays of shape (t, n, ...); None for leaves that have no place in the trajectory.
        actions: Arrays of shape (t, n, ...).
        rewards, terminated, truncated, starts: As in `Rollout`.
        extras: As in `Rollout`.
    """

    observations: list[npt.NDArray[Any] | None]
    actions: list[npt.NDArray[Any]]
    rewards: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    extras: dict[str, npt.NDArray[Any]]


def make_views(
    trajectory: Trajectory, first: int, stop: int, hand_out: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> Views:
    """Return what a result shows of a trajectory.

    Args:
        trajectory: Trajectory that the workers write to.
        first: First env.
        stop: Env after the last one.
        hand_out: Returns the array to give to the user for a view of the trajectory: the view itself, or a copy.
    """
    layout = trajectory.layout

    def columns(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return hand_out(array[: layout.steps, first:stop])

    return Views(
        [None if array is None else columns(array) for array in trajectory.observations],
        [columns(array) for array in trajectory.actions],
        columns(trajectory.rewards),
        columns(trajectory.terminated),
        columns(trajectory.truncated),
        columns(trajectory.starts),
        {name: columns(array) for (name, _), array in zip(layout.extras, trajectory.extras, strict=True)},
    )


def assemble(trajectory: Trajectory, parts: Sequence[ActorPart], views: Views) -> Rollout:
    """Return the result of one or more actors with consecutive envs.

    Args:
        trajectory: Trajectory that the actors have written to.
        parts: The part of each actor.
        views: What the result shows of the trajectory.
    """
    layout = trajectory.layout
    first, stop, steps = parts[0].first, parts[-1].stop, layout.steps
    done = trajectory.done[first:stop]
    valid = trajectory.ops[:, first:stop] == STEP
    if done.min() < steps:
        valid &= np.arange(steps)[:, None] < done
    infos, objects = _read_infos(trajectory, parts, done)
    # Leaves without a place in the trajectory become object arrays of steps + 1 rows.
    beside = _batch_objects(trajectory, objects, first, stop)
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
        infos,
        sorted((failure for part in parts for failure in part.failures), key=lambda failure: failure[:2]),
        np.array([part.version for part in parts]),
        valid,
    )


def _read_infos(
    trajectory: Trajectory, parts: Sequence[ActorPart], done: npt.NDArray[np.int64]
) -> tuple[list[tuple[int, int, dict[str, Any]]], dict[tuple[int, int], list[Any]]]:
    """Return all non-empty infos, and the object leaves of observations by (step, env)."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    objects = {where: leaves for part in parts for where, leaves in part.objects.items()}
    encodings = trajectory.info_encoding.reshape(-1, trajectory.layout.envs)
    steps, offsets = np.nonzero(encodings[:, parts[0].first : parts[-1].stop] != PLAIN)
    if len(steps):
        is_done = steps < done[offsets]
        steps, indices = steps[is_done], offsets[is_done] + parts[0].first
        large = {number: content for part in parts for number, content in part.progress.large_infos.items()}
        infos, leaves = _decode(trajectory, steps * trajectory.layout.envs + indices, large)
        found = [written for written in zip(steps.tolist(), indices.tolist(), infos, strict=True) if written[2]]
        objects.update({(int(steps[at]) + 1, int(indices[at])): content for at, content in leaves.items()})
    in_rows = [info for part in parts for info in part.infos]
    if in_rows:  # those of the trajectory are in order already
        found = sorted(found + in_rows, key=operator.itemgetter(0, 1))
    return found, objects


def _decode(
    trajectory: Trajectory, rows: npt.NDArray[np.int64], large: dict[int, memoryview]
) -> tuple[list[Any], dict[int, list[Any]]]:
    """Return the info of each row, and by their positions the object leaves of those that have any.

    Infos of one size are most often of one layout, too.
    """
    reader = InfoReader(trajectory)
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
    trajectory: Trajectory, objects: dict[tuple[int, int], list[Any]], first: int, stop: int
) -> list[npt.NDArray[Any]]:
    """Return one object array of shape (t + 1, n) for each leaf without a place in the trajectory."""
    count = sum(array is None for array in trajectory.observations)
    batches = [np.full((trajectory.layout.steps + 1, stop - first), None, object) for _ in range(count)]
    for (step, index), leaves in objects.items():
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
