"""Build the `Rollout` that a user receives from a trajectory, and from infos and steps outside of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import ActorError, VectorStepError
from envactors.mailbox.info_codec import INLINE_INFO, PLAIN, InfoReader, decode_alike
from envactors.mailbox.specs import unflatten
from envactors.rollout.part import ActorPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import STEP, Trajectory


def assemble(
    trajectory: Trajectory,
    parts: Sequence[ActorPart],
    hand_out: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> Rollout:
    """Return the result of one or more actors with consecutive envs.

    Args:
        trajectory: Trajectory that the actors have written to.
        parts: The part of each actor.
        hand_out: Returns the array to give to the user for a view of the trajectory: the view itself, or a copy.
    """
    layout = trajectory.layout
    first, stop, steps = parts[0].first, parts[-1].stop, layout.steps

    def columns(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return hand_out(array[:steps, first:stop])

    done = trajectory.done[first:stop]
    ran = np.arange(steps)[:, None] < done[None, :]
    infos, objects = _read_infos(trajectory, parts, done)
    # Leaves without a place in the trajectory become object arrays of steps + 1 rows, like the others.
    beside = iter(_batch_objects(trajectory, objects, first, stop))
    observed = [next(beside) if array is None else array[:, first:stop] for array in trajectory.observations]
    pairs = zip(observed, trajectory.observations, strict=True)
    obs = [own[:steps] if array is None else columns(array) for own, array in pairs]
    actions = [columns(array) for array in trajectory.actions]
    return Rollout(
        np.arange(first, stop),
        unflatten(layout.observation, iter(obs)),
        None if layout.action is None else unflatten(layout.action, iter(actions)),
        columns(trajectory.rewards),
        columns(trajectory.terminated),
        columns(trajectory.truncated),
        columns(trajectory.starts),
        {name: columns(array) for (name, _), array in zip(layout.extras, trajectory.extras, strict=True)},
        unflatten(layout.observation, (array[steps].copy() for array in observed)),
        infos,
        sorted((failure for part in parts for failure in part.failures), key=lambda failure: failure[:2]),
        np.array([part.version for part in parts]),
        (trajectory.ops[:, first:stop] == STEP) & ran,
    )


def _read_infos(
    trajectory: Trajectory, parts: Sequence[ActorPart], done: npt.NDArray[np.int64]
) -> tuple[list[tuple[int, int, dict[str, Any]]], dict[tuple[int, int], list[Any]]]:
    """Return all non-empty infos, and the object leaves of observations by (step, env)."""
    found = [info for part in parts for info in part.infos]
    objects = {where: leaves for part in parts for where, leaves in part.objects.items()}
    is_written = (trajectory.info_encoding != PLAIN).reshape(-1, trajectory.layout.envs)
    steps, offsets = np.nonzero(is_written[:, parts[0].first : parts[-1].stop])
    is_done = steps < done[offsets]
    steps, indices = steps[is_done], offsets[is_done] + parts[0].first
    if len(steps):
        large = {number: content for part in parts for number, content in part.progress.large_infos.items()}
        contents = _decode(trajectory, steps * trajectory.layout.envs + indices, large)
        for step, index, (info, leaves) in zip(steps.tolist(), indices.tolist(), contents, strict=True):
            if leaves:
                objects[step + 1, index] = leaves
            if info:
                found.append((step, index, info))
    return sorted(found, key=operator.itemgetter(0, 1)), objects


def _decode(trajectory: Trajectory, rows: npt.NDArray[np.int64], large: dict[int, memoryview]) -> list[Any]:
    """Return the info and the object leaves of each row; infos of one size are most often of one layout, too."""
    reader = InfoReader(trajectory)
    contents: list[Any] = [None] * len(rows)
    sizes = trajectory.inline_info_sizes[rows] * (trajectory.info_encoding[rows] == INLINE_INFO)
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size)
        alike = decode_alike(trajectory.info_rooms[rows[places], :size]) if size else None
        if alike is None:
            alike = [reader.decode(row, large.get(row)) for row in rows[places].tolist()]
        for place, content in zip(places.tolist(), alike, strict=True):
            contents[place] = content
    return contents


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
