"""Steps and resets of envs that run in-process, one after the other, in the thread that steps.

`SerialEngine` has the interface of `envactors.vector.engine.RowEngine`. A request has run once it is started. With
``on_failure="replay"`` a failed env is renewed, since its process cannot crash.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.handle import ActorHandle
from envactors.actor.inline import InlineActor
from envactors.actor.inline_watch import InlineRequest, InlineWatch
from envactors.errors import ActorError, AlreadyPendingError, NothingPendingError
from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Description, Frame, Kind
from envactors.mailbox.pickling import copy_value, safe_repr
from envactors.mailbox.specs import Spec, split_batch, zeros
from envactors.options import as_deadlines
from envactors.vector.base import Engine
from envactors.vector.episodes import LOST, NO_EPISODE, NO_RESULT, Episodes
from envactors.vector.failures import step_error
from envactors.vector.options import Choices
from envactors.vector.recovery import Cause, EnvFate, Facts, settle
from envactors.vector.results import Batch, EnvSnapshot, EnvStep, failure_info
from envactors.vector.step_times import StepTimes
from envactors.vector.table import Selection
from envactors.vector.timed_env import TimedEnv
from envactors.worker import context
from envactors.worker.context import ActorContext
from envactors.worker.host import Fields


class _RaisedRequest(NamedTuple):
    """A step or reset in which an env has raised, or that needs an episode that was lost with the envs before it.

    Attributes:
        env_id: The env.
        error: The exception.
        cause: Whether it has raised.
        was_reset: Whether it was in a reset, perhaps within a step.
        is_asked: Whether the user asked for a reset.
        seed, options: The user's seed and options of that.
        incarnation: The incarnation of the env.
    """

    env_id: int
    error: BaseException
    cause: Cause
    was_reset: bool = False
    is_asked: bool = False
    seed: int | None = None
    options: Any = None
    incarnation: int = 0


class _MissingEnv:
    """Takes the place of an env that could not be made again, or was not made yet because of an interrupt."""

    def __init__(self, actor: InlineActor, index: int, hosted: list[Any]) -> None:
        self._actor, self._index, self._hosted = actor, index, hosted

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
        self._actors: list[Any] = [actor._actor for actor in actors]
        self._owners: list[InlineActor] = [actor for actor in self._actors for _ in actor.hosted_envs]
        count = len(self._owners)
        episodes = Episodes(count, choices.autoreset)
        super().__init__(described, episodes, "raise" if choices.on_failure == "raise" else "renew")
        if choices.seed_episodes:
            episodes.seed_episodes()
        self.reward_spec: Spec = described.reward
        self._all_ids = np.arange(count)
        self._last: list[Fields | None] = [None] * count
        # Outcomes that were not delivered yet, in the order of their completion.
        self._outcomes: dict[int, Fields | BaseException] = {}
        self._failed: set[int] = set()  # the envs whose outcome is an exception
        # The envs of each request that is running; if an exception has ended it, the next request finds them here.
        self._unfinished: list[list[int]] = []
        self._lock = self._actors[0].config.lock
        self._running_envs: list[int] = []  # the envs whose code is running, the outermost one first
        self._requests = 0  # how many requests have begun
        self._thread: int | None = None  # the thread that makes the current one
        self._reset_env = -1  # the env of that request that was last reset, other than within a step
        slow = as_deadlines(choices.deadlines).slow
        self._watch = InlineWatch(self._actors[0].runtime.loop, slow, self._find_running)
        self._hosted: list[Any] = [None] * count
        self._contexts: list[ActorContext | None] = [None] * count
        # The current method of each env, as `HostedEnv` records it on the control page of its actor.
        self._methods: list[Any] = [None] * count
        self._incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._closed: set[int] = set()  # the envs of closed actors
        # How many requests of all envs there were, and how many others each env has had.
        self._full_requests = 0
        self._other_requests = [0] * count
        self._is_timing = False
        self._pages: dict[InlineActor, ControlPage | None] = {}
        self._times = {actor: StepTimes(len(envs)) for actor, envs in self.ranges()}
        for actor, envs in self.ranges():
            self._find_envs(actor, envs)
            actor.on_change = functools.partial(self._on_change, actor, envs)
            actor.count_rows = functools.partial(self._count_rows, envs)
            actor.running_envs = self._running_envs
            actor.find_stepping_thread = functools.partial(self._find_thread, envs)

    def _find_envs(self, actor: InlineActor, envs: range) -> None:
        """Look up the present envs of an actor."""
        found, page = actor.hosted_envs, actor.page
        self._pages[actor] = page
        for position, index in enumerate(envs):
            if found:
                assert page is not None, "it has envs"
                env, self._contexts[index] = found[position]
                self._hosted[index] = TimedEnv(env, page) if self._is_timing else env
                self._methods[index] = page.counters
            else:
                self._hosted[index] = _MissingEnv(actor, index, self._hosted)
                self._contexts[index], self._methods[index] = None, {}
            self._incarnations[index] = actor.incarnation.index

    def _on_change(self, actor: InlineActor, envs: range) -> None:
        """Lose the episodes of an actor whose envs are others now, or gone."""
        if self._is_timing:
            self._times[actor].add(self._pages[actor])
        self._find_envs(actor, envs)
        if actor.closed.is_open:
            self._closed.update(envs)
        for index in envs:
            self.episodes.lose_process(index)
            self.episodes.starts[index] = False

    def _find_thread(self, envs: range) -> int | None:
        """Return the thread that steps or resets one of these envs; None if none does."""
        return self._thread if any(index in envs for index in tuple(self._running_envs)) else None

    def _count_rows(self, envs: range) -> int:
        """Return how many steps and resets these envs have run."""
        return self._full_requests * len(envs) + sum(self._other_requests[envs.start : envs.stop])

    def begin_timing(self) -> None:
        self._is_timing = True
        for actor, envs in self.ranges():
            self._find_envs(actor, envs)

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

    def ranges(self) -> list[tuple[InlineActor, range]]:
        """Return each actor with the range of its envs."""
        firsts = [*(actor.config.first_index for actor in self._actors), len(self._owners)]
        return [(actor, range(*bounds)) for actor, bounds in zip(self._actors, itertools.pairwise(firsts), strict=True)]

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
        self,
        envs: Selection,
        actions: Any,
        *,
        rings_each: bool,
        futures: Sequence[ActorFuture] = (),
        is_checked: bool = True,
    ) -> None:
        del rings_each
        self.check_idle(envs)
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
        raised: list[_RaisedRequest] = []
        flags = episodes.flags
        has_flags = episodes.has_flags
        running = self._running_envs
        with self._running(envs.ids):
            for index, action in zip(envs.ids, each, strict=True):
                running[-1] = index
                if has_flags and flags[index] & LOST and not (resets_next[index] and self.on_failure == "raise"):
                    raised.append(_RaisedRequest(index, self._describe_loss(index), Cause.WAITING))
                    continue
                if resets_next[index]:
                    self._run_reset(index, None, None, raised)
                    continue
                if autoreset:
                    self._methods[index][METHOD] = METHOD_STEP  # a reset within the step changes it
                try:
                    fields = hosted[index].step(action, autoreset, seeds[index])
                except Exception as error:
                    was_reset = autoreset and self._methods[index][METHOD] == METHOD_RESET
                    raised.append(self._note(index, error, was_reset=was_reset))
                    continue
                outcomes[index] = _with_own_info(fields)
                last[index] = (copy_value(fields[0]), *fields[1:]) if keeps_last else fields
                ends = fields[2] or fields[3]
                if ends or (has_flags and flags[index] & NO_EPISODE):  # it was never reset, and nobody checks that
                    episodes.record(index, ends=bool(ends), is_reset=False)
                    starts[index] = bool(ends) and autoreset
                else:
                    steps[index] += 1
                    starts[index] = False
            self._recover_all(raised)
        if futures:
            self._resolve(envs, futures)

    def start_resets(
        self,
        envs: Selection,
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        futures: Sequence[ActorFuture] = (),
    ) -> None:
        self.check_idle(envs)
        raised: list[_RaisedRequest] = []
        with self._running(envs.ids):
            for index, seed, each in zip(envs.ids, seeds, options, strict=True):
                if seed is not None:
                    self.episodes.set_root_seed(index, seed)
                self._run_reset(index, seed, copy_value(each), raised, is_asked=True)
            self._recover_all(raised)
        self._resolve(envs, futures)

    def check_idle(self, envs: Selection) -> None:
        self._reset_if_interrupted()
        if self._running_envs and self._lock.is_held_here():
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
        waiting = {index for running in self._unfinished for index in running}
        if busy := [index for index in ids if index in waiting]:
            raise AlreadyPendingError(f"the envs {busy} belong to the request that runs this code of an env")

    def _reset_if_interrupted(self) -> None:
        """Require a reset of the envs that were running when an exception ended a request, and drop their results."""
        if self._unfinished and not self._lock.is_held_here():
            with self._lock:  # another thread may still run them
                for ids in self._unfinished:
                    self._drop(self.select(ids))
                    for index in ids:
                        self.episodes.lose(index)
                self._unfinished.clear()

    def _find_running(self) -> InlineRequest | None:
        """Return the step or reset that is running; None if none is."""
        thread, running = self._thread, self._running_envs[-1:]
        if thread is None or not running:
            return None
        index = running[0]
        within_step = self.episodes.autoreset == "same_step" and self._methods[index][METHOD] == METHOD_RESET
        step = Step("reset" if index == self._reset_env or within_step else "step", index)
        return InlineRequest(self._owners[index], step, (self._requests, index), thread)

    @contextlib.contextmanager
    def _running(self, ids: list[int]) -> Iterator[None]:
        """Return the context in which env code runs."""
        outer = (self._thread, self._reset_env) if self._lock.is_held_here() else None
        with self._lock:
            if outer is None:
                self._running_envs.clear()
            self._unfinished.append(ids)
            self._running_envs.append(ids[0] if ids else 0)
            self._reset_env, depth = -1, len(self._running_envs) - 1
            self._requests += 1
            self._thread = threading.get_ident()
            self._watch.begin()
            token = context.of_thread.set(lambda: self._contexts[self._running_envs[depth]])
            try:
                yield
            finally:
                self._thread, self._reset_env = outer or (None, -1)
                context.of_thread.reset(token)
                del self._running_envs[depth:]
            self._unfinished.remove(ids)
            if ids is self.all.ids:
                self._full_requests += 1
            else:
                for index in ids:
                    self._other_requests[index] += 1

    def _run_reset(
        self, index: int, seed: int | None, options: Any, raised: list[_RaisedRequest], *, is_asked: bool = False
    ) -> None:
        """Reset one env, and keep the outcome.

        Args:
            index: The env.
            seed: The user's seed.
            options: The user's options.
            raised: Gets the request if the env raises.
            is_asked: Whether the user has asked for it, rather than autoreset.
        """
        self._running_envs[-1] = self._reset_env = index
        try:
            fields = self._hosted[index].reset(self._seed_of(index) if seed is None else seed, options)
        except Exception as error:
            raised.append(self._note(index, error, was_reset=True, is_asked=is_asked, seed=seed, options=options))
        else:
            self._outcomes[index] = self._accept_reset(index, fields)

    def _note(self, index: int, error: Exception, **facts: Any) -> _RaisedRequest:
        incarnation = self._owners[index].incarnation.index
        return _RaisedRequest(index, error, Cause.RAISED, incarnation=incarnation, **facts)

    def _describe_loss(self, index: int) -> ActorError:
        """Return the error of a step that needs an episode which has ended with the envs before these."""
        owner = self._owners[index]
        assert owner.last_crash is not None, "otherwise its envs are the first"
        return owner.errors.not_begun(Step("step", index), owner.last_crash)

    def _recover_all(self, raised: list[_RaisedRequest]) -> None:
        """Set the outcomes of requests that have raised, once all others of the same envs have run."""
        for request in raised:
            self._running_envs[-1] = request.env_id
            outcome = self._recover(request)
            self._outcomes[request.env_id] = outcome
            if isinstance(outcome, BaseException):
                self._failed.add(request.env_id)

    def _seed_of(self, index: int) -> int | None:
        return self.episodes.seed_of_reset(index, self._owners[index].incarnation.index)

    def _accept_reset(self, index: int, fields: Fields) -> Fields:
        """Record the result of a reset and return it."""
        self.episodes.record(index, ends=False, is_reset=True)
        self._last[index] = (copy_value(fields[0]), *fields[1:]) if self.on_failure != "raise" else fields
        self.episodes.starts[index] = True
        return _with_own_info(fields)

    def _recover(self, request: _RaisedRequest) -> Fields | BaseException:
        """Return the outcome of a request whose env has raised, or has lost the episode that it needs."""
        index, error, owner = request.env_id, request.error, self._owners[request.env_id]
        last, episodes = self._last[index], self.episodes
        facts = Facts(
            request.cause,
            self.on_failure,
            episodes.autoreset,
            None,
            was_reset=request.was_reset,
            asked_reset=request.is_asked,
            needs_episode=not request.was_reset,
            has_process=owner.is_usable,
            has_last=last is not None,
        )
        fate, repeats_reset, needs_new_envs = settle(facts, episodes, index)
        if needs_new_envs and owner.incarnation.index == request.incarnation:
            step = Step("reset" if request.was_reset else "step", index)
            owner.replace(owner.errors.discarded(step, request.incarnation, owner.pid, error, safe_repr(error)))
        if fate in (EnvFate.REPORT, EnvFate.FAIL):
            return error
        if fate is EnvFate.TRUNCATE:
            assert last is not None, "otherwise it is reset"
            return last[0], zeros(self.reward_spec), False, True, {"failure": error}
        try:
            seed = request.seed if repeats_reset and request.seed is not None else self._seed_of(index)
            fields = self._hosted[index].reset(seed, request.options)
        except Exception as second:
            return second
        fields = self._accept_reset(index, fields)
        before = None if request.is_asked or last is None else (last[0], last[4])
        return *fields[:2], False, not request.is_asked, failure_info(fields[4], error, before)

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

    def _describe_actor(self, index: int) -> str:
        owner = self._owners[index]
        return f"actor {owner.name!r}, pid {owner.pid}, incarnation {owner.incarnation.index}"

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
    info = fields[4]
    return fields if type(info) is dict and not info else (*fields[:4], copy_value(info))
