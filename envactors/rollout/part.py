"""One actor's part of a rollout: orders to its worker, until every env has taken every step or an error ends it.

    order ──▶ the worker calls the policy and steps its envs ──▶ it is done, an env raised, or the process ended
      ▲                                                                            │
      └── the rest, once `envactors.vector.fates` has decided about each env ◀──┘

Everything runs under the lock of the vector.
"""

from __future__ import annotations

import operator
from typing import Protocol

from envactors.actor.activity import Activity
from envactors.actor.future import Outcome
from envactors.actor.job import ErrorOf, Job, ProcessExit, Renewal
from envactors.actor.timers import deadline_of
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError
from envactors.mailbox import bundle
from envactors.mailbox.control_page import METHOD_CALL, METHOD_NAMES, METHOD_POLICY
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import RESET as RESET_BIT
from envactors.replay import PostedRequest
from envactors.rollout import policy_loop
from envactors.rollout.actor_trajectory import ActorTrajectory
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import STEPS, MirroredSteps, Order, OrderReply, Parameters, PolicyRecipe
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET
from envactors.vector.env_group import EnvGroup
from envactors.vector.episodes import NO_EPISODE
from envactors.vector.fates import EnvFate, RequestLoss


class WholeRollout(Protocol):
    """A rollout, as its parts see it; see `envactors.rollout.engine.RolloutInFlight`."""

    buffer: TrajectoryBuffer
    index: int
    recipe: PolicyRecipe
    parameters: Parameters | None
    last_errors_by_env: dict[int, Outcome]

    def on_part_end(self, part: RolloutPart) -> None:
        """Deliver the result of a part, or that of all parts with the last one; again after an interrupt."""


