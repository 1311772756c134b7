"""Steps and resets of envs that run in-process, one after the other, in the thread that steps.

`SerialEngine` has the interface of `envactors.vector.engine.RowEngine`. A request has run once it is started. With
``on_failure="replay"`` a failed env is renewed, since its process cannot crash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.handle import ActorHandle
from envactors.actor.inline import InlineActor
from envactors.actor.running_code import InlineRequest
from envactors.errors import ActorError, AlreadyPendingError, NothingPendingError
from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Description, Frame, Kind
from envactors.mailbox.pickling import copy_value, safe_repr
from envactors.mailbox.specs import Spec, split_batch, zeros
from envactors.vector.base import Engine, Futures, Options, Seeds
from envactors.vector.episodes import LOST, NO_EPISODE, NO_RESULT, Episodes
from envactors.vector.failures import step_error
from envactors.vector.options import Choices
from envactors.vector.recovery import Cause, EnvFate, Facts, settle
from envactors.vector.results import Batch, EnvSnapshot, EnvStep, failure_info
from envactors.vector.step_times import StepTimes
from envactors.vector.table import Selection
from envactors.vector.timed_env import TimedEnv
from envactors.worker.context import ActorContext
from envactors.worker.host import Fields

# The seed and the options of a reset that the user has not asked for.
_NOT_ASKED = (None, None)


class _Failed(NamedTuple):
    """A request without a result.

    Attributes:
        env_id: The env.
        incarnation: The incarnation of the env in which it has failed.
        cause: Whether the env has raised, or the request needs an episode that was lost with the envs before it.
        error: The error.
        in_reset: Whether the env has raised in a reset, perhaps within a step.
    """

    env_id: int
    incarnation: int
    cause: Cause
    error: BaseException
    in_reset: bool = False


class _Requests(InlineRequest):
    """Steps or resets of some envs, which run one after the other.

    Args:
        engine: The engine.
        ids: The envs.
        asked: The seed and the options of each reset that the user has asked for, by env.

    Attributes:
        ids, asked: As above.
        reset_env: The env that was last reset, other than within a step; -1 if none was.
        failed: The requests that have failed.
    """

    def __init__(self, engine: SerialEngine, ids: list[int], asked: dict[int, tuple[int | None, Any]]) -> None:
        super().__init__(ids[0] if ids else -1, is_nested=engine._lock.is_held_here())
        self._engine = engine
        self.ids, self.asked = ids, asked
        self.reset_env = -1
        self.failed: list[_Failed] = []

    def find_context(self) -> ActorContext | None:
        context: ActorContext | None = self._engine._hosted[self.index].context
        return context

    def describe(self) -> tuple[InlineActor, Step]:
        engine, index = self._engine, self.index
        is_reset = index == self.reset_env or engine._is_within_reset(index)
        return engine._owners[index], Step("reset" if is_reset else "step", index)


class _MissingEnv:
    """Takes the place of an env that could not be made again, or was not made yet because of an interrupt."""

    def __init__(self, actor: InlineActor, index: int, hosted: list[Any]) -> None:
        self._actor, self._index, self._hosted = actor, index, hosted
        self.context = None

    def step(self, *_: Any) -> Fields:
        """Raise the error of its actor."""
        raise self._actor.unusable_error(Step("step", self._index))

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Fields:
        """Make the env and reset it; raise the error of its actor if there is no env to make."""
        self._actor.make_missing(Step("reset", self._index))
        fields: Fields = self._hosted[self._index].reset(seed, options)
        return fields


class SerialEngine(Engine):
    """Steps and resets envs in the calling thread.

    Args:
        choices: The options of the vector.
        actors: Handles of its in-process actors.
        described: The specs of one env.
    """

    def __init__(self, choices: Choices, actors: Sequence[ActorHandle], described: Description) -> None:
        found = [handle._actor for handle in actors]
        self.actors: list[InlineActor] = [actor for actor in found if isinstance(actor, InlineActor)]
        self._owners: list[InlineActor] = [actor for actor in self.actors for _ in actor.range]
        count = len(self._owners)
        episodes = Episodes(count, choices.autoreset)
        super().__init__(described, episodes, "raise" if choices.on_failure == "raise" else "renew", self._owners)
        if choices.seed_episodes:
            episodes.seed_episodes()
        self.reward_spec: Spec = described.reward
        self._all_ids = np.arange(count)
        self._last: list[Fields | None] = [None] * count
        # Outcomes that were not delivered yet, in the order of their completion.
        self._outcomes: dict[int, Fields | BaseException] = {}
        self._failed: set[int] = set()  # the envs whose outcome is an exception
        # The requests that are running; if an exception has ended one, the next request finds it here.
        self._unfinished: list[_Requests] = []
        self._lock = self.actors[0].config.lock
        self._code = self.actors[0].code
        self._hosted: list[Any] = [None] * count
        # The current method of each env, as `HostedEnv` records it on the control page of its actor.
        self._methods: list[Any] = [None] * count
        self._incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._closed: set[int] = set()  # the envs of closed actors
        self._others = [0] * count  # how many requests that were no steps, or failed, each env has had
        self._is_timing = False
        self._pages: dict[InlineActor, ControlPage | None] = {}
        self._times = {actor: StepTimes(len(actor.range)) for actor in self.actors}
        for actor in self.actors:
            self._find_envs(actor)
            actor.join(self, self._code)

    def _find_envs(self, actor: InlineActor) -> None:
        """Look up the present envs of an actor."""
        found, page = actor.hosted_envs, actor.page
        self._pages[actor] = page
        for position, index in enumerate(actor.range):
            if page is None:
                self._hosted[index], self._methods[index] = _MissingEnv(actor, index, self._hosted), {}
            else:
                env = found[position]
                self._hosted[index] = TimedEnv(env, page) if self._is_timing else env
                self._methods[index] = page.counters
            self._incarnations[index] = actor.incarnation.index

    # For its actors --------------------------------------------------------------------------------------

    def on_change(self, actor: InlineActor) -> None:
        """Use the present envs of an actor; the episodes of those before are lost."""
        if self._is_timing:
            self._times[actor].add(self._pages[actor])
        self._find_envs(actor)
        if actor.closed.is_open:
            self._closed.update(actor.range)
        for index in actor.range:
            self.episodes.lose_process(index)
            self.episodes.starts[index] = False

    def count_rows(self, actor: InlineActor) -> int:
        """Return how many steps and resets the envs of an actor have run."""
        mine = slice(actor.range.start, actor.range.stop)
        return int(self.episodes.steps[mine].sum()) + sum(self._others[mine])

    # ---

    def begin_timing(self) -> None:
        self._is_timing = True
        for actor in self.actors:
            self._find_envs(actor)

    def histograms(self) -> Histograms:
        return np.concatenate([times.total(self._pages[actor]) for actor, times in self._times.items()])

    def in_turns(self) -> list[int]:
        return [len(self.all.ids)]

    def busy(self) -> list[int]:
        self._reset_if_interrupted()
        return list(self._outcomes)

    receivable = busy

    def close(self) -> None:
        """Forget the envs."""
        self._hosted = []

    # Snapshots -------------------------------------------------------------------------------------------

    def process_with_episode(self, index: int) -> None:
        """Return None; see `RowEngine.process_with_episode`."""
        if self.episodes.flags[index] & LOST:
            raise self._describe_loss(index)

    def starts_episode(self, index: int) -> bool:
        return bool(self.episodes.starts[index])

    def restorer(self, index: int, snapshot: EnvSnapshot) -> Callable[[Frame], object]:
        return functools.partial(self._on_restored, index, snapshot)

    def _on_restored(self, index: int, snapshot: EnvSnapshot, reply: Frame) -> None:
        if reply.kind == Kind.FAILED:
            self.episodes.lose(index)
            return
        self.episodes.resume(index, snapshot.root_seed, snapshot.episode, resets_next=snapshot.resets_next)
        self.episodes.starts[index] = snapshot.starts
        last = snapshot.last
        if last is not None:
            self._last[index] = copy_value(last.obs), last.reward, last.terminated, last.truncated, last.info
            self.episodes.flags[index] &= ~NO_RESULT

    def read_last(self, index: int) -> EnvStep | None:
        fields = self._last[index]
        if fields is not None and self.episodes.flags[index] & NO_EPISODE:
            fields = fields[0], zeros(self.reward_spec), False, True, fields[4]
        return None if fields is None else self._as_step(index, fields)._replace(info=copy_value(fields[4]))

    # For rollouts ----------------------------------------------------------------------------------------

    def last_obs(self, index: int) -> Any:
        """Return the last observation of an env."""
        last = self._last[index]
        assert last is not None, "it has been reset"
        return last[0]

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        for index in self.all.ids:
            self.episodes.lose(index)

    # Running ---------------------------------------------------------------------------------------------

    def start_steps(
        self, envs: Selection, actions: Any, *, rings_each: bool, futures: Futures = (), is_checked: bool = True
    ) -> None:
        del rings_each
        self.check_idle(envs)
        has_flags = self.episodes.has_flags
        if has_flags:
            self.check_steppable(envs)
        each = split_batch(self.action_spec if is_checked else None, actions, len(envs.ids), "actions")
        if type(each) is np.ndarray and each.ndim > 1:
            each = each.copy()  # an env may modify its action
        elif type(each) is list:
            each = [copy_value(action) for action in each]
        episodes, outcomes, hosted, last = self.episodes, self._outcomes, self._hosted, self._last
        autoreset, keeps_last = episodes.autoreset == "same_step", self.on_failure != "raise"
        resets_next, seeds = episodes.resets_next_of, episodes.next_seeds
        steps, starts = episodes.steps_of, episodes.starts
        flags = episodes.flags
        running = _Requests(self, envs.ids, {})
        with self._lock, self._code.enter(running):
            self._unfinished.append(running)
            for index, action in zip(envs.ids, each, strict=True):
                running.index = index
                if has_flags and flags[index] & LOST and not (resets_next[index] and self.on_failure == "raise"):
                    self._fail(running, Cause.WAITING, self._describe_loss(index))
                    continue
                if resets_next[index]:
                    self._run_reset(running, index)
                    continue
                if autoreset:
                    self._methods[index][METHOD] = METHOD_STEP  # a reset within the step changes it
                try:
                    fields = hosted[index].step(action, autoreset, seeds[index])
                except Exception as error:
                    self._fail(running, Cause.RAISED, error, in_reset=self._is_within_reset(index))
                    continue
                info = fields[4]
                outcomes[index] = fields if type(info) is dict and not info else _with_own_info(fields)
                last[index] = (copy_value(fields[0]), *fields[1:]) if keeps_last else fields
                ends = fields[2] or fields[3]
                if ends or (has_flags and flags[index] & NO_EPISODE):  # it was never reset, and nobody checks that
                    episodes.record(index, ends=bool(ends), is_reset=False)
                    starts[index] = bool(ends) and autoreset
                else:
                    steps[index] += 1
                    starts[index] = False
            self._complete(running)
        if futures:
            self._resolve(envs, futures)

    def start_resets(self, envs: Selection, seeds: Seeds, options: Options, futures: Futures = ()) -> None:
        self.check_idle(envs)
        own_options = map(copy_value, options)
        running = _Requests(self, envs.ids, dict(zip(envs.ids, zip(seeds, own_options, strict=True), strict=True)))
        with self._lock, self._code.enter(running):
            self._unfinished.append(running)
            for index, seed in zip(envs.ids, seeds, strict=True):
                if seed is not None:
                    self.episodes.set_root_seed(index, seed)
                self._run_reset(running, index)
            self._complete(running)
        self._resolve(envs, futures)

    def check_idle(self, envs: Selection) -> None:
        self._reset_if_interrupted()
        if self._lock.is_held_here():
            self._check_nested(envs.ids)
        for index in envs.ids if self._closed else ():
            if index in self._closed:
                raise self._owners[index].unusable_error(Step("step", index))
        if self._outcomes and (busy := [index for index in envs.ids if index in self._outcomes]):
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them with recv first")

    def _check_nested(self, ids: list[int]) -> None:
        """Check a request that env code of this vector makes.

        Raises:
            RuntimeError: An env belongs to the actor of that code.
            AlreadyPendingError: An env belongs to the request that runs that code.
        """
        for index in ids:
            self._owners[index].check_not_within()
        waiting = {index for running in self._unfinished for index in running.ids}
        if busy := [index for index in ids if index in waiting]:
            raise AlreadyPendingError(f"the envs {busy} belong to the request that runs this code of an env")

    def _reset_if_interrupted(self) -> None:
        """Require a reset of the envs that were running when an exception ended a request, and drop their results."""
        if self._unfinished and not self._lock.is_held_here():
            with self._lock:  # another thread may still run them
                for interrupted in self._unfinished:
                    self._drop(self.select(interrupted.ids))
                    for index in interrupted.ids:
                        self.episodes.lose(index)
                self._unfinished.clear()

    def _is_within_reset(self, index: int) -> bool:
        """Return whether an env runs the reset within a step, or has raised there."""
        return self.episodes.autoreset == "same_step" and bool(self._methods[index][METHOD] == METHOD_RESET)

    def _run_reset(self, running: _Requests, index: int) -> None:
        """Reset an env, and keep the outcome."""
        running.index = running.reset_env = index
        try:
            self._outcomes[index] = self._reset(index, *running.asked.get(index, _NOT_ASKED))
        except Exception as error:
            self._fail(running, Cause.RAISED, error, in_reset=True)
        else:
            self._others[index] += 1

    def _reset(self, index: int, seed: int | None, options: Any) -> Fields:
        """Reset an env, with the seed and the options of the user if there are any; record and return the result.

        Raises:
            Exception: Raised by the env.
        """
        if seed is None:
            seed = self.episodes.seed_of_reset(index, self._owners[index].incarnation.index)
        fields: Fields = self._hosted[index].reset(seed, options)
        self.episodes.record(index, ends=False, is_reset=True)
        self._last[index] = (copy_value(fields[0]), *fields[1:]) if self.on_failure != "raise" else fields
        self.episodes.starts[index] = True
        return _with_own_info(fields)

    def _fail(self, running: _Requests, cause: Cause, error: BaseException, *, in_reset: bool = False) -> None:
        """Keep the failure of the env that is running."""
        self._others[running.index] += 1
        incarnation = self._owners[running.index].incarnation.index
        running.failed.append(_Failed(running.index, incarnation, cause, error, in_reset))

    def _describe_loss(self, index: int) -> ActorError:
        """Return the error of a step that needs an episode which has ended with the envs before these."""
        owner = self._owners[index]
        assert owner.last_crash is not None, "otherwise its envs are the first"
        return owner.errors.not_begun(Step("step", index), owner.last_crash)

    def _complete(self, running: _Requests) -> None:
        """Set the outcomes of requests that have failed, once all others have run."""
        for failed in running.failed:
            index = running.index = failed.env_id
            outcome = self._outcomes[index] = self._recover(running, failed)
            if isinstance(outcome, BaseException):
                self._failed.add(index)
        self._unfinished.remove(running)

    def _recover(self, running: _Requests, failed: _Failed) -> Fields | BaseException:
        """Return the outcome of a request that has failed."""
        index, error, owner = failed.env_id, failed.error, self._owners[failed.env_id]
        last, episodes, is_asked = self._last[index], self.episodes, index in running.asked
        facts = Facts(
            failed.cause,
            self.on_failure,
            episodes.autoreset,
            None,
            was_reset=failed.in_reset,
            asked_reset=is_asked,
            needs_episode=not failed.in_reset,
            has_process=owner.is_usable,
            has_last=last is not None,
            is_reset=failed.in_reset and (is_asked or episodes.autoreset != "same_step"),
        )
        fate, repeats_reset, needs_new_envs = settle(facts, episodes, index)
        if needs_new_envs and owner.incarnation.index == failed.incarnation:
            step = Step("reset" if failed.in_reset else "step", index)
            owner.replace(owner.errors.discarded(step, failed.incarnation, owner.pid, error, safe_repr(error)))
        if fate in (EnvFate.REPORT, EnvFate.FAIL):
            return error
        if fate is EnvFate.TRUNCATE:
            assert last is not None, "otherwise it is reset"
            return last[0], zeros(self.reward_spec), False, True, {"failure": error}
        seed, options = running.asked.get(index, _NOT_ASKED)
        try:
            fields = self._reset(index, seed if repeats_reset else None, options)
        except Exception as second:
            return second
        before = None if is_asked or last is None else (last[0], last[4])
        return *fields[:2], False, not is_asked, failure_info(fields[4], error, before)

    def _resolve(self, envs: Selection, futures: Sequence[ActorFuture]) -> None:
        """Deliver outcomes to futures."""
        for index, future in zip(envs.ids, futures, strict=False):
            outcome = self._outcomes.pop(index)
            self._failed.discard(index)
            if isinstance(outcome, BaseException):
                future.set_error(outcome)
            else:
                future.set_outcome(ReadyOutcome(self._as_step(index, outcome)))

    def _as_step(self, index: int, fields: Fields) -> EnvStep:
        """Return a result with an observation that the env cannot change."""
        obs, reward, terminated, truncated, info = fields
        flags = bool(terminated), bool(truncated)
        return EnvStep(index, copy_value(obs), reward, *flags, info, int(self._incarnations[index]))

    # Delivering ------------------------------------------------------------------------------------------

    def finish(self, envs: Selection, timeout: float | None, deadline: float | None, caller: str) -> Batch:
        del timeout, deadline
        pending, failed = self._outcomes, self._failed
        is_gone = len(pending) < len(envs.ids) if envs.is_all else any(index not in pending for index in envs.ids)
        if is_gone:
            raise NothingPendingError(f"{caller} has nothing to wait for, or the results were taken meanwhile")
        if not failed and self.batcher.is_plain:
            fields: list[Any] = [pending[index] for index in envs.ids]
            self._drop(envs)
            if envs.is_all:
                return self.batcher.batch(self._all_ids.copy(), fields, self._incarnations.copy())
            return self.batcher.batch(envs.at, fields, self._incarnations[envs.at])
        outcomes: dict[int, Any] = {index: pending[index] for index in envs.ids}
        failures = {index: outcomes.pop(index) for index in envs.ids if index in failed}
        self._drop(envs)
        batch, mismatches = self.batcher.batch_steps([self._as_step(index, one) for index, one in outcomes.items()])
        if failures := {**failures, **mismatches}:
            raise step_error(failures, batch, len(envs.ids), caller, self._describe_actor)
        return batch

    def _drop(self, envs: Selection) -> None:
        """Forget the outcomes of envs, which are delivered, or nobody wants."""
        if envs.is_all:
            self._outcomes.clear()
            self._failed.clear()
            return
        for index in envs.ids:
            self._outcomes.pop(index, None)
            self._failed.discard(index)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        del min_envs
        failed = [index for index in self._outcomes if index in self._failed]
        ids = [index for index in self._outcomes if index not in failed][:max_envs] + failed
        return self.finish(self.select(ids), None, deadline, "recv")

    def discard(self, envs: Selection, timeout: float | None, deadline: float | None) -> None:
        del timeout, deadline
        self._reset_if_interrupted()
        self._drop(envs)


def _with_own_info(fields: Fields) -> Fields:
    """Return a result with a copy of the env's info, which the env may change later."""
    return (*fields[:4], copy_value(fields[4]))
