"""The envs of one actor in a rollout, as the caller sees them under the lock of the vector.

    `read_rows`         the rollout begins with the last observations, which are in the rows of the envs
    `accept_completed`  each completed step advances the episode and the journal of its env
    `apply_fate`        a step has failed: it runs again, or has another result, or the rollout of the actor ends
    `write_rows`        the rollout ends: the rows get the last results, as if steps had written them

In between, the episodes and journals are up to date, and the rows are not. Of rollouts, `envactors.vector` knows
this:

- `EnvTable` records which are in flight. `RowEngine` refuses steps meanwhile, and resets wait.
- `Rows` records which process has the current order.
- `Episodes.record_sequence` records several steps of an env. A reset among them does not clear `RETIRING` if an end of
  an episode among them has set it.
- `EnvTable.reports_lost_episode` counts an env in a rollout as one with a bare step.
- `EnvRecovery` reads no observations from rows meanwhile.
- `EnvGroup` ends the parts of its actor after an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import Outcome, ReadyOutcome
from envactors.actor.job import Activity
from envactors.errors import ActorError
from envactors.mailbox.info_codec import INLINE_INFO, OVERFLOW, PLAIN
from envactors.mailbox.slab import slice_of
from envactors.replay import PostedRequest
from envactors.rollout.completed_steps import kinds_of_results, record_steps, request_at
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, KIND_TRUNCATED, EnvPlan, kind_after_end, next_kind
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.trajectory import Trajectory
from envactors.vector.env_group import EnvGroup
from envactors.vector.fates import EnvFate, RequestLoss


class RolloutEnvs:
    """How far each env of one actor has got, what it does next, its last result, and its errors.

    `EnvRecovery` decides about failures, as it does about rows.

    The *next step* of an env is the first one that is not accepted. The *content* of a result is its encoded info and
    object leaves, which have no arrays; None without any.

    Args:
        group: The actor's envs.
        buffer: The trajectory.

    Attributes:
        indices: Indices of the envs.
        steps: Number of steps of the rollout.
        accepted_steps: How many steps of each env are accepted, by env.
        errors_by_step: Errors of all failed steps, by (step, env). The thread that reads the result reads them.
        errors_to_raise: The errors of the envs that do not continue, by env.
    """

    def __init__(self, group: EnvGroup, buffer: TrajectoryBuffer) -> None:
        self.indices: range = group.indices
        self.steps: int = buffer.trajectory.layout.steps
        self.accepted_steps: dict[int, int] = dict.fromkeys(group.indices, 0)
        self.errors_by_step: dict[tuple[int, int], Outcome] = {}
        self.errors_to_raise: dict[int, Outcome] = {}
        self._table = group.table
        self._recovery = group.recovery
        self._buffer = buffer
        # The envs whose step has failed under ``autoreset="same_step"``: the next process resets them, as the result of
        # that step.
        self._reset_after_failure: set[int] = set()
        # The plans of the last order, by env; empty before the first. Their seeds are kept up to date, and their kinds
        # and first steps are not.
        self._sent_plans: dict[int, EnvPlan] = {}
        # The ``incarnation`` of each env's last result, by env; see `envactors.vector.results.EnvStep`.
        self._incarnations: dict[int, int] = dict.fromkeys(group.indices, 0)
        # The content of each env's result before the rollout, in the order of ``indices``.
        self._first_contents: list[bytes | None] = []
        # The contents of steps that are not in the trajectory, by `Trajectory.cell`: large ones, and those that a
        # truncation repeats.
        self._large_contents: dict[int, bytes] = {}

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps of all actors are written into."""
        return self._buffer.trajectory

    @property
    def next_step(self) -> int:
        """The next step of the env that has got least far: the first one that the next order runs."""
        return min(self.accepted_steps.values())

    # Last results ----------------------------------------------------------------------------------------

    def read_rows(self) -> None:
        """Copy the last observations of the envs to the first row of the trajectory."""
        last_rows, mine = self._table.last_rows, slice_of(self.indices)
        self.trajectory.starts[0, mine] = last_rows.are_first(mine)
        ids, halves = np.arange(mine.start, mine.stop), last_rows.buffers(mine)
        for in_rows, in_trajectory in self._observations():
            in_trajectory[0, mine] = in_rows[halves, ids]
        self._first_contents = last_rows.contents[mine]

    def write_rows(self) -> None:
        """Copy the last results to the rows of the envs. To do that again changes nothing.

        Envs that have taken no steps keep their rows. Repeats do not count.
        """
        last_rows, slab, trajectory = self._table.last_rows, self._table.slab, self.trajectory
        taken = {index: len(kinds_of_results(trajectory, index, 0, end)) for index, end in self.accepted_steps.items()}
        ids = np.array([index for index in taken if taken[index]], np.intp)
        after = np.array([taken[index] for index in taken if taken[index]], np.intp)
        halves = last_rows.buffers(ids)
        for in_rows, in_trajectory in self._observations():
            in_rows[halves, ids] = in_trajectory[after, ids]
        if slab.layout.reward is not None:
            slab.rewards[halves, ids] = trajectory.rewards[after - 1, ids]
        starts, slab.terminated[halves, ids], slab.truncated[halves, ids] = trajectory.flags[:3, after, ids]

        for index, is_first in zip(ids.tolist(), starts.tolist(), strict=True):
            content = self.content_before(taken[index], index)
            last_rows.note_written(index, content, self._incarnations[index], is_first=is_first)

    def _observations(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield the array in the rows, and the one in the trajectory, of each leaf that has both."""
        for in_rows, in_trajectory in zip(self._table.slab.observations, self.trajectory.observations, strict=True):
            if in_rows is not None and in_trajectory is not None:
                yield in_rows, in_trajectory

    def content_before(self, step: int, index: int) -> bytes | None:
        """Return the content of the result whose observation is the one before a step."""
        if step == 0:
            return self._first_contents[index - self.indices.start]
        cell = self.trajectory.cell(step - 1, index)
        encoding = self.trajectory.info_encoding[cell]
        if encoding == INLINE_INFO:
            return bytes(self.trajectory.inline_info(cell))
        return None if encoding == PLAIN else self._large_contents.get(cell)

    def add_large_content(self, cell: int, content: bytes) -> None:
        """Keep the content of a step that does not fit into its cell."""
        self._large_contents[cell] = content

    # Accepted steps --------------------------------------------------------------------------------------

    def accept_completed(self) -> int:
        """Accept all steps that are complete and were not accepted; return how many there are."""
        before = sum(self.accepted_steps.values())
        steps_complete = self.trajectory.steps_complete[slice_of(self.indices)].tolist()
        for index, complete in zip(self.indices, steps_complete, strict=True):
            if (end := min(complete, self.steps)) > self.accepted_steps[index]:
                self._accept(index, end)
        return sum(self.accepted_steps.values()) - before

    def _accept(self, index: int, end: int) -> None:
        """Accept the next steps of an env. If the first of them is the reset after a failure, it counts as truncated.

        Args:
            index: The env.
            end: The step after the last one.
        """
        step, trajectory = self.accepted_steps[index], self.trajectory
        begun = record_steps(self._table, trajectory, self._sent_plans[index], index, range(step, end))
        self._sent_plans[index].advance_seeds(begun)
        self.accepted_steps[index] = end
        self._incarnations[index] = self._table.rows.posted_incarnations[index]
        if index in self._reset_after_failure:
            self._reset_after_failure.discard(index)
            trajectory.truncated[step, index] = True
            trajectory.kinds[step, index] = KIND_TRUNCATED

    def drop_unaccepted(self) -> None:
        """Forget steps that are complete but not accepted, and actions chosen for later steps than the next."""
        trajectory, first = self.trajectory, self.indices.start
        trajectory.steps_complete[slice_of(self.indices)] = list(self.accepted_steps.values())
        trajectory.steps_chosen[first] = min(trajectory.steps_chosen[first], self.next_step + 1)

    # The next steps --------------------------------------------------------------------------------------

    def next_kind(self, index: int) -> int:
        """Return the kind of an env's next step."""
        return KIND_RESET if index in self._reset_after_failure else next_kind(self._table.episodes, index)

    def make_plans(self) -> list[EnvPlan]:
        """Plan the steps of each env from its next one on."""
        table, episodes = self._table, self._table.episodes
        after_end, within_step = kind_after_end(episodes), episodes.autoreset.resets_within_step
        for index, first_step in self.accepted_steps.items():
            kind, seed = self.next_kind(index), episodes.next_seeds[index]
            root_seed = None if seed is None else episodes.root_seeds[index]
            if kind == KIND_RESET:
                seed = episodes.seed_of_reset(index, table.rows.incarnations[index])
            next_episode = episodes.episode_numbers[index]
            self._sent_plans[index] = EnvPlan(first_step, kind, after_end, within_step, seed, root_seed, next_episode)
        return [*self._sent_plans.values()]

    def last_contents(self) -> list[bytes | None]:
        """Return the content of each env's last result; empty if all leaves of observations have arrays."""
        if self.trajectory.has_all_leaves:
            return []
        return [self.content_before(step, index) for index, step in self.accepted_steps.items()]

    def activity(self, index: int, call_id: int) -> Activity:
        """Return the next step of an env, for errors."""
        return Activity("reset" if self.next_kind(index) == KIND_RESET else "step", index, call_id)

    def posted(self, index: int) -> PostedRequest:
        """Return the next step of an env as a row would have it."""
        plan, is_reset = self._sent_plans.get(index), self.next_kind(index) == KIND_RESET
        seed = None if plan is None else plan.seed
        return request_at(self._table, self.trajectory, self.accepted_steps[index], index, is_reset=is_reset, seed=seed)

    # Failures --------------------------------------------------------------------------------------------

    def failed_in(self, running: Activity) -> list[int]:
        """Return the envs whose next step fails because the process has ended in this activity.

        After a step or reset, that is its env, unless its result was complete. After a call of the policy, also of its
        `load`, that is each env whose action comes next, unless that was written. So a policy that crashes in each
        process ends with the rollout. An env whose episode is over fails in neither: its next process repeats the last
        observation. Making the policy belongs to the start of a process, so no env fails in that, and only
        `RestartPolicy` limits how often it is tried.
        """
        step = self.next_step
        at_step = [index for index, accepted in self.accepted_steps.items() if accepted == step < self.steps]
        acting = [index for index in at_step if self.next_kind(index) != KIND_REPEAT]
        if running.method == "policy" and self.trajectory.steps_chosen[self.indices.start] <= step:
            return acting
        return [running.index] if running.method in ("step", "reset") and running.index in acting else []

    def fail_lost(self, last_errors: dict[int, Outcome]) -> None:
        """Fail the envs that have lost their episode to an error in an earlier rollout, with that error."""
        episodes = self._table.episodes
        for index in self.indices:
            if index in last_errors and episodes.needs_reset(index) and not episodes.has_episode(index):
                self._fail(index, last_errors[index])

    def fail_all(self, error: ActorError) -> None:
        """Fail all envs with steps left, unless they have failed before, with an error of the actor as a whole."""
        for index, step in self.accepted_steps.items():
            if step < self.steps and index not in self.errors_to_raise:
                self._fail(index, ReadyOutcome(None, error))

    def settle_lost_episodes(self, call_id: int) -> None:
        """Decide about the envs that cannot take their next step, since their episode was lost with their process.

        A loss concerns the next step of an env, and some envs are ahead of others. So this begins with those that are
        behind. If one of them has an error to raise, the rollout ends there: the envs ahead take no further step, and
        their losses are left to the next rollout or call of `step`.
        """
        current = self.next_step
        for step, index in sorted((step, index) for index, step in self.accepted_steps.items()):
            if step == self.steps or (step > current and self.errors_to_raise):
                return
            continues = index not in self.errors_to_raise and self.next_kind(index) != KIND_REPEAT
            if continues and self._table.needs_lost_episode(index):
                self.apply_fate(index, self._recovery.lost_episode_loss(self.activity(index, call_id)))

    def apply_fate(self, index: int, loss: RequestLoss) -> None:
        """Decide the fate of an env's next step, which has no result, and apply it.

        An error to raise ends the rollout of the actor. Otherwise the next order runs the step again, or resets the env
        within it, or begins after it, since it was truncated.
        """
        decision, error = self._recovery.apply_fate(index, loss, self.posted(index))
        if decision.fate is EnvFate.REDO:
            return
        self.errors_by_step[self.accepted_steps[index], index] = error
        if decision.fate is EnvFate.RESET:
            self._reset_after_failure.add(index)
        elif decision.fate is EnvFate.TRUNCATE:
            self._truncate(index, self._recovery.next_incarnation(loss))
        else:
            self._fail(index, error)

    def _fail(self, index: int, error: Outcome) -> None:
        """Fail an env at its next step with an error to raise."""
        self.errors_to_raise[index] = self.errors_by_step[self.accepted_steps[index], index] = error

    def _truncate(self, index: int, incarnation: int) -> None:
        """Accept the last observation of an env as the result of its next step, which has failed.

        It ends the episode. The env continues in the process with that incarnation.
        """
        step, trajectory = self.accepted_steps[index], self.trajectory
        trajectory.repeat_observation(step, index)
        trajectory.terminated[step, index] = False
        trajectory.truncated[step, index] = True
        trajectory.starts[step + 1, index] = False
        trajectory.kinds[step, index] = KIND_TRUNCATED

        cell = trajectory.cell(step, index)
        content = None if trajectory.has_all_leaves else self.content_before(step, index)
        trajectory.info_encoding[cell] = PLAIN if content is None else OVERFLOW
        if content is not None:
            self._large_contents[cell] = content

        self._incarnations[index] = incarnation
        self._reset_after_failure.discard(index)
        trajectory.steps_complete[index] = self.accepted_steps[index] = step + 1
