"""Accept the steps that a worker has completed: record them in episodes and journals."""

from __future__ import annotations

from envactors.mailbox.slab import RESET, slice_of
from envactors.replay import PostedRequest
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, EnvPlan
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.vector.table import EnvTable


def accept_completed(table: EnvTable, envs: RolloutEnvs) -> int:
    """Accept all steps of one actor that are complete and were not accepted; return how many there are."""
    trajectory, before = envs.trajectory, list(envs.accepted_steps.values())
    done: list[int] = trajectory.steps_written[slice_of(envs.indices)].tolist()
    after = [min(max(new, old), envs.steps) for new, old in zip(done, before, strict=True)]
    for index, old, new in zip(envs.indices, before, after, strict=True):
        if new > old:
            steps = slice(old, new), index
            ends = trajectory.terminated[steps] | trajectory.truncated[steps]
            starts, kinds = trajectory.starts[old + 1 : new + 1, index], trajectory.kinds[steps]
            _accept_steps_of(table, envs, index, ends.tobytes(), starts.tobytes(), kinds.tobytes())
    return sum(after) - sum(before)


def _accept_steps_of(table: EnvTable, envs: RolloutEnvs, index: int, ends: bytes, starts: bytes, kinds: bytes) -> None:
    """Accept the next steps of an env: the journal first, since `RolloutEnvs.accept` advances the plan that it needs.

    Args:
        table: The envs of the vector.
        envs: The envs of the actor.
        index: The env.
        ends: Whether each step has ended an episode.
        starts: Whether each has begun one.
        kinds: The kind of each.
    """
    run = kinds.rstrip(bytes([KIND_REPEAT]))  # only repeats follow a repeat, and they are not recorded
    if run:
        if table.journals.is_recorded:
            _record_in_journal(table, envs, index, starts[: len(run)], run)
        table.episodes.record_sequence(index, ends[: len(run)], run)
    envs.accept(index, len(kinds), starts.count(1))


def _record_in_journal(table: EnvTable, envs: RolloutEnvs, index: int, starts: bytes, kinds: bytes) -> None:
    """Record the next steps of an env without its repeats. The journal begins anew with the last seeded reset."""
    trajectory, journal, first = envs.trajectory, table.journals.flushed(index), envs.accepted_steps[index]
    end = first + len(kinds)
    checksums: list[int] = trajectory.checksums[first:end, index].tolist()
    position, seed = _last_seeded_start(envs.plans[index], starts)
    if seed is not None:
        journal.begin(seed, checksums[position])
    begin = 0 if seed is None else position + 1
    if begin == len(kinds):
        return
    if table.slab.layout.action is not None:
        actions = [array[first + begin : end, index].tobytes() for array in trajectory.actions]
        journal.record_steps(actions, kinds[begin:], checksums[-1])
        return
    within = table.attach.resets_within_step
    for offset in range(begin, len(kinds)):
        is_reset = kinds[offset] == KIND_RESET
        payload = None if is_reset else envs.pickled_action(first + offset, index)
        journal.record_request(PostedRequest(RESET * is_reset, None, payload, within, ()), checksums[offset])


def _last_seeded_start(plan: EnvPlan, starts: bytes) -> tuple[int, int | None]:
    """Return the position of the last start of an episode with a seed, and the seed; None if there is none.

    Without seeded episodes, only the first start may have a seed: that of the first reset in a new process.

    Args:
        plan: The plan, which has the seeds of these episodes.
        starts: Whether each step has begun an episode.
    """
    last = starts.count(1) - 1
    if last > 0 and (seed := plan.seed_of_episode(last)) is not None:
        return starts.rindex(1), seed
    return starts.find(1), plan.seed if last >= 0 else None
