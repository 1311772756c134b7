"""One actor's part of a rollout: orders to its worker, until every env has taken every step or has failed.

    order ──▶ the worker calls the policy and steps its envs ──▶ it is done, an env raised, or the process ended
      ▲                                                                            │
      └── the rest, once `envactors.vector.recovery` has decided about each env ◀──┘

Everything runs under the lock of the vector. Between orders, the slab row of an env mirrors its last rollout step. So
steps, failures, and replays need not know about rollouts.
"""

from __future__ import annotations

import operator
from typing import Protocol

import numpy as np

from envactors.actor.exits import Exit, JobFate, Step
from envactors.actor.future import Outcome, ReadyOutcome
from envactors.actor.job_runner import JobRunner
from envactors.actor.jobs import ErrorOf, Job, Renewal, UnreadReply
from envactors.errors import ActorError
from envactors.mailbox import bundle, messages
from envactors.mailbox.control_page import METHOD_CALL, METHOD_NAMES
from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import RESET as RESET_BIT
from envactors.mailbox.slab import SEED
from envactors.rollout import runner
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import COLUMNS, ENV_RAISED, NO_POLICY, EnvPlan, Order, Parameters, Policy, Stop
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, OP_TRUNCATED, ColumnsNote, Trajectory
from envactors.vector.actor_envs import ActorEnvs
from envactors.vector.episodes import LOST, NEEDS_RESET, NO_EPISODE, RETIRING, SEEDED
from envactors.vector.recovery import Cause, EnvFate, Failure, raised, recover


