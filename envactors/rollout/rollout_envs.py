"""The envs of one actor in a rollout, as the caller sees them under the lock of the vector.

A rollout begins with the last results in the rows of the envs. Accepting completed steps advances episodes and
journals. At the end the rows get the last results, as if steps had written them. So `envactors.vector` knows only this
of rollouts:

- `EnvTable` records how many are in flight, and which process has the current order. `RowEngine` refuses steps
  meanwhile, and resets wait.
- `EnvRecovery` reads no observations from rows meanwhile, since the rows are behind.
- `EnvGroup` ends the parts of its actor after an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.messages import episode_seed
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import RESET, slice_of
from envactors.replay import PostedRequest
from envactors.rollout.env_plan import KIND_AFTER_END, KIND_REPEAT, KIND_RESET, KIND_TRUNCATED, EnvPlan, next_kind
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import STEPS
from envactors.rollout.trajectory import Trajectory
from envactors.vector.table import EnvTable


class RolloutEnvs:
    """How far each env of one actor has got, and what it does next.

    Args:
        table: The envs of the vector.
        indices: Indices of the actor's envs.
        buffer: The trajectory.

    Attributes:
        indices: As above.
        steps: Number of steps of the rollout.
        has_begun: Whether the trajectory has the first observations.
        accepted: How many steps of each env are accepted, by env.
        incarnations: The ``incarnation`` of each env's last result, by env; see `envactors.vector.results.EnvStep`.
        seeds: The seed of the reset that each env may run in its next step, by env.
        encoded_by_step: The encoded info and object leaves of results that no worker wrote in this rollout, by the step
            after the result, and by env; None without any. Those of step 0 are from before the rollout.
        large_infos: Encoded infos, with object leaves, that did not fit into the trajectory, by cell.
    """

    def __init__(self, table: EnvTable, indices: range, buffer: TrajectoryBuffer) -> None:
        self.indices = indices
        self.steps: int = buffer.trajectory.layout.steps
        self.has_begun: bool = False
        self.accepted: dict[int, int] = dict.fromkeys(indices, 0)
        self.incarnations: dict[int, int] = dict.fromkeys(indices, 0)
        self.seeds: dict[int, int | None] = dict.fromkeys(indices)
        self.encoded_by_step: dict[tuple[int, int], bytes | None] = {}
        self.large_infos: dict[int, bytes] = {}
        self._table = table
        self._buffer = buffer
        self._slice = slice_of(indices)
        # Envs that the next process resets within a step that has failed, as ``autoreset="same_step"`` demands.
        self._reset_after_failure: set[int] = set()
        # How many steps of each env were complete when the worker missed a deadline; None if it has missed none.
        self._done_in_time: list[int] | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps of all actors are written into."""
        return self._buffer.trajectory

    @property
    def next_step(self) -> int:
        """The first step that is not complete."""
        return min(self.accepted.values())

    # The last results in rows ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the last observations of the envs as the first ones of the trajectory."""
        table, trajectory, mine = self._table, self.trajectory, self._slice
        self.has_begun = True
        trajectory.starts[0, mine] = table.last_rows.are_first(mine)
        for last, array in self._observations():
            array[0, mine] = last[table.last_rows.buffers(mine), self.indices]
        self.encoded_by_step = {(0, index): table.last_rows.contents[index] for index in self.indices}

    def write_last_results(self) -> None:
        """Write the last results of the envs into their rows; again after an interrupt."""
        table, slab, trajectory = self._table, self._table.slab, self.trajectory
        ids = [index for index, accepted in self.accepted.items() if accepted]
        at = np.array([self.accepted[index] for index in ids], np.int64)
        buffer = table.last_rows.buffers(ids)
        for last, array in self._observations():
            last[buffer, ids] = array[at, ids]
        if slab.layout.reward is not None:
            slab.rewards[buffer, ids] = trajectory.rewards[at - 1, ids]
        slab.terminated[buffer, ids] = trajectory.terminated[at - 1, ids]
        slab.truncated[buffer, ids] = trajectory.truncated[at - 1, ids]
        for index, is_first in zip(ids, trajectory.starts[at, ids].tolist(), strict=True):
            content = self._encoded_at(self.accepted[index], index)
            table.last_rows.note_written(index, content, self.incarnations[index], is_first=is_first)

    def _observations(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield the array in the rows, and the one in the trajectory, of each leaf that has both."""
        for last, array in zip(self._table.slab.observations, self.trajectory.observations, strict=True):
            if last is not None and array is not None:
                yield last, array

    def last_leaves(self) -> list[bytes | None]:
        """Return the encoded info and object leaves of each env's last observation; empty if all have arrays."""
        if self.trajectory.is_whole:
            return []
        return [self._encoded_at(accepted, index) for index, accepted in self.accepted.items()]

    def _encoded_at(self, step: int, index: int) -> bytes | None:
        """Return the encoded info and object leaves of the observation before a step; None without any."""
        if (step, index) in self.encoded_by_step:
            return self.encoded_by_step[step, index]
        cell = self.trajectory.cell(step - 1, index)
        if self.trajectory.info_encoding[cell] == PLAIN:
            return None
        large = self.large_infos.get(cell)
        return bytes(self.trajectory.inline_info(cell)) if large is None else large

    # The next steps --------------------------------------------------------------------------------------

    def next_kind(self, index: int) -> int:
        """Return the kind of an env's next step."""
        return KIND_RESET if index in self._reset_after_failure else next_kind(self._table.episodes, index)

    def plan_next(self, index: int) -> EnvPlan:
        """Plan the steps of an env from its next one on, and keep the seed of a reset in that one."""
        table, episodes, kind = self._table, self._table.episodes, self.next_kind(index)
        seed = episodes.next_seeds[index]
        root_seed = None if seed is None else episodes.root_seeds[index]
        if kind == KIND_RESET:
            seed = episodes.seed_of_reset(index, table.rows.incarnations[index])
        self.seeds[index] = seed
        kind_after_end = KIND_AFTER_END[episodes.autoreset.name]
        return EnvPlan(self.accepted[index], kind, kind_after_end, seed, root_seed, episodes.episode_numbers[index])

    def activity(self, index: int, call_id: int) -> Activity:
        """Return the next step of an env, for errors."""
        return Activity("reset" if self.next_kind(index) == KIND_RESET else "step", index, call_id)

    def posted(self, index: int) -> PostedRequest:
        """Return the next step of an env as rows would have it."""
        step, trajectory, within = self.accepted[index], self.trajectory, self._table.attach.resets_within_step
        op = RESET if self.next_kind(index) == KIND_RESET else 0
        has_payload = not op and trajectory.actions and self._table.slab.layout.action is None
        payload = self._pickled_action(step, index) if has_payload else None
        return PostedRequest(op, self.seeds[index], payload, within, [array[step] for array in trajectory.actions])

    def _pickled_action(self, step: int, index: int) -> bytes:
        """Return an action that has no place in rows: its spec is learned, and is that of one array."""
        return bytes(dumps(self.trajectory.actions[0][step, index].copy()[()]))

    # Failures --------------------------------------------------------------------------------------------

    def failed_in(self, running: Activity) -> list[int]:
        """Return the envs whose next step fails because the process has ended in this activity."""
        step = self.next_step
        at_step = [index for index, accepted in self.accepted.items() if accepted == step < self.steps]
        due = [index for index in at_step if self.next_kind(index) != KIND_REPEAT]
        if running.method == "policy" and self.trajectory.steps_chosen[self.indices.start] <= step:
            return due
        return [running.env] if running.method in ("step", "reset") and running.env in due else []

    def reset_next(self, index: int) -> None:
        """Have the next process reset an env within its next step, which has failed."""
        self._reset_after_failure.add(index)

    def truncate(self, index: int, incarnation: int) -> None:
        """Answer the next step of an env, which has failed, with its last observation.

        The env continues in the process with that incarnation.
        """
        step, trajectory = self.accepted[index], self.trajectory
        self._reset_after_failure.discard(index)
        trajectory.repeat_observation(step, index)
        if not trajectory.is_whole:
            self.encoded_by_step[step + 1, index] = self._encoded_at(step, index)
        trajectory.terminated[step, index] = False
        trajectory.truncated[step, index] = True
        trajectory.starts[step + 1, index] = False
        trajectory.kinds[step, index] = KIND_TRUNCATED
        trajectory.info_encoding[trajectory.cell(step, index)] = PLAIN
        trajectory.steps_done[index] = step + 1
        self.accepted[index] = step + 1
        self.incarnations[index] = incarnation

    def freeze_progress(self) -> None:
        """Accept no steps that the worker completes from now on, since it has missed a deadline."""
        self._done_in_time = self.trajectory.steps_done[self._slice].tolist()

    def drop_unaccepted(self) -> None:
        """Forget the steps that are not accepted: the worker that has missed a deadline has ended."""
        steps_chosen, first = self.trajectory.steps_chosen, self.indices.start
        self._done_in_time = None
        self.trajectory.steps_done[self._slice] = list(self.accepted.values())
        steps_chosen[first] = min(int(steps_chosen[first]), self.next_step + 1)

    # Accepting steps -------------------------------------------------------------------------------------

    def add_piece(self, key: int, content: bytes | memoryview) -> None:
        """Take a piece of a reply: steps of another machine, or the info of a cell that did not fit there."""
        if key == STEPS:
            self.trajectory.unpack(self.indices, content)
        else:
            self.large_infos[key] = bytes(content)

    def accept_completed(self) -> int:
        """Record the steps that the worker has completed in episodes and journals; return how many are new."""
        trajectory, mine = self.trajectory, self._slice
        before = list(self.accepted.values())
        reported: list[int] = trajectory.steps_done[mine].tolist()
        if self._done_in_time is not None:
            reported = self._done_in_time
        after = [min(max(new, old), self.steps) for new, old in zip(reported, before, strict=True)]
        if after == before:
            return 0
        low, high = min(before), max(after)
        ends = trajectory.terminated[low:high, mine] | trajectory.truncated[low:high, mine]
        flags = ends, trajectory.starts[low + 1 : high + 1, mine], trajectory.kinds[low:high, mine]
        # One row of bytes per env: slices of bytes are searched in a tenth of the time that short arrays take.
        rows = [array.T.tobytes() for array in flags]
        for position, index in enumerate(self.indices):
            old, new = before[position], after[position]
            if new > old:
                at = position * (high - low) - low
                self._accept_steps(index, old, *(row[at + old : at + new] for row in rows))
        return sum(after) - sum(before)

    def _accept_steps(self, index: int, first: int, ends: bytes, starts: bytes, kinds: bytes) -> None:
        """Record steps of an env in its episode and journal.

        Args:
            index: The env.
            first: The first of these steps.
            ends: Whether each has ended an episode.
            starts: Whether each has begun one.
            kinds: The kind of each.
        """
        table, trajectory = self._table, self.trajectory
        run = kinds.rstrip(bytes([KIND_REPEAT]))  # only repeats follow a repeat, and they are not recorded
        if run:
            if table.journals.is_recorded:
                self._record(index, first, starts[: len(run)], run)
            table.episodes.record_sequence(index, ends[: len(run)], run)
        self.seeds[index] = table.episodes.next_seeds[index]
        self.accepted[index] = first + len(kinds)
        self.incarnations[index] = table.rows.posted_in[index]
        if index in self._reset_after_failure:
            self._reset_after_failure.discard(index)
            trajectory.truncated[first, index] = True
            trajectory.kinds[first, index] = KIND_TRUNCATED

    def _record(self, index: int, first: int, starts: bytes, kinds: bytes) -> None:
        """Record steps of an env in its journal, which a seeded reset begins anew.

        Args:
            index: The env.
            first: The first of these steps.
            starts: Whether each has begun an episode.
            kinds: The kind of each: `KIND_STEP` or `KIND_RESET`.
        """
        table, trajectory, journal = self._table, self.trajectory, self._table.journals.of(index)
        end = first + len(kinds)
        checks: list[int] = trajectory.checks[first:end, index].tolist()
        position, seed = self._last_seeded_start(index, starts)
        if seed is not None:
            journal.begin(seed, checks[position])
        begin = 0 if seed is None else position + 1
        if begin == len(kinds):
            return
        if table.slab.layout.action is not None:
            actions = [array[first + begin : end, index].tobytes() for array in trajectory.actions]
            journal.record_steps(actions, kinds[begin:], checks[-1])
            return
        within = table.attach.resets_within_step
        for offset in range(begin, len(kinds)):
            is_reset = kinds[offset] == KIND_RESET
            payload = None if is_reset else self._pickled_action(first + offset, index)
            journal.record_request(PostedRequest(RESET * is_reset, None, payload, within, ()), checks[offset])

    def _last_seeded_start(self, index: int, starts: bytes) -> tuple[int, int | None]:
        """Return the position of the last start of an episode with a seed, and the seed; None if there is none.

        The worker derives the seeds of later episodes in the same way; see `EnvPlan.pass_boundary`.
        """
        episodes, count = self._table.episodes, starts.count(1)
        root_seed = episodes.root_seeds[index]
        if count > 1 and root_seed is not None and episodes.next_seeds[index] is not None:
            return starts.rindex(1), episode_seed(root_seed, episodes.episode_numbers[index] + count - 1)
        return starts.find(1), self.seeds[index] if count else None
