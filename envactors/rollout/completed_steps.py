"""Record the steps of a rollout that a worker has completed, in the episodes and journals of their envs.

For example, a worker has completed the five steps of the example in `envactors.rollout.env_plan`:

    step      0     1     2     3       4
    kind      STEP  STEP  STEP  RESET   STEP
    ends      0     0     1     0       0
    starts    0     0     0     1       0      the first observation of an episode comes after the step

`Episodes` records all five at once. One episode has begun, so `record_steps` returns 1. If its reset
had a seed, the journal begins anew with that, and then records step 4 alone.
"""

from __future__ import annotations

from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import RESET
from envactors.replay import PostedRequest
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, EnvPlan
from envactors.rollout.trajectory import Trajectory
from envactors.vector.table import EnvTable


def kinds_of_results(trajectory: Trajectory, index: int, start: int, end: int) -> bytes:
    """Return the kinds of an env's steps without the repeats, which come last: only repeats follow a repeat."""
    return trajectory.kinds[start:end, index].tobytes().rstrip(bytes([KIND_REPEAT]))


def record_steps(table: EnvTable, trajectory: Trajectory, plan: EnvPlan, index: int, steps: range) -> int:
    """Record consecutive steps of an env, except for repeats; return how many episodes have begun in them.

    Args:
        table: The envs of the vector.
        trajectory: The trajectory that has the steps.
        plan: The plan of the env, with the seeds of the episodes that have begun.
        index: The env.
        steps: The steps.
    """
    kinds = kinds_of_results(trajectory, index, steps.start, steps.stop)
    steps = steps[: len(kinds)]
    if not steps:
        return 0

    starts, terminated, truncated = trajectory.flags[:3, steps.start + 1 : steps.stop + 1, index]
    begun: bytes = starts.tobytes()
    ends = (terminated | truncated).tobytes()
    if table.journals.is_recorded:
        _record_in_journal(table, trajectory, index, steps, kinds, _last_seeded_start(plan, begun))
    table.episodes.record_sequence(index, ends, kinds)
    return begun.count(1)


def request_at(
    table: EnvTable, trajectory: Trajectory, step: int, index: int, *, is_reset: bool, seed: int | None = None
) -> PostedRequest:
    """Return a step of an env, whether it is complete or has failed, as a row would have it."""
    payload = None
    if not is_reset and trajectory.actions and table.slab.layout.action is None:
        # Rows have no memory for actions whose spec is inferred. Such a spec is that of one array.
        payload = bytes(dumps(trajectory.actions[0][step, index].copy()[()]))
    actions = [array[step] for array in trajectory.actions]
    return PostedRequest(RESET * is_reset, seed, payload, table.attach.resets_within_step, actions)


def _record_in_journal(
    table: EnvTable, trajectory: Trajectory, index: int, steps: range, kinds: bytes, seeded: tuple[int, int] | None
) -> None:
    """Record steps of an env. The journal begins anew with the last seeded reset.

    Args:
        table: The envs of the vector.
        trajectory: The trajectory.
        index: The env.
        steps: The steps.
        kinds: The kind of each.
        seeded: The position of the last seeded reset among them, and its seed; None if there is none.
    """
    journal = table.journals.flushed(index)
    checksums: list[int] = trajectory.checksums[steps.start : steps.stop, index].tolist()
    if seeded is not None:
        position, seed = seeded
        journal.begin(seed, checksums[position])
        steps, kinds, checksums = steps[position + 1 :], kinds[position + 1 :], checksums[position + 1 :]
    if not steps:
        return

    if table.slab.layout.action is not None:
        actions = [array[steps.start : steps.stop, index].tobytes() for array in trajectory.actions]
        journal.record_steps(actions, kinds, checksums[-1])
        return
    for step, kind, checksum in zip(steps, kinds, checksums, strict=True):
        request = request_at(table, trajectory, step, index, is_reset=kind == KIND_RESET)
        journal.record_request(request, checksum)


def _last_seeded_start(plan: EnvPlan, starts: bytes) -> tuple[int, int] | None:
    """Return the position of the last step that has begun an episode with a seed, and the seed; None for no such step.

    Without seeded episodes, only the first start may have a seed: that of the first reset in a new process.

    Args:
        plan: The plan, which has the seeds of these episodes.
        starts: Whether each step has begun an episode.
    """
    last = starts.count(1) - 1
    if last > 0 and (seed := plan.seed_after(last)) is not None:
        return starts.rindex(1), seed
    return (starts.index(1), plan.seed) if last >= 0 and plan.seed is not None else None