class RolloutPart(Job):
    """One actor's part of a rollout: a job of many steps, which continues in the next process.

    Args:
        group: The actor's envs.
        rollout: The rollout.

    Attributes:
        trajectory: The actor's share of the trajectory, which tells how far each env has got.
        errors_by_step: Errors of envs, by (step, env), also of those that continue. The thread that reads the result
            reads them.
        errors_by_env: Those to raise, by env; the envs do not continue.
        policy_error: The exception that the policy raised.
        actor_error: Error of the actor as a whole, to raise for each of its envs.
        has_ended: Whether the part has ended, and its result is complete.
    """

    needs_permit = True
    survives_interrupt = False

    def __init__(self, group: EnvGroup, rollout: WholeRollout) -> None:
        self.trajectory: ActorTrajectory = ActorTrajectory(group.table, group.indices, rollout.buffer)
        self.errors_by_step: dict[tuple[int, int], Outcome] = {}
        self.errors_by_env: dict[int, Outcome] = {}
        self.policy_error: Outcome | None = None
        self.actor_error: ActorError | None = None
        self.has_ended: bool = False
        self._group = group
        self._table = group.table
        self._actor = group.actor
        # None once its end is reported. If an interrupt comes between `has_ended` and that, the end is reported again.
        self._reports_to: WholeRollout | None = rollout
        self._buffer = rollout.buffer
        # Whether the worker makes the policy first: in the current order or, between two orders, in the next one.
        self._makes_policy = False
        # What has missed its deadline: a step, a reset, a call of the policy, or the order; None if nothing has.
        self._late: Activity | None = None
        # Whether the worker is on another machine, whose steps come with replies.
        self._is_remote: bool = group.actor.config.backend.traits.is_remote

    @property
    def _has_other_parts(self) -> bool:
        """Whether the actor has a part of another rollout."""
        return any(isinstance(job, RolloutPart) and job is not self for job in self._actor.jobs.unfinished)

    @property
    def _activity_of_order(self) -> Activity:
        """The current order as a whole."""
        method = "set_policy" if self._makes_policy else "rollout"
        return Activity(method, self.trajectory.envs.start, self.call_id, self.started, self.deadline)

    @property
    def _needs_no_order(self) -> bool:
        """Whether all steps are complete, or an error ends the rollout."""
        return bool(self.errors_by_env) or self.trajectory.next_step >= self.trajectory.steps

    # The job ---------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Queue the part behind the other jobs of its actor."""
        if not self._has_other_parts:
            self._renew_if_due(first=False)
        self._actor.jobs.enqueue(self)

    def _renew_if_due(self, *, first: bool) -> None:
        """Queue the replacement of the process, ahead of all jobs if ``first``, if it is due at the reset of an env."""
        episodes = self._table.episodes
        if any(episodes.is_retiring(index) and episodes.resets_next[index] for index in self.trajectory.envs):
            self._actor.jobs.enqueue(Renewal(reason=self._group.recycler.reason), first=first)

    def start(self) -> Job | None:
        """Order the next steps."""
        rollout, actor = self._reports_to, self._actor
        if rollout is None:
            return None
        if not self.trajectory.has_begun:
            self._begin(rollout)
        self._answer_lost_episodes()
        if self._needs_no_order:
            self._end()
            return None
        self._table.begin_rollout(self.trajectory.envs, self.call_id)
        order = self._make_order(rollout)
        if self._is_remote:
            self._mirror_steps()
        self.deadline: float | None = actor.config.deadlines.start if self._makes_policy else None
        actor.deadline_watch.watch(self.started, self.deadline)
        actor.send(Kind.EXTEND, self.call_id, dumps((policy_loop.run_rollout, tuple(order))))
        return self

    def _make_order(self, rollout: WholeRollout) -> Order:
        trajectory, autoreset = self.trajectory, self._table.episodes.autoreset
        plans = [trajectory.plan_next(index) for index in trajectory.envs]
        trajectory.seeds.update(zip(trajectory.envs, (plan.seed for plan in plans), strict=True))
        return Order(
            policy_id=rollout.recipe.policy_id,
            recipe=rollout.recipe if self._makes_policy else None,
            rollout_index=rollout.index,
            first_step=trajectory.next_step,
            end_step=trajectory.steps,
            layout=self._buffer.pickled_layout,
            places=self._buffer.places,
            parameters=rollout.parameters,
            plans=[tuple(plan) for plan in plans],
            resets_within_step=autoreset.resets_within_step,
            op_after_end=OP_RESET if autoreset.resets_next_step else OP_REPEAT,
            last_leaves=trajectory.last_leaves(),
        )

    def _begin(self, rollout: WholeRollout) -> None:
        """Begin, and fail the envs that an earlier rollout has lost."""
        episodes = self._table.episodes
        self.trajectory.begin()
        for index in self.trajectory.envs:
            has_lost = episodes.needs_reset(index) and episodes.state(index) == NO_EPISODE
            if has_lost and index in rollout.last_errors_by_env:
                self.errors_by_env[index] = self.errors_by_step[0, index] = rollout.last_errors_by_env[index]

    def _mirror_steps(self) -> None:
        """Send the memory of the next step to the other machine. What the worker adds comes back with the reply."""
        worker = self._actor.process.worker
        trajectory, step = self.trajectory, self.trajectory.next_step
        assert worker is not None, "jobs start in a live process"
        steps = MirroredSteps(self._buffer.places, self._buffer.pickled_layout, trajectory.envs, step)
        worker.mirror(steps, trajectory.arrays.pack(trajectory.envs, step, step + 1))

    def activity(self) -> Activity | None:
        """Return what the worker runs, or else the order as a whole; None without a worker. What is late stays."""
        worker = self._actor.process.worker
        if self._late is not None:
            return self._late
        if worker is None:
            return None
        progress = worker.page.progress()
        if progress.call_id != self.call_id or progress.method == METHOD_CALL:
            return self._activity_of_order
        deadline = deadline_of(progress.method, self._actor.config.deadlines)
        # The policy acts for all envs. Env code may overwrite the position.
        envs, position = self.trajectory.envs, progress.position
        index = envs[position if progress.method != METHOD_POLICY and 0 <= position < len(envs) else 0]
        return Activity(METHOD_NAMES[progress.method], index, self.call_id, progress.since, deadline)

    def on_late(self, activity: Activity) -> None:
        """Ignore later progress of the worker, if its progress is known here."""
        self._late = activity
        if not self._is_remote:
            self.trajectory.freeze_progress()

    def on_reply_piece(self, frame: Frame) -> None:
        """Keep infos that did not fit into the trajectory, and write steps that come from another machine."""
        for key, content in bundle.unpack(frame.payload):
            if key == STEPS:
                self.trajectory.arrays.unpack(self.trajectory.envs, content)
            else:
                self.trajectory.large_infos[key] = bytes(content)

    def on_reply(self, frame: Frame) -> bool:
        """Accept the steps, and decide about an env that raised; the part ends with its last step or an error."""
        self._actor.jobs.record_completed(self.trajectory.accept_completed())
        if frame.kind == Kind.FAILED:
            activity = self.activity() or self._activity_of_order
            self.policy_error = self._actor.errors.outcome(activity, frame, self._actor.pid)
            self._end()
            return True
        reply = OrderReply(*loads(frame.payload))
        self._makes_policy = reply.lacks_policy
        if reply.failure is not None:
            index = self.trajectory.envs[reply.position]
            self._recover(index, self._group.recovery.raised_loss(self._activity_of(index), reply.failure))
        if reply.layout is not None:
            try:
                self._buffer.add_room(reply.layout)
            except OSError as error:
                activity, incarnation = self._activity_of_order, self._actor.process.incarnation
                self.actor_error = self._actor.errors.out_of_memory(activity, incarnation, error)
                self._end()
                return True
        if self._needs_no_order:
            self._end()
            return True
        return False

    def accept_completed(self) -> None:
        """Accept the steps that an ended process has completed, and forget those after a deadline."""
        self._actor.jobs.record_completed(self.trajectory.accept_completed())
        if self._late is not None:
            self.trajectory.drop_unaccepted()

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the step that an ended process was running, and the requests before it; nothing of the policy."""
        if culprit.method == "policy" or culprit.env not in self._envs_failed_in(culprit):
            return Inputs()
        return self._group.recovery.step_inputs(culprit.env, self._posted(culprit.env))

    def after_exit(self, ended: ProcessExit) -> bool:
        """Decide about the envs of an ended process, and continue in the next one."""
        self._late = None
        self._makes_policy = True
        is_complete = self.trajectory.next_step >= self.trajectory.steps  # the worker had only to reply
        if ended.culprit is not None and not is_complete:
            loss = self._group.recovery.exit_loss(ended.culprit, ended)
            for index in self._envs_failed_in(ended.culprit):
                self._recover(index, loss)
        if ended.plan.has_process:
            self._answer_lost_episodes()
            if not self._needs_no_order:
                return False
        elif not is_complete:
            self.actor_error = ended.error
        self._end()
        return True

    def fail(self, error_of: ErrorOf) -> None:
        """End: no process will run the rest."""
        if not self.has_ended:
            self.actor_error = error_of(self._activity_of_order)
        self._end()

    # Failures --------------------------------------------------------------------------------------------

    def _envs_failed_in(self, running: Activity) -> list[int]:
        """Return the envs whose next step fails because the process has ended in this activity."""
        trajectory, step = self.trajectory, self.trajectory.next_step
        left = [index for index, accepted in trajectory.accepted.items() if accepted == step < trajectory.steps]
        if running.method == "policy" and not trajectory.has_next_actions:
            return [index for index in left if not trajectory.repeats(index)]
        if running.method in ("step", "reset") and running.env in left:
            return [running.env]
        return []

    def _answer_lost_episodes(self) -> None:
        """Decide about envs that cannot take their next step, since their episode was lost with their process.

        Those at the current step come first: an error to raise makes it the last one of the rollout. The losses of envs
        that are ahead are then left to the next rollout, or the next call of `step`.
        """
        trajectory, current = self.trajectory, self.trajectory.next_step
        for index, step in sorted(trajectory.accepted.items(), key=operator.itemgetter(1)):
            is_taken = step < trajectory.steps and (step == current or not self.errors_by_env)
            if is_taken and self._table.cannot_continue(index) and not trajectory.repeats(index):
                self._recover(index, self._group.recovery.lost_episode_loss(self._activity_of(index)))

    def _recover(self, index: int, loss: RequestLoss) -> None:
        """Have the fate of a step without a result decided, and carry it out; an error to raise ends the part."""
        trajectory = self.trajectory
        decision, error = self._group.recovery.end_attempt(index, loss, self._posted(index))
        if decision.fate is EnvFate.REDO:
            return
        self.errors_by_step[trajectory.accepted[index], index] = error
        if decision.fate is EnvFate.RESET:
            trajectory.reset_after_failure.add(index)
            return
        trajectory.reset_after_failure.discard(index)
        if decision.fate is EnvFate.TRUNCATE:
            trajectory.truncate(index, self._group.recovery.next_incarnation(loss))
        else:
            self.errors_by_env[index] = error

    def _posted(self, index: int) -> PostedRequest:
        """Return the next step of an env as rows would have it."""
        trajectory = self.trajectory
        op = RESET_BIT if trajectory.resets_next(index) else 0
        actions = [array[trajectory.accepted[index]] for array in trajectory.arrays.actions]
        return PostedRequest(op, trajectory.seeds[index], None, self._table.attach.resets_within_step, actions)

    def _activity_of(self, index: int) -> Activity:
        """Return the next step of an env, for errors."""
        return Activity("reset" if self.trajectory.resets_next(index) else "step", index, self.call_id)

    # The end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Write the last results into the rows, and tell the rollout.

        If this is interrupted, a repair does it again, unless the rollout was told: then it leaves out the rest.
        """
        rollout = self._reports_to
        if rollout is None:
            return
        self.trajectory.end()
        rollout.last_errors_by_env.update(self.errors_by_env)
        self.has_ended = True
        rollout.on_part_end(self)
        self._reports_to = None
        if self._has_other_parts:
            self._renew_if_due(first=True)
        self._group.queue_saves()
