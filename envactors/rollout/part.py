"""One actor's part of a rollout: orders to its worker, until every env has taken every step, or an error ends it.

    start                  sends an order: the steps that are left, and perhaps the recipe of the policy
      │                    the worker then alternates the policy and its envs, and counts the steps that are complete
      ├▶ on_reply          it has taken all steps, an env or the policy has raised, or the policy returned outputs that
      │                    the trajectory has no arrays for yet
      ├▶ on_late           a deadline was missed: the actor ends the process
      └▶ settle_uncompleted  the process has ended
           └▶ handle_exit  it is known why, and what comes next

`on_reply` and `settle_uncompleted` accept the complete steps, and then decide about the envs that have raised.
`handle_exit` decides about the others without a result. If that leaves steps to run, the part goes to the front of the
actor's queue, which calls `start` again. Otherwise the part ends.

Everything runs under the lock of the vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from envactors.actor.actor import Actor
from envactors.actor.actor_process import ActorProcess
from envactors.actor.future import ActorFuture, Outcome
from envactors.actor.job import Activity, ErrorOf, Job, ProcessExit, Renewal, Uncompleted
from envactors.actor.timers import deadline_by_code
from envactors.crashes.inputs import Inputs
from envactors.errors import VectorEnvError
from envactors.mailbox import packing
from envactors.mailbox.control_page import METHOD_CALL, METHOD_NAMES, METHOD_POLICY
from envactors.mailbox.messages import Failure, Frame, Kind
from envactors.mailbox.pickling import dumps, load_message
from envactors.rollout import policy_runner
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import RAISED, STEPS, MirroredSteps, Order, OrderReply, Parameters, PolicyRecipe
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.vector.env_group import EnvGroup


class RolloutTerms(NamedTuple):
    """The facts that all parts of a rollout have in common.

    Attributes:
        recipe: Recipe of the policy.
        parameters: Parameters that the policy loads first; None if there are none.
        rollout_index: Index of the rollout since the policy was set.
        buffer: The memory of the trajectory.
        copies: Whether results are copies.
        last_errors: Last error of each env that failed in this rollout, or in those that it continues.
    """

    recipe: PolicyRecipe
    parameters: Parameters | None
    rollout_index: int
    buffer: TrajectoryBuffer
    copies: bool
    last_errors: dict[int, Outcome]


class RolloutPart(Job):
    """One actor's part of a rollout: a job of many steps, which continues in the next process.

    Args:
        group: The actor's envs.
        terms: The terms of the rollout.
        deliver: Called once the part has ended: `RolloutInFlight.deliver`.

    Attributes:
        sole_waiter: The future that this part alone resolves; None if it shares one.
        envs: How far each env has got, and its errors.
        policy_error: The error of a failed order, which ends the part: raised by the policy, or because of its output.
            None without one.
    """

    actor: Actor
    needs_permit = True

    def __init__(self, group: EnvGroup, terms: RolloutTerms, deliver: Callable[[], object]) -> None:
        self.envs: RolloutEnvs = RolloutEnvs(group, terms.buffer)
        self.policy_error: Outcome | None = None
        self._terms = terms
        self._group = group
        self.actor = group.actor
        self._deliver = deliver
        self.sole_waiter: ActorFuture | None = None
        # How far the part has got:
        # - "new": it waits for earlier jobs of the actor, which may still change the rows of the envs.
        # - "begun": the trajectory has the last observations of the rows. The part runs, or waits for the next process.
        # - "ended": the rows have the last results of the trajectory.
        self._stage: Literal["new", "begun", "ended"] = "new"
        # Whether the order has the recipe of the policy, since the worker has asked for it.
        self._sends_recipe = False
        # The activity that has missed its deadline: a step, a reset, a call of the policy, or the order. Else None.
        self._late: Activity | None = None
        # The step in which an env has raised, and its failure, by env, until that is decided about.
        self._raised: dict[int, tuple[int, Failure]] = {}
        # Whether the worker is on another machine, whose steps come with replies.
        self._is_remote: bool = group.actor.config.backend.traits.is_remote

    @property
    def has_ended(self) -> bool:
        """Whether the part has ended: its result is complete, and the rows have the last results."""
        return self._stage == "ended"

    @property
    def has_failed(self) -> bool:
        """Whether an error of an env, of the policy, or of the actor ends the part."""
        return bool(self.policy_error or self.envs.errors_to_raise)

    @property
    def _has_other_parts(self) -> bool:
        """Whether the actor has a part of another rollout that has not ended."""
        jobs = self.actor.jobs.unfinished
        return any(isinstance(job, RolloutPart) and job is not self and not job.has_ended for job in jobs)

    @property
    def _activity_of_order(self) -> Activity:
        """The current order as a whole. It has a deadline if the worker makes the policy in it."""
        first_index = self.envs.indices.start
        if self._sends_recipe:
            return Activity("set_policy", first_index, self.call_id, self.started_at, self.actor.config.deadlines.start)
        return Activity("rollout", first_index, self.call_id, self.started_at)

    # The job ---------------------------------------------------------------------------------------------

    def resolves(self, future: ActorFuture) -> bool:
        """Return whether a future waits for nothing but this part."""
        return future is self.sole_waiter

    def enqueue(self) -> None:
        """Queue the part behind the other jobs of its actor."""
        if not self._has_other_parts:
            self._renew_if_due(first=False)
        self.actor.jobs.enqueue(self)

    def _renew_if_due(self, *, first: bool) -> None:
        """Queue the replacement of the process if an env is due to be reset in a new one.

        Args:
            first: Whether it comes ahead of all other jobs.
        """
        if reason := self._group.table.episodes.renewal_reason(self.envs.indices):
            self.actor.jobs.enqueue(Renewal(why=reason), first=first)

    def start(self) -> Job | None:
        """Order the steps that are left. The part may end instead, if envs cannot take them."""
        envs, actor = self.envs, self.actor
        if self.has_ended:
            return None
        self._begin()
        envs.settle_lost_episodes(self.call_id)
        if self._end_if_finished():
            return None

        self._group.table.rows.begin_rollout(envs.indices, self.call_id)
        if self._is_remote:
            self._mirror_steps()
        actor.deadline_watch.watch(self.started_at, self._activity_of_order.deadline)
        actor.send(Kind.EXTEND, self.call_id, dumps((policy_runner.run_rollout, tuple(self._make_order()))))
        return self

    def _begin(self) -> None:
        """Take the last observations from the rows if it is new; fail envs that an earlier rollout has left failed."""
        if self._stage == "new":
            self.envs.read_rows()
            self._stage = "begun"
            self.envs.fail_lost(self._terms.last_errors)

    def _make_order(self) -> Order:
        terms, envs = self._terms, self.envs
        return Order(
            policy_id=terms.recipe.policy_id,
            recipe=terms.recipe if self._sends_recipe else None,
            rollout_index=terms.rollout_index,
            pickled_layout=terms.buffer.pickled_layout,
            places=terms.buffer.places,
            parameters=terms.parameters,
            plans=[plan.fields() for plan in envs.make_plans()],
            last_contents=envs.last_contents(),
        )

    def _mirror_steps(self) -> None:
        """Send the trajectory, beginning at the next step, with the order: some envs may be ahead by several steps.

        The steps come back with the reply.
        """
        worker, buffer = self.actor.process.worker, self._terms.buffer
        indices, step = self.envs.indices, self.envs.next_step
        assert worker is not None, "jobs start in a live process"
        steps = MirroredSteps(buffer.places, buffer.pickled_layout, indices, step)
        worker.mirror(steps, buffer.trajectory.pack(indices, step))

    def activity(self) -> Activity | None:
        """Return what the worker runs, or else the order as a whole; None without a worker.

        After a missed deadline, this is the late activity until the process has ended.
        """
        if self._late is not None:
            return self._late
        if (page := self.actor.page) is None:
            return None
        running = page.progress()
        if running.call_id != self.call_id or running.method == METHOD_CALL:
            return self._activity_of_order

        # The policy acts for all envs, so the first one stands for them. Env code may overwrite the position.
        indices, position = self.envs.indices, running.position
        names_env = running.method != METHOD_POLICY and 0 <= position < len(indices)
        index = indices[position if names_env else 0]
        if index in self._raised:  # its step has ended
            return self._activity_of_order._replace(started_at=running.since)
        deadline = deadline_by_code(running.method, self.actor.config.deadlines)
        return Activity(METHOD_NAMES[running.method], index, self.call_id, running.since, deadline)

    def on_late(self, activity: Activity) -> None:
        """Accept the steps that are complete now. On this machine, those that complete later are dropped.

        Steps of another machine come when its worker has ended, and `settle_uncompleted` accepts them all.
        """
        self._accept_completed()
        self._late = activity

    def on_reply_piece(self, frame: Frame) -> None:
        """Keep exceptions, and infos that did not fit into the trajectory; write steps of another machine.

        Exceptions that arrive after a missed deadline are dropped.
        """
        for key, content in packing.unpack(frame.payload):
            if key == STEPS and self._is_remote:
                self.envs.trajectory.unpack(self.envs.indices, content)
            elif key == RAISED:
                if self._late is None:
                    load_message(self._record_raised, content)
            else:  # the cell of an info
                self.envs.add_large_content(key, bytes(content))

    def on_reply(self, frame: Frame) -> bool:
        """Accept the steps, and decide about envs that raised; the part ends with its last step or an error."""
        self._accept_completed()
        if frame.kind == Kind.FAILED:
            activity = self.activity() or self._activity_of_order
            self.policy_error = self.actor.errors.outcome(activity, frame, self.actor.pid)
            reply = OrderReply()
        else:
            reply = load_message(OrderReply, frame.payload)
        self._sends_recipe = reply.must_make_policy
        self._recover_raised()
        if reply.needed_layout is not None:
            try:
                self._terms.buffer.add_room(reply.needed_layout)
            except VectorEnvError as error:
                self.envs.fail_all(self.actor.errors.no_memory_for_results(self._activity_of_order, error))
        return self._end_if_finished()

    def settle_uncompleted(self, process: ActorProcess) -> Uncompleted:
        """Accept the steps that an ended process has completed, and decide about the envs that have raised.

        Returns:
            What it has not completed.
        """
        if self._late is not None and not self._is_remote:
            self.envs.drop_unaccepted()  # completed after the deadline
        self._accept_completed()
        uncompleted = super().settle_uncompleted(process)  # asks `activity`, which must know who has raised
        self._recover_raised()  # forgets that
        return uncompleted

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the step that an ended process was running, and the requests before it; nothing of the policy."""
        if culprit.method == "policy" or culprit.index not in self.envs.failed_in(culprit):
            return Inputs()
        return self._group.recovery.step_inputs(culprit.index, self.envs.posted(culprit.index))

    def handle_exit(self, process_exit: ProcessExit) -> bool:
        """Decide about the envs of an ended process: about those that it failed in, then about lost episodes."""
        self._late = None
        if process_exit.culprit is not None:
            loss = self._group.recovery.exit_loss(process_exit.culprit, process_exit)
            for index in self.envs.failed_in(process_exit.culprit):
                self.envs.apply_fate(index, loss)
        if process_exit.has_successor:
            self.envs.settle_lost_episodes(self.call_id)
        elif self.envs.next_step < self.envs.steps:
            self.envs.fail_all(process_exit.error)
        return self._end_if_finished()

    def fail(self, error_of: ErrorOf) -> None:
        """End the part with an error, unless it has ended: no process will run the steps that are left."""
        if self.has_ended:
            return
        self._begin()  # its result has the last observations
        self.envs.fail_all(error_of(self._activity_of_order))
        self._end()

    def _accept_completed(self) -> None:
        """Accept the steps that the worker has completed."""
        self.actor.jobs.record_completed(self.envs.accept_completed())

    def _record_raised(self, position: int, step: int, *fields: Any) -> None:
        """Record an env that has raised, as a piece says."""
        self._raised[self.envs.indices[position]] = step, Failure(*fields)

    def _recover_raised(self) -> None:
        """Decide about the envs that have raised.

        Skip an env whose earlier steps never arrived, since another machine was lost: it has not got that far.
        """
        raised, self._raised = self._raised, {}
        for index, (step, failure) in raised.items():
            if step == self.envs.accepted_steps[index]:
                loss = self._group.recovery.raised_loss(self.envs.activity(index, self.call_id), failure)
                self.envs.apply_fate(index, loss)

    def _end_if_finished(self) -> bool:
        """End the part if nothing is left to run; return whether it has ended."""
        if self.has_failed or self.envs.next_step >= self.envs.steps:
            self._end()
        return self.has_ended

    def _end(self) -> None:
        """End the part, unless it has ended.

        After an interrupt, `WorkerRolloutEngine._end_parts` calls `fail`, and thus this, again. So everything before
        the part has ended may run twice. What follows may be skipped: `_end_parts` delivers, too, and the repair after
        an interrupt replaces the process anyway.
        """
        if self.has_ended:
            return
        self.envs.write_rows()  # the next part of the actor, and the next steps, begin with them
        self._terms.last_errors.update(self.envs.errors_to_raise)  # rollouts that continue this one fail these envs
        self._stage = "ended"  # only now may anybody read its result, or start the next part
        deliver, self._deliver = self._deliver, lambda: None  # so that the rollout is freed with its futures
        deliver()
        if self._has_other_parts:  # else the process is replaced, if that is due, before the next request
            self._renew_if_due(first=True)
        self._group.queue_saves()
