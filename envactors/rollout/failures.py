"""What becomes of the steps of a rollout that have no results."""

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
    """The failures of one actor's envs in a rollout. `EnvRecovery` has the rules, which rows share.

    Args:
        group: The actor's envs.
        envs: How far each has got.

    Attributes:
        errors_by_step: Errors of envs, by (step, env), also of those that continue. The thread that reads the result
            reads them.
        errors_by_env: Those to raise, by env; the envs do not continue.
    """

    def __init__(self, group: EnvGroup, envs: RolloutEnvs) -> None:
        self.errors_by_step: dict[tuple[int, int], Outcome] = {}
        self.errors_by_env: dict[int, Outcome] = {}
        self._group = group
        self._envs = envs

    def fail_lost_envs(self, last_errors_by_env: dict[int, Outcome]) -> None:
        """Fail the envs that an earlier rollout has lost, with their last errors."""
        episodes = self._group.table.episodes
        for index in self._envs.indices:
            has_lost = episodes.needs_reset(index) and episodes.state(index) == NO_EPISODE
            if has_lost and index in last_errors_by_env:
                self._fail(index, last_errors_by_env[index])

    def fail_all(self, error: ActorError) -> None:
        """Fail all envs that lack steps, and have no error yet, with an error of the actor as a whole."""
        for index, step in self._envs.accepted.items():
            if step < self._envs.steps and index not in self.errors_by_env:
                self._fail(index, ReadyOutcome(None, error))

    def settle_lost_episodes(self, call_id: int) -> None:
        """Decide about envs that cannot take their next step, since their episode was lost with their process.

        Those at the current step come first: an error to raise makes it the last one of the rollout. The losses of envs
        that are ahead are then left to the next rollout, or the next call of `step`.
        """
        envs, current = self._envs, self._envs.next_step
        for index, step in sorted(envs.accepted.items(), key=operator.itemgetter(1)):
            is_taken = step < envs.steps and (step == current or not self.errors_by_env)
            if is_taken and self._group.table.needs_lost_episode(index) and envs.next_kind(index) != KIND_REPEAT:
                loss = self._group.recovery.lost_episode_loss(envs.activity(index, call_id))
                self.recover(index, loss)

    def recover(self, index: int, loss: RequestLoss) -> None:
        """Have the fate of a step without a result decided, and carry it out; an error to raise ends the part."""
        envs = self._envs
        decision, error = self._group.recovery.apply_fate(index, loss, envs.posted(index))
        if decision.fate is EnvFate.REDO:
            return
        self.errors_by_step[envs.accepted[index], index] = error
        if decision.fate is EnvFate.RESET:
            envs.reset_next(index)
        elif decision.fate is EnvFate.TRUNCATE:
            envs.truncate(index, self._group.recovery.next_incarnation(loss))
        else:
            self._fail(index, error)

    def _fail(self, index: int, error: Outcome) -> None:
        """Fail an env at its next step with an error to raise."""
        self.errors_by_env[index] = self.errors_by_step[self._envs.accepted[index], index] = error
