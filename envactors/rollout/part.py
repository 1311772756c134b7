"""One actor's part of a rollout: orders to its worker, until every env has taken every step or an error ends it.

    order ──▶ the worker calls the policy and steps its envs ──▶ it is done, an env raised, or the process ended
      ▲                                                                            │
      └── the rest, once `envactors.vector.fates` has decided about each env ◀──┘

Everything runs under the lock of the vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.actor_process import ActorProcess
from envactors.actor.future import Outcome
from envactors.actor.job import ErrorOf, Job, ProcessExit, Renewal, Uncompleted
from envactors.actor.timers import deadline_by_code
from envactors.crashes.inputs import Inputs
from envactors.errors import VectorEnvError
from envactors.mailbox import bundle
from envactors.mailbox.control_page import METHOD_CALL, METHOD_NAMES, METHOD_POLICY
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps, load_message
from envactors.rollout import policy_runner
from envactors.rollout.failures import RolloutFailures
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import MirroredSteps, Order, OrderReply, Parameters, PolicyRecipe
from envactors.rollout.rollout_envs import RolloutEnvs
from envactors.vector.env_group import EnvGroup


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """What all parts of a rollout have in common.

    Attributes:
        recipe: Recipe of the policy.
        parameters: Parameters that the policy loads first; None if there are none.
        index: Index of the rollout since the policy was set.
        buffer: The memory of the trajectory.
        copies: Whether results stay valid for as long as the user keeps them.
        last_errors_by_env: Last error of each env that failed in this rollout, or in those that it continues.
    """

    recipe: PolicyRecipe
    parameters: Parameters | None
    index: int
    buffer: TrajectoryBuffer
    copies: bool
    last_errors_by_env: dict[int, Outcome]


class RolloutPart(Job):
    """One actor's part of a rollout: a job of many steps, which continues in the next process.

    Args:
        group: The actor's envs.
        spec: The rollout.
        on_end: Called when the part has ended, but not again after an interrupt.

    Attributes:
        envs: How far each env has got.
        failures: The failures of envs.
        policy_error: The exception that the policy raised.
    """

    actor: Actor
    needs_permit = True

    def __init__(self, group: EnvGroup, spec: RolloutSpec, on_end: Callable[[], object]) -> None:
        self.envs: RolloutEnvs = RolloutEnvs(group.table, group.indices, spec.buffer)
        self.failures: RolloutFailures = RolloutFailures(group, self.envs)
        self.policy_error: Outcome | None = None
        self._spec = spec
        # None once the part has ended.
        self._on_end: Callable[[], object] | None = on_end
        self._group = group
        self.actor = group.actor
        # Incarnation of the process that got the last order; None before the first.
        self._ordered_in: int | None = None
        # Whether the last order has the worker make the policy first; after a reply, whether the next one will.
        self._makes_policy = False
        # Deadline of the current order; None unless the worker makes the policy in it.
        self._deadline: float | None = None
        # What has missed its deadline: a step, a reset, a call of the policy, or the order; None if nothing has.
        self._late: Activity | None = None
        # Whether the worker is on another machine, whose steps come with replies.
        self._is_remote: bool = group.actor.config.backend.traits.is_remote

    @property
    def has_ended(self) -> bool:
        """Whether the part has ended, and its result is complete."""
        return self._on_end is None

    @property
    def _has_other_parts(self) -> bool:
        """Whether the actor has a part of another rollout."""
        jobs = self.actor.jobs.unfinished
        return any(isinstance(job, RolloutPart) and job is not self and not job.has_ended for job in jobs)

    @property
    def _activity_of_order(self) -> Activity:
        """The current order as a whole."""
        method = "set_policy" if self._makes_policy else "rollout"
        return Activity(method, self.envs.indices.start, self.call_id, self.started_at, self._deadline)

    @property
    def _is_over(self) -> bool:
        """Whether all steps are complete, or an error ends the rollout."""
        has_failed = self.policy_error is not None or bool(self.failures.errors_by_env)
        return has_failed or self.envs.next_step >= self.envs.steps

    # The job ---------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Queue the part behind the other jobs of its actor."""
        if not self._has_other_parts:
            self._renew_if_due(first=False)
        self.actor.jobs.enqueue(self)

    def _renew_if_due(self, *, first: bool) -> None:
        """Queue the replacement of the process, ahead of all jobs if ``first``, if it is due at the reset of an env."""
        if reason := self._group.table.episodes.renewal_reason(self.envs.indices):
            self.actor.jobs.enqueue(Renewal(reason=reason), first=first)

    def start(self) -> Job | None:
        """Order the next steps."""
        envs, actor = self.envs, self.actor
        if self.has_ended:
            return None
        if not envs.has_begun:
            envs.begin()
            self.failures.fail_lost_envs(self._spec.last_errors_by_env)
        self.failures.settle_lost_episodes(self.call_id)
        if self._end_if_over():
            return None
        self._group.table.rows.begin_rollout(envs.indices, self.call_id)
        self._makes_policy |= self._ordered_in not in (None, actor.process.incarnation)
        self._ordered_in = actor.process.incarnation
        order = self._make_order()
        if self._is_remote:
            self._mirror_steps()
        self._deadline = actor.config.deadlines.start if self._makes_policy else None
        actor.deadline_watch.watch(self.started_at, self._deadline)
        actor.send(Kind.EXTEND, self.call_id, dumps((policy_runner.run_rollout, tuple(order))))
        return self

    def _make_order(self) -> Order:
        spec, envs = self._spec, self.envs
        return Order(
            policy_id=spec.recipe.policy_id,
            recipe=spec.recipe if self._makes_policy else None,
            rollout_index=spec.index,
            first_step=envs.next_step,
            layout=spec.buffer.pickled_layout,
            places=spec.buffer.places,
            parameters=spec.parameters,
            plans=[envs.plan_next(index).fields() for index in envs.indices],
            last_leaves=envs.last_leaves(),
        )

    def _mirror_steps(self) -> None:
        """Send the memory of the next step to the other machine. What the worker adds comes back with the reply."""
        worker, buffer = self.actor.process.worker, self._spec.buffer
        indices, step = self.envs.indices, self.envs.next_step
        assert worker is not None, "jobs start in a live process"
        steps = MirroredSteps(buffer.places, buffer.pickled_layout, indices, step)
        worker.mirror(steps, buffer.trajectory.pack(indices, step, step + 1))

    def activity(self) -> Activity | None:
        """Return what the worker runs, or else the order as a whole; None without a worker.

        Once something is late, it is the answer until the process has ended.
        """
        worker = self.actor.process.worker
        if self._late is not None:
            return self._late
        if worker is None:
            return None
        progress = worker.page.progress()
        if progress.call_id != self.call_id or progress.method == METHOD_CALL:
            return self._activity_of_order
        deadline = deadline_by_code(progress.method, self.actor.config.deadlines)
        # The policy acts for all envs. Env code may overwrite the position.
        envs, position = self.envs.indices, progress.position
        index = envs[position if progress.method != METHOD_POLICY and 0 <= position < len(envs) else 0]
        return Activity(METHOD_NAMES[progress.method], index, self.call_id, progress.since, deadline)

    def on_late(self, activity: Activity) -> None:
        """Ignore later progress of the worker; a remote one reports progress only with its reply."""
        self._late = activity
        if not self._is_remote:
            self.envs.freeze_progress()

    def on_reply_piece(self, frame: Frame) -> None:
        """Keep infos that did not fit into the trajectory, and write steps that come from another machine."""
        for key, content in bundle.unpack(frame.payload):
            self.envs.add_piece(key, content)

    def on_reply(self, frame: Frame) -> bool:
        """Accept the steps, and decide about an env that raised; the part ends with its last step or an error."""
        self.actor.jobs.record_completed(self.envs.accept_completed())
        if frame.kind == Kind.FAILED:
            activity = self.activity() or self._activity_of_order
            self.policy_error = self.actor.errors.outcome(activity, frame, self.actor.pid)
            return self._end_if_over()
        reply = load_message(OrderReply, frame.payload)
        self._makes_policy = reply.lacks_policy
        if reply.failure is not None:
            running = self.envs.activity(self.envs.indices[reply.position], self.call_id)
            self.failures.recover(running.env, self._group.recovery.raised_loss(running, reply.failure))
        if reply.layout is not None:
            try:
                self._spec.buffer.add_room(reply.layout)
            except VectorEnvError as error:
                self.failures.fail_all(self.actor.errors.no_memory_for_results(self._activity_of_order, error))
        return self._end_if_over()

    def find_uncompleted(self, process: ActorProcess) -> Uncompleted:
        """Accept the steps that an ended process has completed, forget those after a deadline, and return the rest."""
        self.actor.jobs.record_completed(self.envs.accept_completed())
        if self._late is not None:
            self.envs.drop_unaccepted()
        return super().find_uncompleted(process)

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the step that an ended process was running, and the requests before it; nothing of the policy."""
        if culprit.method == "policy" or culprit.env not in self.envs.failed_in(culprit):
            return Inputs()
        return self._group.recovery.step_inputs(culprit.env, self.envs.posted(culprit.env))

    def after_exit(self, ended: ProcessExit) -> bool:
        """Decide about the envs of an ended process, and continue in the next one."""
        self._late = None
        if ended.culprit is not None:
            loss = self._group.recovery.exit_loss(ended.culprit, ended)
            for index in self.envs.failed_in(ended.culprit):
                self.failures.recover(index, loss)
        if ended.plan.starts_another:
            self.failures.settle_lost_episodes(self.call_id)
        elif self.envs.next_step < self.envs.steps:
            self.failures.fail_all(ended.error)
        return self._end_if_over()

    def fail(self, error_of: ErrorOf) -> None:
        """End: no process will run the rest."""
        if not self.has_ended:
            self.failures.fail_all(error_of(self._activity_of_order))
        self._end()

    def _end_if_over(self) -> bool:
        if self._is_over:
            self._end()
        return self.has_ended

    def _end(self) -> None:
        """Write the last results into the rows, and tell the rollout.

        If this is interrupted, a repair does it again, unless the part has ended: then it only tells the rollout.
        """
        if self._on_end is None:
            return
        self.envs.write_last_results()
        self._spec.last_errors_by_env.update(self.failures.errors_by_env)
        on_end, self._on_end = self._on_end, None
        on_end()
        if self._has_other_parts:
            self._renew_if_due(first=True)
        self._group.queue_saves()
