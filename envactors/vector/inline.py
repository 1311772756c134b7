"""The engine of in-process vectors: it runs their envs one after another, in the thread that steps or resets them.

So a request has run when `start_steps` or `start_resets` returns, and nothing has to wait. Calls of the envs are in
`envactors.actor.inline`; `envactors.vector.engine` is the engine of envs in workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.handle import ActorHandle
from envactors.actor.inline import InlineActor
from envactors.actor.running_code import InlineRequest
from envactors.errors import ActorError, AlreadyPendingError, NothingPendingError
from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Description, Frame, Kind
from envactors.mailbox.pickling import copy_value, safe_repr
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import split_batch, zeros
from envactors.vector.base import Engine, Futures, Options, Seeds
from envactors.vector.episodes import Episodes
from envactors.vector.fates import Cause, EnvFate, Facts, FailedRequest, settle
from envactors.vector.options import Choices
from envactors.vector.results import Batch, EnvSnapshot, EnvStep, failure_info, step_error
from envactors.vector.table import Selection
from envactors.vector.timing import StepTimes, TimedEnv
from envactors.worker.context import ActorContext
from envactors.worker.host import Fields, HostedEnv

# The seed and the options of a reset by autoreset.
_NO_ARGS = (None, None)


class _Requests(InlineRequest):
    """Steps or resets of some envs, which run one after another.

    Args:
        engine: The engine.
        ids: The envs.
        reset_args: The seed and the options of each reset that the user requests, by env; empty for steps.

    Attributes:
        ids, reset_args: As above.
        reset_env: The last env whose request was a reset, rather than a step; -1 for none.
        failures: The requests that have failed.
    """

    def __init__(self, engine: InlineEngine, ids: list[int], reset_args: dict[int, tuple[int | None, Any]]) -> None:
        super().__init__(ids[0] if ids else -1, is_nested=engine._lock.is_held_here())
        self._engine = engine
        self.ids, self.reset_args = ids, reset_args
        self.reset_env = -1
        self.failures: list[FailedRequest] = []

    def fail(self, index: int, cause: Cause, error: BaseException, *, in_reset: bool = False) -> None:
        """Keep the failure of an env until the other envs have run."""
        self._engine._other_requests[index] += 1
        incarnation = self._engine._actor_of[index].incarnation.index
        activity = Activity("reset" if in_reset else "step", index)
        failure = FailedRequest(cause, ReadyOutcome(None, error), incarnation, activity, in_reset=in_reset)
        self.failures.append(failure)

    def find_context(self) -> ActorContext | None:
        return self._engine._hosted_envs[self.index].context

    def describe(self) -> tuple[InlineActor, Activity]:
        engine, index = self._engine, self.index
        is_reset = index == self.reset_env or engine._is_within_reset(index)
        return engine._actor_of[index], Activity("reset" if is_reset else "step", index)


class _MissingEnv:
    """Placeholder for an env that its actor does not have.

    The actor is closed, the factory has raised, or an interrupt has ended the start of the env. In the last case, the
    next reset makes the env.
    """

    context = None

    def __init__(self, engine: InlineEngine, index: int) -> None:
        self._engine, self._index = engine, index

    def step(self, *_: Any) -> Fields:
        """Raise the error of the actor."""
        raise self._engine._actor_of[self._index].unusable_error(Activity("step", self._index))

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Fields:
        """Have the actor make the env, and reset it; raise the error of the actor if it cannot."""
        self._engine._actor_of[self._index].make_missing(Activity("reset", self._index))
        return self._engine._hosted_envs[self._index].reset(seed, options)


class InlineEngine(Engine):
    """Steps and resets envs in the calling thread.

    Args:
        choices: The options of the vector.
        actors: Handles of its in-process actors.
        described: The specs of one env.
    """

    _actor_of: list[InlineActor]

    def __init__(self, choices: Choices, actors: Sequence[ActorHandle], described: Description) -> None:
        found = [handle._actor for handle in actors]
        self.actors: list[InlineActor] = [actor for actor in found if isinstance(actor, InlineActor)]
        actor_of = [actor for actor in self.actors for _ in actor.range]
        count = len(actor_of)
        super().__init__(described, Episodes(count, choices.autoreset, choices.on_failure), actor_of)
        if choices.seed_episodes:
            self.episodes.seed_episodes()
        self.sequence_lengths: list[int] = [count]
        self._all_ids = np.arange(count)
        self._last: list[Fields | None] = [None] * count  # the last result of each env
        self._starts = [False] * count  # whether its observation is the first of an episode
        # Results that were not delivered yet, in the order of their completion, and the errors of failed requests.
        self._results: dict[int, Fields] = {}
        self._errors: dict[int, BaseException] = {}
        # The running requests, the outermost one first. A request that was interrupted stays until the next one.
        self._unfinished: list[_Requests] = []
        self._lock = self.actors[0].config.lock
        self._code = self.actors[0].code
        self._hosted_envs: list[HostedEnv | TimedEnv | _MissingEnv] = [_MissingEnv(self, i) for i in range(count)]
        # The memory in which each env records its current method: the counters of its actor's control page.
        self._counters: list[Any] = [None] * count
        self._incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._closed: set[int] = set()  # the envs of closed actors
        self._other_requests = [0] * count  # how many resets, and requests that failed, each env has had
        self._is_timing = False
        self._pages: dict[InlineActor, ControlPage | None] = {}
        self._times = {actor: StepTimes(len(actor.range)) for actor in self.actors}
        for actor in self.actors:
            self._take_envs(actor)
            actor.join(self, self._code)

    def _take_envs(self, actor: InlineActor) -> None:
        """Take the current envs of an actor, to step and reset them."""
        mine = slice_of(actor.range)
        page = actor.page
        if page is None:
            self._hosted_envs[mine] = [_MissingEnv(self, index) for index in actor.range]
            self._counters[mine] = [{METHOD: METHOD_STEP}] * len(actor.range)
        else:
            self._hosted_envs[mine] = [TimedEnv(env, page) if self._is_timing else env for env in actor.hosted_envs]
            self._counters[mine] = [page.counters] * len(actor.range)
        self._incarnations[mine] = actor.incarnation.index
        self._pages[actor] = page

    # For its actors --------------------------------------------------------------------------------------

    def on_change(self, actor: InlineActor) -> None:
        """Replace the envs of an actor by its current ones; the episodes of the previous ones are lost."""
        if self._is_timing:
            self._times[actor].add(self._pages[actor])
        self._take_envs(actor)
        if actor.closed.is_open:
            self._closed.update(actor.range)
        for index in actor.range:
            self.episodes.lose_process(index)
            self._starts[index] = False

    def count_rows(self, actor: InlineActor) -> int:
        """Return how many steps and resets the envs of an actor have run."""
        mine = slice_of(actor.range)
        return int(self.episodes.steps[mine].sum()) + sum(self._other_requests[mine])

    # Statistics ------------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        self._is_timing = True
        for actor in self.actors:
            self._take_envs(actor)

    def histograms(self) -> Histograms:
        return np.concatenate([times.total(self._pages[actor]) for actor, times in self._times.items()])

    # Requests --------------------------------------------------------------------------------------------

    def busy(self) -> list[int]:
        self._reset_if_interrupted()
        return [*self._results, *self._errors]

    receivable = busy

    def close(self) -> None:
        """Do nothing: `on_change` has dropped the envs of the closed actors."""

    # Snapshots -------------------------------------------------------------------------------------------

    def process_with_episode(self, index: int) -> None:
        if self.episodes.is_lost(index):
            raise self._lost_episode_error(index)

    def starts_episode(self, index: int) -> bool:
        return self._starts[index]

    def restorer(self, index: int, snapshot: EnvSnapshot) -> Callable[[Frame], object]:
        return functools.partial(self._on_restored, index, snapshot, self._last_of(snapshot, index))

    def _on_restored(self, index: int, snapshot: EnvSnapshot, last: EnvStep | None, reply: Frame) -> None:
        if reply.kind == Kind.FAILED:
            self.episodes.lose(index)
            return
        self._starts[index] = snapshot.starts
        if last is not None:
            self._last[index] = copy_value(last.obs), last.reward, last.terminated, last.truncated, last.info
        self.episodes.restore(index, snapshot)

    def _read_last(self, index: int) -> EnvStep | None:
        fields = self._last[index]
        return None if fields is None else self._as_step(index, _with_own_info(fields))

    # For rollouts ----------------------------------------------------------------------------------------

    def last_obs(self, index: int) -> Any:
        """Return the last observation of an env that has one."""
        last = self._last[index]
        assert last is not None, "the env has been reset"
        return last[0]

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        for index in self.all.ids:
            self.episodes.lose(index)

    # Running ---------------------------------------------------------------------------------------------

    def start_steps(
        self, envs: Selection, actions: Any, *, streams: bool, futures: Futures = (), is_checked: bool = True
    ) -> None:
        del streams
        if self._closed:
            self._check_open(envs, "step")
        self.check_idle(envs)
        has_flags = self.episodes.has_flags
        if has_flags:
            self.episodes.check_steppable(envs.ids)
        split = split_batch(self.action_spec if is_checked else None, actions, len(envs.ids), "actions")
        # Envs may modify their actions, so they get copies, except of the numbers in an array of one dimension.
        if type(split) is np.ndarray and split.ndim > 1:
            split = split.copy()
        elif type(split) is list:
            split = [copy_value(action) for action in split]
        # Local variables make the loop faster.
        episodes, results, hosted, last = self.episodes, self._results, self._hosted_envs, self._last
        resets_at_end, keeps_last = episodes.autoreset == "same_step", self.on_failure != "raise"
        resets_next, seeds = episodes.resets_next_of, episodes.next_seeds
        steps, starts = episodes.steps_of, self._starts
        # Without checks of resets, even a step can begin an episode, which `record` takes into account.
        may_begin = has_flags and not episodes.checks_resets
        running = _Requests(self, envs.ids, {})
        with self._lock, self._code.enter(running):
            self._unfinished.append(running)
            for index, action in zip(envs.ids, split, strict=True):
                running.index = index
                if has_flags and episodes.is_lost(index) and episodes.step_needs_episode(index):
                    running.fail(index, Cause.WAITING, self._lost_episode_error(index))
                    continue
                if resets_next[index]:
                    self._run_reset(running, index)
                    continue
                if resets_at_end:
                    self._counters[index][METHOD] = METHOD_STEP  # until a reset within the step changes it
                try:
                    fields = hosted[index].step(action, resets_at_end, seeds[index])
                    info = fields[4]
                    result = fields if type(info) is dict and not info else _with_own_info(fields)
                    kept = (copy_value(fields[0]), *fields[1:]) if keeps_last else fields
                except Exception as error:
                    running.fail(index, Cause.RAISED, error, in_reset=self._is_within_reset(index))
                    continue
                results[index] = result
                last[index] = kept
                ends = fields[2] or fields[3]
                if ends or (may_begin and not episodes.has_episode(index)):
                    episodes.record(index, ends=bool(ends), is_reset=False)
                    starts[index] = bool(ends) and resets_at_end
                else:
                    steps[index] += 1
                    starts[index] = False
            self._complete(running)
        if futures:
            self._resolve(envs, futures)

    def start_resets(self, envs: Selection, seeds: Seeds, options: Options, futures: Futures = ()) -> None:
        if self._closed:
            self._check_open(envs, "reset")
        self.check_idle(envs)
        arguments = zip(seeds, map(copy_value, options), strict=True)
        running = _Requests(self, envs.ids, dict(zip(envs.ids, arguments, strict=True)))
        with self._lock, self._code.enter(running):
            self._unfinished.append(running)
            for index in envs.ids:
                self._run_reset(running, index)
            self._complete(running)
        self._resolve(envs, futures)

    def _check_open(self, envs: Selection, method: str) -> None:
        """Raise the error of a request for an env of a closed actor."""
        for index in envs.ids:
            if index in self._closed:
                raise self._actor_of[index].unusable_error(Activity(method, index))

    def check_idle(self, envs: Selection) -> None:
        self._reset_if_interrupted()
        if self._lock.is_held_here():
            self._check_nested(envs.ids)
        results, errors = self._results, self._errors
        if (results or errors) and (busy := [index for index in envs.ids if index in results or index in errors]):
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them with recv first")

    def _check_nested(self, ids: list[int]) -> None:
        """Check a request that env code of this vector makes, while the vector steps or resets that env.

        Raises:
            RuntimeError: The request is for an env of the same actor.
            AlreadyPendingError: The request is for an env that is being stepped or reset, too.
        """
        for index in ids:
            self._actor_of[index].check_not_within()
        unfinished = {index for running in self._unfinished for index in running.ids}
        if busy := [index for index in ids if index in unfinished]:
            raise AlreadyPendingError(f"the envs {busy} belong to the request that runs this code of an env")

    def _reset_if_interrupted(self) -> None:
        """After an interrupt, drop the results of the requests that it has ended, and require a reset of their envs."""
        if self._unfinished and not self._lock.is_held_here():
            with self._lock:  # another thread may still run them
                for interrupted in self._unfinished:
                    self._drop(self.select(interrupted.ids))
                    for index in interrupted.ids:
                        self.episodes.lose(index)
                self._unfinished.clear()

    def _is_within_reset(self, index: int) -> bool:
        """Return whether an env that runs a step, or has raised in it, has come to the reset within that step."""
        return self.episodes.autoreset == "same_step" and bool(self._counters[index][METHOD] == METHOD_RESET)

    def _run_reset(self, running: _Requests, index: int) -> None:
        """Run the reset of an env; keep its result or failure."""
        running.index = running.reset_env = index
        try:
            self._results[index] = self._reset(index, *running.reset_args.get(index, _NO_ARGS))
        except Exception as error:
            running.fail(index, Cause.RAISED, error, in_reset=True)
        else:
            self._other_requests[index] += 1

    def _reset(self, index: int, seed: int | None, options: Any) -> Fields:
        """Reset an env, record that, and return the result.

        Args:
            index: The env.
            seed: The seed that the user has given; None to use that of the episode, if it has one.
            options: The options that the user has given; None for none.

        Raises:
            Exception: Raised by the env.
        """
        if seed is not None:
            self.episodes.set_root_seed(index, seed)
        else:
            seed = self.episodes.seed_of_reset(index, self._actor_of[index].incarnation.index)
        fields = self._hosted_envs[index].reset(seed, options)
        result = _with_own_info(fields)
        self._last[index] = (copy_value(fields[0]), *fields[1:]) if self.on_failure != "raise" else fields
        self.episodes.record(index, ends=False, is_reset=True)
        self._starts[index] = True
        return result

    def _lost_episode_error(self, index: int) -> ActorError:
        """Return the error of a step whose episode was lost when the envs of its actor were replaced."""
        actor = self._actor_of[index]
        activity = Activity("step", index)
        if actor.last_crash is None:  # its envs have not been replaced: the actor is closed
            return actor.unusable_error(activity)
        return actor.errors.not_begun(activity, actor.last_crash)

    def _complete(self, running: _Requests) -> None:
        """Handle the failures of a request all of whose envs have run.

        That may replace all envs of an actor, which ends the episodes of those that did not fail.
        """
        for failure in running.failures:
            index = running.index = failure.activity.env
            outcome = self._recover(running, failure)
            if isinstance(outcome, BaseException):
                self._errors[index] = outcome
            else:
                self._results[index] = outcome
        self._unfinished.remove(running)

    def _recover(self, running: _Requests, failure: FailedRequest) -> Fields | BaseException:
        """Replace the envs of an actor after a failure if necessary; return the outcome of the request."""
        index, in_reset = failure.activity.env, failure.in_reset
        actor, episodes, last = self._actor_of[index], self.episodes, self._last[index]
        asked_reset = index in running.reset_args
        error = failure.error.read()[1]
        assert error is not None, "the request has failed"
        facts = Facts(
            cause=failure.cause,
            on_failure=self.on_failure,
            autoreset=episodes.autoreset,
            reason=None,
            ran_reset=in_reset,
            ran_only_reset=in_reset and (asked_reset or episodes.autoreset != "same_step"),
            asked_reset=asked_reset,
            needs_episode=not in_reset,
            has_process=actor.is_usable,
            has_last=last is not None,
        )
        decision = settle(facts, episodes, index)
        # Another failure may have replaced the envs already.
        if decision.replaces_process and actor.incarnation.index == failure.incarnation:
            text = safe_repr(error)
            actor.replace(actor.errors.discarded(failure.activity, failure.incarnation, actor.pid, error, text))
        if decision.fate in (EnvFate.REPORT, EnvFate.FAIL):
            return error
        if decision.fate is EnvFate.TRUNCATE:
            assert last is not None, "without a last result, the fate is a reset"
            return last[0], zeros(self.reward_spec), False, True, {"failure": error}
        seed, options = running.reset_args.get(index, _NO_ARGS)
        try:
            fields = self._reset(index, seed if decision.repeats_reset else None, options)
        except Exception as second:
            return second
        obs, reward, _, _, info = fields
        before = None if asked_reset or last is None else (last[0], last[4])
        return obs, reward, False, not asked_reset, failure_info(info, error, before)

    def _resolve(self, envs: Selection, futures: Sequence[ActorFuture]) -> None:
        """Deliver results and errors to futures, if there are any."""
        for index, future in zip(envs.ids, futures, strict=False):
            error = self._errors.pop(index, None)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_outcome(ReadyOutcome(self._as_step(index, self._results.pop(index))))

    def _as_step(self, index: int, fields: Fields) -> EnvStep:
        """Return a result as users get it, with a copy of the observation, which the env may change later."""
        obs, reward, terminated, truncated, info = fields
        incarnation = int(self._incarnations[index])
        return EnvStep(index, copy_value(obs), reward, bool(terminated), bool(truncated), info, incarnation)

    # Delivering ------------------------------------------------------------------------------------------

    def finish(self, envs: Selection, timeout: float | None, deadline: float | None, caller: str) -> Batch:
        del timeout, deadline
        results, errors = self._results, self._errors
        failures = {index: errors[index] for index in envs.ids if index in errors} if errors else {}
        ids = [index for index in envs.ids if index not in failures] if failures else envs.ids
        try:
            fields = [results[index] for index in ids]
        except KeyError:
            raise NothingPendingError(
                f"{caller} has nothing to wait for, or the results were taken meanwhile"
            ) from None
        self._drop(envs)
        if not failures and self.batcher.is_plain:
            if envs.is_all:
                return self.batcher.batch(self._all_ids.copy(), fields, self._incarnations.copy())
            return self.batcher.batch(envs.at, fields, self._incarnations[envs.at])
        batch, mismatches = self.batcher.batch_steps(list(map(self._as_step, ids, fields)))
        if failures := {**failures, **mismatches}:
            raise step_error(failures, batch, len(envs.ids), caller, self._describe_actor)
        return batch

    def _drop(self, envs: Selection) -> None:
        """Forget the results and errors of envs."""
        if envs.is_all:
            self._results.clear()
            self._errors.clear()
            return
        for index in envs.ids:
            self._results.pop(index, None)
            self._errors.pop(index, None)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        del min_envs
        ids = list(self._results)[:max_envs] + list(self._errors)
        return self.finish(self.select(ids), None, deadline, "recv")

    def make_idle(self, envs: Selection, timeout: float | None, deadline: float | None) -> None:
        del timeout, deadline
        self._reset_if_interrupted()
        self._drop(envs)


def _with_own_info(fields: Fields) -> Fields:
    """Return a result with a copy of the env's info, which the env may change later."""
    return (*fields[:4], copy_value(fields[4]))
