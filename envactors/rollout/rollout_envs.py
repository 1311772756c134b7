"""The envs of one actor in a rollout, as the caller sees them under the lock of the vector.

    `RolloutLastResults.read_rows`   the rollout begins with the last observations, which are in the rows of the envs
    `accept_completed`               each completed step advances the episode and the journal of its env
    `RolloutLastResults.write_rows`  the rollout ends: the rows get the last results, as if steps had written them

In between, the episodes and journals are up to date, and the rows are not. Of rollouts, `envactors.vector` knows
this:

- `EnvTable` records how many are in flight, and which process has the current order. `RowEngine` refuses steps
  meanwhile, and resets wait.
- `EnvRecovery` reads no observations from rows meanwhile.
- `EnvGroup` ends the parts of its actor after an interrupt.
"""

from __future__ import annotations

from envactors.actor.activity import Activity
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import RESET, slice_of
from envactors.replay import PostedRequest
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, KIND_TRUNCATED, EnvPlan, kind_after_end, next_kind
from envactors.rollout.last_results import RolloutLastResults
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.trajectory import Trajectory
from envactors.vector.table import EnvTable


class RolloutEnvs:
    """How far each env of one actor has got, and what it does next.

    The *next step* of an env is the first one that is not accepted. `accept` takes the steps that the worker has
    completed, and `truncate` answers a step that has failed.

    Args:
        table: The envs of the vector.
        indices: Indices of the actor's envs.
        buffer: The trajectory.

    Attributes:
        indices: As above.
        steps: Number of steps of the rollout.
        accepted_steps: How many steps of each env are accepted, by env.
        plans: The plan of each env in the last order, by env; empty before the first order. Its seed is that of the
            next reset.
        reset_after_failure: The envs whose next step has failed, and within which the next process resets them, as
            ``autoreset="same_step"`` demands.
        last_results: The last results of the envs.
    """

    def __init__(self, table: EnvTable, indices: range, buffer: TrajectoryBuffer) -> None:
        self.indices = indices
        self.steps: int = buffer.trajectory.layout.steps
        self.accepted_steps: dict[int, int] = dict.fromkeys(indices, 0)
        self.plans: dict[int, EnvPlan] = {}
        self.last_results: RolloutLastResults = RolloutLastResults(table, indices, buffer)
        self._table = table
        self._buffer = buffer
        self.reset_after_failure: set[int] = set()

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps of all actors are written into."""
        return self._buffer.trajectory

    @property
    def next_step(self) -> int:
        """The next step of the env that has got least far: the first one that the next order runs."""
        return min(self.accepted_steps.values())

    def accept(self, index: int, count: int, begun: int) -> None:
        """Accept steps of an env. If the first of them is the reset after a failure, it counts as truncated.

        Args:
            index: The env.
            count: How many steps.
            begun: How many episodes have begun in them.
        """
        step, trajectory = self.accepted_steps[index], self.trajectory
        self.plans[index].advance_seeds(begun)
        self.accepted_steps[index] = step + count
        self.last_results.incarnations[index] = self._table.rows.posted_incarnations[index]
        if index in self.reset_after_failure:
            self.reset_after_failure.discard(index)
            trajectory.truncated[step, index] = True
            trajectory.kinds[step, index] = KIND_TRUNCATED

    # The next steps --------------------------------------------------------------------------------------

    def next_kind(self, index: int) -> int:
        """Return the kind of an env's next step."""
        return KIND_RESET if index in self.reset_after_failure else next_kind(self._table.episodes, index)

    def make_plans(self) -> list[EnvPlan]:
        """Plan the steps of each env from its next one on."""
        table, episodes = self._table, self._table.episodes
        for index, first_step in self.accepted_steps.items():
            kind, seed = self.next_kind(index), episodes.next_seeds[index]
            root_seed = None if seed is None else episodes.root_seeds[index]
            if kind == KIND_RESET:
                seed = episodes.seed_of_reset(index, table.rows.incarnations[index])
            after_end, episode = kind_after_end(episodes.autoreset), episodes.episode_numbers[index]
            self.plans[index] = EnvPlan(first_step, kind, after_end, seed, root_seed, episode)
        return [*self.plans.values()]

    def last_contents(self) -> list[bytes | None]:
        """Return the content of each env's last result; empty if all leaves of observations have arrays."""
        if self.trajectory.has_all_leaves:
            return []
        return [self.last_results.content_before(step, index) for index, step in self.accepted_steps.items()]

    def activity(self, index: int, call_id: int) -> Activity:
        """Return the next step of an env, for errors."""
        return Activity("reset" if self.next_kind(index) == KIND_RESET else "step", index, call_id)

    def posted(self, index: int) -> PostedRequest:
        """Return the next step of an env as a row would have it."""
        step, trajectory, plan = self.accepted_steps[index], self.trajectory, self.plans.get(index)
        op = RESET if self.next_kind(index) == KIND_RESET else 0
        has_payload = not op and trajectory.actions and self._table.slab.layout.action is None
        payload = self.pickled_action(step, index) if has_payload else None
        within, actions = self._table.attach.resets_within_step, [array[step] for array in trajectory.actions]
        return PostedRequest(op, None if plan is None else plan.seed, payload, within, actions)

    def pickled_action(self, step: int, index: int) -> bytes:
        """Return the action of a step, if the action spec is inferred: rows have no memory for it.

        An inferred spec is that of one array.
        """
        return bytes(dumps(self.trajectory.actions[0][step, index].copy()[()]))

    # Failures --------------------------------------------------------------------------------------------

    def failed_in(self, running: Activity) -> list[int]:
        """Return the envs whose next step fails because the process has ended in this activity.

        After a step or reset, that is its env, unless its result was complete. After a call of the policy, that is each
        env whose actions it was choosing, unless it had written them.
        """
        step = self.next_step
        at_step = [index for index, accepted in self.accepted_steps.items() if accepted == step < self.steps]
        due = [index for index in at_step if self.next_kind(index) != KIND_REPEAT]
        if running.method == "policy" and self.trajectory.steps_chosen(self.indices) <= step:
            return due
        return [running.index] if running.method in ("step", "reset") and running.index in due else []

    def truncate(self, index: int, incarnation: int) -> None:
        """Accept the last observation of an env as the result of its next step, which has failed.

        The env continues in the process with that incarnation.
        """
        step = self.accepted_steps[index]
        self.reset_after_failure.discard(index)
        self.last_results.truncate(step, index, incarnation)
        self.trajectory.steps_written[index] = step + 1
        self.accepted_steps[index] = step + 1

    def drop_late_steps(self) -> None:
        """Drop the steps that were not accepted, since the ended worker completed them after a deadline."""
        self.trajectory.steps_written[slice_of(self.indices)] = list(self.accepted_steps.values())
        chosen = min(self.trajectory.steps_chosen(self.indices), self.next_step + 1)
        self.trajectory.set_steps_chosen(self.indices, chosen)
