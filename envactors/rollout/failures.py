"""Steps of a rollout that have no results: carry out their fates."""

from __future__ import annotations

import operator

from envactors.actor.future import Outcome, ReadyOutcome
from envactors.errors import ActorError
from envactors.rollout.env_plan import KIND_REPEAT
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.vector.env_group import EnvGroup
from envactors.vector.episodes import NO_EPISODE
from envactors.vector.fates import EnvFate, RequestLoss


class RolloutFailures:
    """The failures of one actor's envs in a rollout. `EnvRecovery` decides about them, as it does about rows.

    Args:
        group: The actor's envs.
        envs: How far each has got.

    Attributes:
        errors_by_step: Errors of all failed steps, by (step, env). The thread that reads the result reads them.
        errors_to_raise: The errors of the envs that do not continue, by env.
        policy_error: The exception that the policy raised; None without one.
    """

    def __init__(self, group: EnvGroup, envs: RolloutEnvs) -> None:
        self.errors_by_step: dict[tuple[int, int], Outcome] = {}
        self.errors_to_raise: dict[int, Outcome] = {}
        self.policy_error: Outcome | None = None
        self._group = group
        self._envs = envs

    def fail_lost_envs(self, last_errors: dict[int, Outcome]) -> None:
        """Fail the envs that have lost their episode to an error in an earlier rollout, with that error."""
        episodes = self._group.table.episodes
        for index in self._envs.indices:
            if index in last_errors and episodes.needs_reset(index) and episodes.state(index) == NO_EPISODE:
                self._fail(index, last_errors[index])

    def fail_all(self, error: ActorError) -> None:
        """Fail all envs with steps left, unless they have failed before, with an error of the actor as a whole."""
        for index, step in self._envs.accepted_steps.items():
            if step < self._envs.steps and index not in self.errors_to_raise:
                self._fail(index, ReadyOutcome(None, error))

    def settle_lost_episodes(self, call_id: int) -> None:
        """Decide about the envs that cannot take their next step, since their episode was lost with their process.

        A loss concerns the next step of an env, and some envs are ahead of others. So this begins with those that are
        behind. If one of them has an error to raise, the rollout ends there: the envs ahead take no further step, and
        their losses are left to the next rollout or call of `step`.
        """
        envs, current, to_raise = self._envs, self._envs.next_step, self.errors_to_raise
        for index, step in sorted(envs.accepted_steps.items(), key=operator.itemgetter(1)):
            is_run = step < envs.steps and index not in to_raise and (step == current or not to_raise)
            if is_run and self._group.table.needs_lost_episode(index) and envs.next_kind(index) != KIND_REPEAT:
                loss = self._group.recovery.lost_episode_loss(envs.activity(index, call_id))
                self.recover(index, loss)

    def recover(self, index: int, loss: RequestLoss) -> None:
        """Decide the fate of an env's next step, which has no result, and carry it out.

        An error to raise ends the part. Otherwise the next order runs the step again, or resets the env within it, or
        begins after it, since it was truncated.
        """
        envs = self._envs
        decision, error = self._group.recovery.apply_fate(index, loss, envs.posted(index))
        if decision.fate is EnvFate.REDO:
            return
        self.errors_by_step[envs.accepted_steps[index], index] = error
        if decision.fate is EnvFate.RESET:
            envs.reset_after_failure.add(index)
        elif decision.fate is EnvFate.TRUNCATE:
            envs.truncate(index, self._group.recovery.next_incarnation(loss))
        else:
            self._fail(index, error)

    def _fail(self, index: int, error: Outcome) -> None:
        """Fail an env at its next step with an error to raise."""
        self.errors_to_raise[index] = self.errors_by_step[self._envs.accepted_steps[index], index] = error