class WholeRollout(Protocol):
    """A rollout, as its parts see it; see `envactors.rollout.rollouts.Run`."""

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
        envs: The actor's envs.
        run: The rollout.

    Attributes:
        range: Indices of the actor's envs.
        contents: The object leaves of observations that no worker wrote, by (step, env).
        large_infos: Infos that did not fit into the trajectory, by cell.
        failures: Exceptions of envs, by (step, env). They are read by the thread that reads the result.
        errors: Errors to raise, by env.
        policy_error: The exception that the policy raised.
        error: Error of the actor as a whole.
        version: How often the user has given parameters.
        has_ended: Whether the part has ended; its end may have to be repeated after an interrupt.
    """

    needs_permit = True
    survives_interrupt = False

    def __init__(self, envs: ActorEnvs, run: WholeRollout) -> None:
        self.range: range = envs.range
        self.contents: dict[tuple[int, int], bytes | None] = {}
        self.large_infos: dict[int, bytes] = {}
        self.failures: dict[tuple[int, int], Outcome] = {}
        self.errors: dict[int, Outcome] = {}
        self.policy_error: UnreadReply | None = None
        self.error: ActorError | None = None
        self.version: int = 0 if run.parameters is None else run.parameters.version
        self.has_ended: bool = False
        self._envs = envs
        self._table = envs.table
        self._actor = envs.actor
        self._run: WholeRollout | None = run
        self._buffer = run.buffer
        self._steps = run.buffer.trajectory.layout.steps
        self._slice = slice(envs.range.start, envs.range.stop)
        self._has_begun = False
        # Whether the worker makes the policy before it runs the steps of the present order.
        self._makes_policy = False
        # How many steps of each env are counted.
        self._counted: dict[int, int] = dict.fromkeys(envs.range, 0)
        # Envs that the next process resets within the step that has failed, as ``autoreset="same_step"`` demands.
        self._renewing: set[int] = set()
        # The step that has missed its deadline, and how many steps each env had completed by then, if that is known.
        self._late: tuple[Step, list[int] | None] | None = None
        # Whether the worker is on another machine, whose columns come with replies.
        self._is_far: bool = envs.actor.config.backend.traits.is_remote

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps are written into."""
        return self._buffer.trajectory

    @property
    def _next_step(self) -> int:
        """The first step that is not complete."""
        return min(self._counted.values())

    @property
    def _has_others(self) -> bool:
        """Whether the actor has a part of another rollout."""
        return any(isinstance(job, RolloutPart) and job is not self for job in self._actor.unfinished)

    @property
    def _order(self) -> Step:
        """The present order as a whole."""
        method = "set_policy" if self._makes_policy else "rollout"
        return Step(method, self.range.start, self.call_id, self.started, self.deadline)

    @property
    def _is_done(self) -> bool:
        return bool(self.errors) or self._next_step >= self._steps

    # The job ---------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Queue the part behind the other jobs of its actor."""
        if not self._has_others:
            self._renew_if_due(first=False)
        self._actor.enqueue(self)

    def start(self, actor: JobRunner) -> bool:
        """Order the next steps."""
        run, table = self._run, self._table
        if run is None:
            return False
        if not self._has_begun:
            self._begin(run)
        self._fail_without_episode()
        if self._is_done:
            self._end()
            return False
        table.posted_in[self._slice] = actor.incarnation.index
        table.call_ids[self._slice] = table.slab.posted[self._slice] = table.slab.completed[self._slice] = self.call_id
        contents: list[bytes | None] = []
        if self.contents:
            contents = [self._content_at(self._counted[index], index) for index in self.range]
        order = Order(
            run.policy.policy_id,
            tuple(run.policy) if self._makes_policy else None,
            run.index,
            self._next_step,
            self._steps,
            self._buffer.pickled_layout,
            self._buffer.places,
            None if run.parameters is None else tuple(run.parameters),
            [self._plan(index) for index in self.range],
            table.autoreset,
            contents,
        )
        if self._is_far:
            self._mirror_columns(actor)
        self.deadline = actor.config.deadlines.start if self._makes_policy else None
        actor.deadline_watch.watch(self.started, self.deadline)
        actor.send(Kind.EXTEND, self.call_id, dumps((runner.run_rollout, tuple(order))))
        return True

    def _mirror_columns(self, actor: JobRunner) -> None:
        """Send the columns of the next step to the other machine. What the worker adds comes back with the reply."""
        process, step = actor.incarnation.process, self._next_step
        assert process is not None, "jobs start in a live process"
        note = ColumnsNote(self._buffer.places, self._buffer.pickled_layout, self.range, step)
        process.worker.mirror(note, self.trajectory.pack(self.range, step, step + 1))

    def step(self, actor: JobRunner) -> Step | None:
        """Return the step that is running."""
        process = actor.incarnation.process
        if self._late is not None:
            return self._late[0]
        if process is None:
            return None
        progress = process.page.progress()
        if progress.call_id != self.call_id or progress.method == METHOD_CALL:
            return self._order
        method = METHOD_NAMES[progress.method]
        index = self.range[0 if method == "policy" else progress.position]
        return Step(method, index, self.call_id, progress.since, actor.config.deadlines.of(method))

    def on_late(self, step: Step) -> None:
        """Note the progress of the worker, if it is known here: later progress does not count."""
        self._late = step, None if self._is_far else self.trajectory.done[self._slice].tolist()

    def on_part(self, frame: Frame) -> None:
        """Keep infos that did not fit into the trajectory, and write columns that come from another machine."""
        for key, content in bundle.unpack(frame.payload):
            if key == COLUMNS:
                self.trajectory.unpack(self.range, content)
            else:
                self.large_infos[key] = bytes(content)

    def on_reply(self, actor: JobRunner, frame: Frame) -> bool:
        """Continue, unless the policy has raised or everything is done."""
        self._count()
        if frame.kind == Kind.FAILED:
            self.policy_error = UnreadReply(actor.errors, self._order, frame, actor.pid)
            self._end()
            return True
        stop = Stop(*loads(frame.payload))
        self._makes_policy = stop.reason == NO_POLICY
        if stop.reason == ENV_RAISED:
            index, incarnation = self.range[stop.position], int(self._table.posted_in[self.range.start])
            step, content = self._envs.step_of(index), messages.Failure(*stop.failure)
            failure = raised(actor.errors, step, incarnation, actor.pid, content)
            self._decide(index, failure, has_process=self._actor.is_usable)
        if stop.layout is not None:
            try:
                self._buffer.add_columns(stop.layout)
            except OSError as error:
                self.error = actor.errors.out_of_memory(self._order, actor.incarnation.index, error)
                self._end()
                return True
        return self._continue()

    def _continue(self) -> bool:
        """Order the next steps; return True at the end."""
        if self._is_done:
            self._end()
            return True
        self._actor.enqueue(self, first=True)
        return False

    def count_completed(self) -> None:
        """Count the steps that an ended process has completed, and forget those after a deadline."""
        self._count()
        if self._late is not None:
            for index, counted in self._counted.items():
                self.trajectory.done[index] = counted
            chosen, first = self.trajectory.chosen, self.range.start
            chosen[first] = min(int(chosen[first]), self._next_step + 1)

    def after_exit(self, actor: JobRunner, exit: Exit) -> JobFate:  # noqa: A002
        """Decide about the envs of an ended process, and continue in the next one."""
        del actor
        running, step = exit.culprit, self._next_step
        self._late, self._makes_policy = None, True
        is_complete = step >= self._steps  # the worker had only to reply
        if running is not None and not is_complete:
            left = [index for index, counted in self._counted.items() if counted == step]
            failed: list[int] = []
            if running.method == "policy" and self.trajectory.chosen[self.range.start] <= step:
                failed = [index for index in left if not self._repeats(index)]
            elif running.method in ("step", "reset") and running.index in left:
                failed = [running.index]
            for index in failed:
                error = ReadyOutcome(None, exit.error)
                failure = Failure(Cause.RUNNING, error, exit.incarnation.index, reason=exit.reason)
                self._decide(index, failure, has_process=exit.plan.has_process)
        if exit.plan.has_process:
            self._fail_without_episode()
            if not self._is_done:
                return JobFate.AGAIN
        elif not is_complete:
            self.error = exit.error
        self._end()
        return JobFate.DONE

    def fail(self, actor: JobRunner, error_of: ErrorOf) -> None:
        """End: no process will run the rest."""
        del actor
        if self._run is not None:
            if not self.has_ended:
                self.error = error_of(self._order)
            self._end()

    # Failures --------------------------------------------------------------------------------------------

    def _fail_without_episode(self) -> None:
        """Decide about envs whose episode was lost with their process before they could take their next step."""
        step, table = self._next_step, self._table
        for index, counted in sorted(self._counted.items(), key=operator.itemgetter(1)):
            if counted >= self._steps or (counted > step and self.errors):
                break  # the next rollout, or the next call of `step`, finds that the episode was lost
            if table.episodes.flags[index] & LOST and self._envs.lacks_episode(index) and not self._repeats(index):
                self._decide(index, self._envs.lost_failure(index), has_process=True)

    def _decide(self, index: int, failure: Failure, *, has_process: bool) -> None:
        """Decide about the step of an env that has failed."""
        self._mirror_step(index)
        step, trajectory, request = self._counted[index], self.trajectory, self._envs.step_of(index)
        fate, error, _, replaces_process = recover(
            self._table, self._actor.errors, index, failure, has_process=has_process
        )
        if replaces_process:
            self._envs.discard_process(int(self._table.posted_in[index]), request, failure)
        if fate is EnvFate.REDO:
            return
        self._renewing.discard(index)
        self.failures[step, index] = error
        if fate is EnvFate.RESET:
            self._renewing.add(index)
        elif fate is EnvFate.TRUNCATE:
            for array in trajectory.observations:
                if array is not None:
                    array[step + 1, index] = array[step, index]
            if self.contents:
                self.contents[step + 1, index] = self._content_at(step, index)
            trajectory.rewards[step, index] = 0
            trajectory.terminated[step, index] = trajectory.starts[step + 1, index] = False
            trajectory.truncated[step, index] = True
            trajectory.ops[step, index] = OP_TRUNCATED
            trajectory.info_encoding[step * trajectory.layout.envs + index] = PLAIN
            self._counted[index] = trajectory.done[index] = step + 1
        else:
            self.errors[index] = error

    def _mirror_step(self, index: int) -> None:
        """Have the row of an env look as if its next step had been posted there."""
        table, trajectory, step = self._table, self.trajectory, self._counted[index]
        resets = table.episodes.resets_next_of[index] or index in self._renewing
        bits = int(table.buffer_index[index]) | (RESET_BIT if resets else 0)
        table.ops[index] = bits | (SEED if table.seeds[index] is not None else 0)
        if step < self._steps:
            for row, column in zip(table.slab.actions, trajectory.actions, strict=False):
                row[index] = column[step, index]

    # Orders ----------------------------------------------------------------------------------------------

    def _begin(self, run: WholeRollout) -> None:
        """Write the last observations as the first ones of the trajectory."""
        self._has_begun = True
        table, slab, trajectory, mine = self._table, self._table.slab, self.trajectory, self._slice
        trajectory.done[mine] = trajectory.chosen[mine] = 0
        trajectory.starts[0, mine] = table.starts(mine)
        for last, array in zip(slab.observations, trajectory.observations, strict=True):
            if array is not None and last is not None:
                array[0, mine] = last[table.buffer_index[mine], self.range]
        if not trajectory.is_whole:
            self.contents = {(0, index): table.last_infos[index] for index in self.range}
        for index in self.range:
            lacks = table.episodes.flags[index] & (NEEDS_RESET | NO_EPISODE) == NEEDS_RESET | NO_EPISODE
            if lacks and index in run.last_errors:
                self.errors[index] = self.failures[0, index] = run.last_errors[index]

    def _renew_if_due(self, *, first: bool) -> None:
        """Replace the process of an env before its next episode, if that is due."""
        episodes = self._table.episodes
        if any(episodes.flags[index] & RETIRING and episodes.resets_next_of[index] for index in self.range):
            self._actor.enqueue(Renewal(), first=first)

    def _plan(self, index: int) -> EnvPlan:
        """Plan the next step of an env, and record its seed."""
        table, episodes = self._table, self._table.episodes
        resets = episodes.resets_next_of[index] or index in self._renewing
        incarnation = int(table.incarnations[index])
        table.seeds[index] = episodes.seed_of_reset(index, incarnation) if resets else episodes.next_seeds[index]
        root_seed = episodes.root_seeds[index] if episodes.flags[index] & SEEDED else None
        op = OP_RESET if resets else OP_REPEAT if self._repeats(index) else OP_STEP
        return self._counted[index], op, table.seeds[index], root_seed, episodes.numbers[index]

    def _repeats(self, index: int) -> bool:
        """Return whether an env's episode is over and nothing resets it."""
        needs_reset = self._table.episodes.flags[index] & NEEDS_RESET
        return bool(needs_reset) and index not in self._renewing and self._table.autoreset == "disabled"

    # Counting --------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Count the steps that the worker has completed."""
        trajectory, mine = self.trajectory, self._slice
        known = None if self._late is None else self._late[1]
        completed = trajectory.done[mine].tolist() if known is None else known
        before = list(self._counted.values())
        completed = [min(max(new, old), self._steps) for new, old in zip(completed, before, strict=True)]
        low, high = min(before), max(completed)
        if completed == before or not self._has_begun:
            return
        # As bytes, env by env, which are searched in a tenth of the time that short arrays take.
        all_ends = (trajectory.terminated[low:high, mine] | trajectory.truncated[low:high, mine]).T.tobytes()
        all_ops = trajectory.ops[low:high, mine].T.tobytes()
        for position, index in enumerate(self.range):
            old, new = before[position], completed[position]
            if new > old:
                at = position * (high - low) - low
                self._count_steps(index, old, new, all_ends[at + old : at + new], all_ops[at + old : at + new])

    def _count_steps(self, index: int, before: int, done: int, ends: bytes, ops: bytes) -> None:
        table, trajectory, episodes = self._table, self.trajectory, self._table.episodes
        if table.replays:
            self._record(index, before, ends, ops)
        has_reset = OP_RESET in ops or (table.autoreset == "same_step" and 1 in ends)
        self._actor.completed += done - before
        if OP_REPEAT in ops:
            ends = bytes(end for end, op in zip(ends, ops, strict=True) if op != OP_REPEAT)
            ops = ops.replace(bytes([OP_REPEAT]), b"")
        if ops:
            episodes.record_many(index, ends, ops)
        if has_reset:
            table.seeds[index] = episodes.next_seeds[index]
        self._counted[index] = done
        if index in self._renewing:
            self._renewing.discard(index)
            trajectory.truncated[before, index] = True
            trajectory.ops[before, index] = OP_TRUNCATED

    def _record(self, index: int, before: int, ends: bytes, ops: bytes) -> None:
        """Record steps of an env in its journal, which a seeded reset begins anew."""
        table, trajectory, journal = self._table, self.trajectory, self._table.journals[index]
        seeds, within, start = trajectory.seeds[:, index], table.autoreset == "same_step", 0
        resets = (offset for offset, op in enumerate(ops) if op == OP_RESET or (within and ends[offset]))
        for offset in resets:
            if (seed := int(seeds[before + offset])) >= 0:
                journal.begin(seed, int(trajectory.checks[before + offset, index]))
                start = offset + 1
        steps = [before + offset for offset in range(start, len(ops)) if ops[offset] != OP_REPEAT]
        if not steps:
            return
        ops = ops[start:].replace(bytes([OP_REPEAT]), b"")
        if table.slab.layout.action is not None:
            actions = [array[steps, index].tobytes() for array in trajectory.actions]
            journal.record_steps(actions, ops, int(trajectory.checks[steps[-1], index]))
            return
        for step, op in zip(steps, ops, strict=True):
            check = int(trajectory.checks[step, index])
            if op == OP_RESET:
                journal.record_reset(check)
            else:
                action = trajectory.actions[0][step, index].copy()[()]
                journal.record_action(action, autoreset=within, check=check)

    # The end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Have the rows of envs mirror their last steps, and tell the rollout.

        If this is interrupted, a repair does all of it again.
        """
        run = self._run
        if run is None:
            return
        table, slab, trajectory = self._table, self._table.slab, self.trajectory
        ids = [index for index, counted in self._counted.items() if counted]
        if ids:
            at = np.array([self._counted[index] for index in ids])
            buffer = table.buffer_index[ids]
            starts = trajectory.starts[at, ids]
            for last, array in zip(slab.observations, trajectory.observations, strict=True):
                if array is not None and last is not None:
                    last[buffer, ids] = array[at, ids]
            if slab.layout.reward is not None:
                slab.rewards[ids] = trajectory.rewards[at - 1, ids]
            slab.terminated[ids] = trajectory.terminated[at - 1, ids]
            slab.truncated[ids] = trajectory.truncated[at - 1, ids]
            table.ops[ids] = buffer | starts * np.uint8(RESET_BIT)
            if self.contents or table.on_failure != "raise":
                for index in ids:
                    table.last_infos[index] = self._content_at(self._counted[index], index)
        run.last_errors.update(self.errors)
        self.has_ended = True
        run.on_part_end(self)
        self._run = None
        if self._has_others:
            self._renew_if_due(first=True)
        self._envs.save_due_states()

    def _content_at(self, step: int, index: int) -> bytes | None:
        """Return the encoded info and object leaves of the observation before a step; None without any."""
        if step == 0 or (step, index) in self.contents:
            return self.contents.get((step, index))
        cell = (step - 1) * self.trajectory.layout.envs + index
        if self.trajectory.info_encoding[cell] == PLAIN:
            return None
        large = self.large_infos.get(cell)
        return bytes(self.trajectory.inline_info(cell)) if large is None else large
