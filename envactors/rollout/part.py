"""One actor's part of a rollout: orders to its worker, until every env has taken every step or has failed.

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
from envactors.rollout.columns import ActorColumns
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import COLUMNS, MirroredColumns, Order, Parameters, Policy, Stop
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET
from envactors.vector.env_group import EnvGroup
from envactors.vector.env_recovery import Actions
from envactors.vector.episodes import NO_EPISODE
from envactors.vector.fates import EnvFate, RequestLoss
from envactors.vector.losses import exit_loss, lost_episode_loss, raised_loss


class WholeRollout(Protocol):
    """A rollout, as its parts see it; see `envactors.rollout.rollouts.RolloutInFlight`."""

    buffer: TrajectoryBuffer
    index: int
    policy: Policy
    parameters: Parameters | None
    last_errors: dict[int, Outcome]

    def on_part_end(self, part: RolloutPart) -> None:
        """Deliver the result of a part, or that of all parts with the last one; again after an interrupt."""


class RolloutPart(Job):
    """One actor's part of a rollout: a job of many steps, which continues in the next process.

    Args:
        group: The actor's envs.
        rollout: The rollout.

    Attributes:
        columns: What they have done.
        failures: Exceptions of envs, by (step, env). They are read by the thread that reads the result.
        errors: Errors to raise, by env.
        policy_error: The exception that the policy raised.
        error: Error of the actor as a whole.
        has_ended: Whether the part has ended.
    """

    needs_permit = True
    survives_interrupt = False

    def __init__(self, group: EnvGroup, rollout: WholeRollout) -> None:
        self.columns: ActorColumns = ActorColumns(group.table, group.indices, rollout.buffer)
        self.failures: dict[tuple[int, int], Outcome] = {}
        self.errors: dict[int, Outcome] = {}
        self.policy_error: Outcome | None = None
        self.error: ActorError | None = None
        self.has_ended: bool = False
        self._group = group
        self._table = group.table
        self._actor = group.actor
        # None once its end is complete. If an interrupt comes between `has_ended` and that, the end is repeated.
        self._rollout: WholeRollout | None = rollout
        self._buffer = rollout.buffer
        # Whether the worker makes the policy before it runs the steps of the current order.
        self._makes_policy = False
        # The step that has missed its deadline.
        self._late: Activity | None = None
        # Whether the worker is on another machine, whose columns come with replies.
        self._is_remote: bool = group.actor.config.backend.traits.is_remote

    @property
    def _has_others(self) -> bool:
        """Whether the actor has a part of another rollout."""
        return any(isinstance(job, RolloutPart) and job is not self for job in self._actor.jobs.unfinished)

    @property
    def _activity_of_order(self) -> Activity:
        """The current order as a whole."""
        method = "set_policy" if self._makes_policy else "rollout"
        return Activity(method, self.columns.envs.start, self.call_id, self.started, self.deadline)

    @property
    def _is_done(self) -> bool:
        return bool(self.errors) or self.columns.next_step >= self.columns.steps

    # The job ---------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Queue the part behind the other jobs of its actor."""
        if not self._has_others:
            self._renew_if_due(first=False)
        self._actor.jobs.enqueue(self)

    def _renew_if_due(self, *, first: bool) -> None:
        """Replace the process of an env before its next episode, if that is due."""
        episodes = self._table.episodes
        if any(episodes.is_retiring(index) and episodes.resets_next[index] for index in self.columns.envs):
            self._actor.jobs.enqueue(Renewal(reason=self._group.recycler.reason), first=first)

    def start(self) -> Job | None:
        """Order the next steps."""
        rollout, actor = self._rollout, self._actor
        if rollout is None:
            return None
        if not self.columns.have_begun:
            self._begin(rollout)
        self._fail_without_episode()
        if self._is_done:
            self._end()
            return None
        self._table.begin_rollout(self.columns.envs, self.call_id)
        order = self._make_order(rollout)
        if self._is_remote:
            self._mirror_columns()
        self.deadline: float | None = actor.config.deadlines.start if self._makes_policy else None
        actor.deadline_watch.watch(self.started, self.deadline)
        actor.send(Kind.EXTEND, self.call_id, dumps((policy_loop.run_rollout, tuple(order))))
        return self

    def _make_order(self, rollout: WholeRollout) -> Order:
        columns, autoreset = self.columns, self._table.episodes.autoreset
        return Order(
            policy_id=rollout.policy.policy_id,
            policy=rollout.policy if self._makes_policy else None,
            rollout=rollout.index,
            start=columns.next_step,
            stop=columns.steps,
            layout=self._buffer.pickled_layout,
            places=self._buffer.places,
            parameters=rollout.parameters,
            plans=[tuple(columns.plan_next(index)) for index in columns.envs],
            resets_within_step=autoreset.resets_within_step,
            op_after_end=OP_RESET if autoreset.resets_next_step else OP_REPEAT,
            last_leaves=columns.last_leaves(),
        )

    def _begin(self, rollout: WholeRollout) -> None:
        """Begin, and fail the envs that an earlier rollout has lost."""
        episodes = self._table.episodes
        self.columns.begin()
        for index in self.columns.envs:
            has_lost = episodes.needs_reset(index) and episodes.state(index) == NO_EPISODE
            if has_lost and index in rollout.last_errors:
                self.errors[index] = self.failures[0, index] = rollout.last_errors[index]

    def _mirror_columns(self) -> None:
        """Send the columns of the next step to the other machine. What the worker adds comes back with the reply."""
        worker = self._actor.process.worker
        columns, step = self.columns, self.columns.next_step
        assert worker is not None, "jobs start in a live process"
        part = MirroredColumns(self._buffer.places, self._buffer.pickled_layout, columns.envs, step)
        worker.mirror(part, columns.trajectory.pack(columns.envs, step, step + 1))

    def activity(self) -> Activity | None:
        """Return the step that is running."""
        worker = self._actor.process.worker
        if self._late is not None:
            return self._late
        if worker is None:
            return None
        progress = worker.page.progress()
        if progress.call_id != self.call_id or progress.method == METHOD_CALL:
            return self._activity_of_order
        deadline = deadline_of(progress.method, self._actor.config.deadlines)
        envs, position = self.columns.envs, progress.position  # env code may overwrite the latter
        index = envs[position if progress.method != METHOD_POLICY and 0 <= position < len(envs) else 0]
        return Activity(METHOD_NAMES[progress.method], index, self.call_id, progress.since, deadline)

    def on_late(self, activity: Activity) -> None:
        """Ignore later progress of the worker, if its progress is known here."""
        self._late = activity
        if not self._is_remote:
            self.columns.ignore_later()

    def on_part(self, frame: Frame) -> None:
        """Keep infos that did not fit into the trajectory, and write columns that come from another machine."""
        for key, content in bundle.unpack(frame.payload):
            if key == COLUMNS:
                self.columns.trajectory.unpack(self.columns.envs, content)
            else:
                self.columns.large_infos[key] = bytes(content)

    def on_reply(self, frame: Frame) -> bool:
        """Continue, unless the policy has raised or everything is done."""
        self._actor.jobs.completed += self.columns.count()
        if frame.kind == Kind.FAILED:
            activity = self.activity() or self._activity_of_order
            self.policy_error = self._actor.errors.outcome(activity, frame, self._actor.pid)
            self._end()
            return True
        stop = Stop(*loads(frame.payload))
        self._makes_policy = stop.lacks_policy
        if stop.failure is not None:
            index = self.columns.envs[stop.position]
            self._recover(index, raised_loss(self._table, self._actor, self._activity_of(index), stop.failure))
        if stop.layout is not None:
            try:
                self._buffer.add_columns(stop.layout)
            except OSError as error:
                activity, incarnation = self._activity_of_order, self._actor.process.incarnation
                self.error = self._actor.errors.out_of_memory(activity, incarnation, error)
                self._end()
                return True
        if self._is_done:
            self._end()
            return True
        return False

    def count_completed(self) -> None:
        """Count the steps that an ended process has completed, and forget those after a deadline."""
        self._actor.jobs.completed += self.columns.count()
        if self._late is not None:
            self.columns.forget_later()

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the step that an ended process was running, and the requests before it; nothing of the policy."""
        if culprit.method == "policy" or culprit.env not in self._envs_failed_in(culprit):
            return Inputs()
        return self._group.recovery.step_inputs(culprit.env, *self._posted(culprit.env))

    def after_exit(self, ended: ProcessExit) -> bool:
        """Decide about the envs of an ended process, and continue in the next one."""
        self._late = None
        self._makes_policy = True
        is_complete = self.columns.next_step >= self.columns.steps  # the worker had only to reply
        if ended.culprit is not None and not is_complete:
            loss = exit_loss(self._actor, ended.culprit, ended)
            for index in self._envs_failed_in(ended.culprit):
                self._recover(index, loss)
        if ended.plan.has_process:
            self._fail_without_episode()
            if not self._is_done:
                return False
        elif not is_complete:
            self.error = ended.error
        self._end()
        return True

    def fail(self, error_of: ErrorOf) -> None:
        """End: no process will run the rest."""
        if self._rollout is not None:
            if not self.has_ended:
                self.error = error_of(self._activity_of_order)
            self._end()

    # Failures --------------------------------------------------------------------------------------------

    def _envs_failed_in(self, running: Activity) -> list[int]:
        """Return the envs whose next step fails because the process has ended in this activity."""
        columns, step = self.columns, self.columns.next_step
        left = [index for index, counted in columns.counted.items() if counted == step < columns.steps]
        if running.method == "policy" and not columns.are_chosen:
            return [index for index in left if not columns.repeats(index)]
        if running.method in ("step", "reset") and running.env in left:
            return [running.env]
        return []

    def _fail_without_episode(self) -> None:
        """Decide about envs whose episode was lost with their process before they could take their next step."""
        columns, step = self.columns, self.columns.next_step
        for index, counted in sorted(columns.counted.items(), key=operator.itemgetter(1)):
            if counted >= columns.steps or (counted > step and self.errors):
                break  # the next rollout, or the next call of `step`, finds that the episode was lost
            if self._table.cannot_continue(index) and not columns.repeats(index):
                self._recover(index, lost_episode_loss(self._actor, self._activity_of(index)))

    def _recover(self, index: int, loss: RequestLoss) -> None:
        """Handle a step of an env that has no result."""
        columns = self.columns
        decision, error = self._group.recovery.end_attempt(index, loss, *self._posted(index))
        if decision.fate is EnvFate.REDO:
            return
        columns.reset_after_failure.discard(index)
        self.failures[columns.counted[index], index] = error
        if decision.fate is EnvFate.RESET:
            columns.reset_after_failure.add(index)
        elif decision.fate is EnvFate.TRUNCATE:
            columns.truncate(index)
        else:
            self.errors[index] = error

    def _posted(self, index: int) -> tuple[PostedRequest, Actions]:
        """Return the next step of an env as rows would have it, and the actions of all envs in that step."""
        columns = self.columns
        op = RESET_BIT if columns.resets_next(index) else 0
        posted = PostedRequest(op, columns.seeds[index], None, self._table.attach.resets_within_step)
        return posted, [array[columns.counted[index]] for array in columns.trajectory.actions]

    def _activity_of(self, index: int) -> Activity:
        """Return the next step of an env, for errors."""
        return Activity("reset" if self.columns.resets_next(index) else "step", index, self.call_id)

    # The end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Write the last results into the rows, and tell the rollout.

        If this is interrupted, a repair does all of it again.
        """
        rollout = self._rollout
        if rollout is None:
            return
        self.columns.end()
        rollout.last_errors.update(self.errors)
        self.has_ended = True
        rollout.on_part_end(self)
        self._rollout = None
        if self._has_others:
            self._renew_if_due(first=True)
        self._group.journal_keeper.queue_saves()
