"""The engine of in-process vectors: it runs their envs one after another, in the thread that steps or resets them.

So a request has run when `start_steps` or `start_resets` returns, and nothing has to wait. Calls of the envs are in
`envactors.actor.inline`; `envactors.vector.engine` is the engine of envs in workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from envactors.actor.actor_process import MOST_WITHOUT_BACKOFF
from envactors.actor.future import ReadyOutcome
from envactors.actor.handle import ActorHandle
from envactors.actor.inline import InlineActor
from envactors.actor.job import Activity
from envactors.actor.request_stack import InlineRequest
from envactors.errors import ActorError, AlreadyPendingError, NothingPendingError
from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Description, Frame, Kind
from envactors.mailbox.pickling import copy_value, safe_repr
from envactors.mailbox.specs import OBJECT, split_batch
from envactors.vector.base import Engine, Futures, Options, Seeds
from envactors.vector.episodes import CLEARED_BY_STEPS, EPISODE_LOST, Episodes
from envactors.vector.fates import EnvFate, Progress, RequestFacts, RequestLoss, decide
from envactors.vector.inline_results import InlineLastResults
from envactors.vector.options import VectorSettings
from envactors.vector.results import Batch, Delivered, EnvSnapshot, EnvStep, batch_of, failure_info
from envactors.vector.selection import Selection
from envactors.vector.timing import StepTimes, timed
from envactors.worker.context import ActorContext
from envactors.worker.host import Fields

# The seed and the options of a reset by autoreset.
_NO_ARGS = (None, None)


class _InlineRequests(InlineRequest):
    """Steps or resets of some envs, which run one after another.

    Args:
        engine: The engine.
        ids: The envs, at least one.
        reset_args: The seed and the options of each reset that the user requests, by env; empty for steps.

    Attributes:
        ids, reset_args: As above.
        reset_env: The env whose own reset, rather than one within a step, has begun last; -1 for none.
        losses: The failures of requests that have no outcome yet, by env.
    """

    def __init__(self, engine: InlineEngine, ids: list[int], reset_args: dict[int, tuple[int | None, Any]]) -> None:
        super().__init__(engine._stack, ids[0])
        self._engine = engine
        self.ids, self.reset_args = ids, reset_args
        self.reset_env = -1
        self.losses: dict[int, RequestLoss] = {}

    def get_context(self) -> ActorContext | None:
        actor = self._engine._actor_by_env[self.index]
        return actor.hosted_envs[self.index - actor.indices.start].context if actor.hosted_envs else None

    def describe(self) -> tuple[InlineActor, Activity]:
        engine, index = self._engine, self.index
        is_reset = index == self.reset_env or engine._is_within_reset(index)
        return engine._actor_by_env[index], Activity("reset" if is_reset else "step", index)


class InlineEngine(Engine):
    """Steps and resets envs in the calling thread.

    Args:
        settings: The options of the vector.
        actors: Handles of its in-process actors.
        described: The specs of one env.
    """

    _actor_by_env: list[InlineActor]

    def __init__(self, settings: VectorSettings, actors: Sequence[ActorHandle], described: Description) -> None:
        self.actors: list[InlineActor] = [cast("InlineActor", handle._actor) for handle in actors]
        actor_by_env = [actor for actor in self.actors for _ in actor.indices]
        count = len(actor_by_env)
        super().__init__(described, Episodes(count, settings), actor_by_env)
        self.envs_per_process: list[int] = [count]
        self._last = InlineLastResults(described, count, keeps_infos=settings.on_failure != "raise")
        # The outcomes to deliver, by env: the infos of last results, in the order of their completion, and the errors.
        self._undelivered_infos: dict[int, Any] = {}
        self._undelivered_errors: dict[int, BaseException] = {}
        # The running batches, the outermost one first. A batch that was interrupted stays until the next one.
        self._running_batches: list[_InlineRequests] = []
        # The envs of requests that an interrupt has ended. They count as busy until `make_idle`, which `reset` calls.
        self._interrupted_envs: set[int] = set()
        self._lock, self._stack = self.actors[0].config.lock, self.actors[0].request_stack
        # The `HostedEnv.step` and `HostedEnv.reset` of each env, and the memory in which it records its current method:
        # the counters of its actor's control page. An env that is missing has stand-ins.
        self._steps: list[Callable[..., Fields]] = [self._run_missing] * count
        self._resets: list[Callable[..., Fields]] = [self._run_missing] * count
        self._counters: list[Any] = [None] * count
        # How many requests each env has run that `Episodes.steps` does not count: resets, and all that have failed.
        self._requests_beside_steps = [0] * count
        self._is_timing = False
        self._pages: dict[InlineActor, ControlPage | None] = {}
        self._times = {actor: StepTimes(len(actor.indices)) for actor in self.actors}
        for actor in self.actors:
            self._refresh_envs(actor)
            actor.join_vector(self, self._stack)

    def _refresh_envs(self, actor: InlineActor) -> None:
        """Take the methods of an actor's current envs, to step and reset them."""
        page = self._pages[actor] = actor.page
        for position, index in enumerate(actor.indices):
            step: Callable[..., Fields] = functools.partial(self._run_missing, "step", index)
            reset: Callable[..., Fields] = functools.partial(self._run_missing, "reset", index)
            if page is not None:
                env = actor.hosted_envs[position]
                step, reset = env.step, env.reset
                if self._is_timing:
                    step, reset = timed(page, position, METHOD_STEP, step), timed(page, position, METHOD_RESET, reset)
            self._steps[index], self._resets[index] = step, reset
            self._counters[index] = {METHOD: METHOD_STEP} if page is None else page.counters

    def _run_missing(self, method: str, index: int, *args: Any) -> Fields:
        """Step or reset an env that its actor does not have: have it made first.

        Raises:
            ActorError: The actor is closed, or the factory has raised. Otherwise an interrupt has ended the start.
        """
        self._actor_by_env[index].make_missing(Activity(method, index))
        fields: Fields = (self._resets if method == "reset" else self._steps)[index](*args)
        return fields

    # For its actors --------------------------------------------------------------------------------------

    def on_change(self, actor: InlineActor) -> None:
        """Replace the envs of an actor by its current ones; the episodes of the previous ones are lost."""
        if self._is_timing:
            self._times[actor].add(self._pages[actor])
        self._refresh_envs(actor)
        for index in actor.indices:
            self.episodes.on_process_lost(index)

    def count_requests(self, actor: InlineActor) -> int:
        """Return how many steps and resets the envs of an actor have run."""
        return sum(self.episodes.steps(index) + self._requests_beside_steps[index] for index in actor.indices)

    # Statistics ------------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        self._is_timing = True
        for actor in self.actors:
            self._refresh_envs(actor)

    def histograms(self) -> Histograms:
        return np.concatenate([times.total(self._pages[actor]) for actor, times in self._times.items()])

    # Requests --------------------------------------------------------------------------------------------

    def busy(self) -> list[int]:
        with self._lock:
            return [*self.receivable(), *self._interrupted_envs.union(self._running_ids())]

    def receivable(self) -> list[int]:
        # The results of running requests, which another thread may have begun, are not there for `receive`: they go to
        # the futures of these requests, or to the call that runs them.
        with self._lock:
            ready, running = [*self._undelivered_infos, *self._undelivered_errors], self._running_ids()
            return [index for index in ready if index not in running] if running else ready

    # Snapshots -------------------------------------------------------------------------------------------

    def required_incarnation(self, index: int) -> None:
        if self.episodes.is_lost(index):
            raise self._lost_episode_error(Activity("snapshot", index))

    def last_obs_is_first(self, index: int) -> bool:
        return self._last.are_first[index]

    def restorer(self, index: int, snapshot: EnvSnapshot) -> Callable[[Frame], object]:
        return functools.partial(self._on_restored, index, snapshot, self._conforming_last(snapshot, index))

    def _on_restored(self, index: int, snapshot: EnvSnapshot, last: EnvStep | None, reply: Frame) -> None:
        if reply.kind == Kind.FAILED:
            self.episodes.end_without_result(index)
            return
        if last is not None:
            fields = last.obs, last.reward, last.terminated, last.truncated, last.info
            self._last.take(index, fields, snapshot.is_start)
            self._last.set_incarnation(index, reply.incarnation)
        self.episodes.restore(index, snapshot)

    def read_last(self, index: int) -> EnvStep | None:
        return self._last.read(index, self._last.info(index)) if self.episodes.has_result(index) else None

    # For rollouts ----------------------------------------------------------------------------------------

    def last_observations(self, envs: range) -> Any:
        """Return the last observations of envs that have one, as a batch."""
        return self._last.read_observations(envs, self.observation_spec or OBJECT)

    # Running ---------------------------------------------------------------------------------------------

    def start_steps(
        self, envs: Selection, actions: Any, *, streams: bool, futures: Futures = (), check_actions: bool = True
    ) -> None:
        del streams
        if self.episodes.flags != self.episodes.no_flags:  # envs of closed actors have `NEW_PROCESS`
            self.check_open(envs, "step")
        self.check_idle(envs)
        self.episodes.check_steppable(envs.ids)
        split = split_batch(self.action_spec if check_actions else None, actions, len(envs.ids), "actions")
        # Envs may modify their actions, so they get copies; the entries of an array of one dimension are numbers.
        if type(split) is np.ndarray and split.ndim > 1:
            split = split.copy()
        elif type(split) is list:
            split = self._convert_each(copy_value, envs, split, "step")
        if not envs.ids:
            return
        running = _InlineRequests(self, envs.ids, {})
        with self._lock, running:
            self._begin(running)
            self._run_steps(running, split)
            self._complete(running, futures)

    def _run_steps(self, running: _InlineRequests, actions: Iterable[Any]) -> None:
        """Run a step of each env, or the reset that takes its place; keep the results and failures."""
        # Local variables make the loop faster.
        episodes, infos, steps, take = self.episodes, self._undelivered_infos, self._steps, self._last.take
        resets_within_step, record_bare_step = episodes.autoreset.resets_within_step, episodes.record_bare_step
        awaits_autoreset, seeds, flags = episodes.awaits_autoreset, episodes.next_seeds, episodes.flags
        for index, action in zip(running.ids, actions, strict=True):
            if resets_within_step:
                self._counters[index][METHOD] = METHOD_STEP  # until a reset within the step changes it
            running.index = index
            if flags[index] & EPISODE_LOST and episodes.step_reports_lost_episode(index):
                lost = self._lost_episode_error(Activity("step", index))
                self._lose(running, Progress.NOT_BEGUN, lost, "step", episode_is_over=False)
                self._recover(running, running.losses.pop(index))  # now, before another failure replaces the envs again
                continue
            if awaits_autoreset[index]:
                self._run_reset(running, index)
                continue
            ends = False
            try:
                fields = steps[index](action, resets_within_step, seeds[index])
                _, _, terminated, truncated, _ = fields
                ends = bool(terminated or truncated)
                infos[index] = take(index, fields, ends and resets_within_step)
            except Exception as error:
                is_within_reset = self._is_within_reset(index)
                method = "reset" if is_within_reset else "step"
                self._lose(running, Progress.ENDED, error, method, episode_is_over=ends or is_within_reset)
                continue
            # Without checks of resets, even a step can begin an episode, or be the first result after a restore.
            if ends or flags[index] & CLEARED_BY_STEPS:
                self._last.set_incarnation(index, self._actor_by_env[index].process.incarnation)
                episodes.record(index, ends=ends, is_reset=False)
            else:
                record_bare_step(index)

    def _convert_options(self, envs: Selection, options: Options) -> list[Any]:
        return self._convert_each(copy_value, envs, options, "reset")

    def _start_resets(self, envs: Selection, seeds: Seeds, options: list[Any], futures: Futures) -> None:
        self.check_open(envs, "reset")
        self.check_idle(envs)
        reset_args = dict(zip(envs.ids, zip(seeds, options, strict=True), strict=True))
        if not reset_args:
            return
        running = _InlineRequests(self, envs.ids, reset_args)
        with self._lock, running:
            self._begin(running)
            for index in envs.ids:
                self._run_reset(running, index)
            self._complete(running, futures)

    def check_open(self, envs: Selection, method: str) -> None:
        for index in envs.ids:
            if (actor := self._actor_by_env[index]).closed.is_set:
                raise actor.unusable_error(Activity(method, index))

    def check_idle(self, envs: Selection) -> None:
        self._check_caller(envs.ids)
        self._check_delivered(envs.ids)

    def _check_delivered(self, ids: list[int]) -> None:
        """Raise `AlreadyPendingError` if an env has a result pending, or an interrupt has ended its request."""
        infos, errors, without = self._undelivered_infos, self._undelivered_errors, self._interrupted_envs
        if (infos or errors or without) and (busy := [i for i in ids if i in infos or i in errors or i in without]):
            raise AlreadyPendingError(f"the envs {busy} have results pending: call recv, or reset after an interrupt")

    def _check_caller(self, ids: list[int]) -> None:
        """Check a request that the code of an env makes while this vector steps or resets that env.

        If no such code runs in this thread, settle the requests that an interrupt has ended.

        Raises:
            RuntimeError: The request is for an env of the same actor.
            AlreadyPendingError: The request is for an env that is being stepped or reset, too.
        """
        if not self._lock.is_held_here():
            if self._running_batches:
                with self._lock:  # another thread may still run them
                    self._settle_interrupted()
            return
        for index in ids:
            self._actor_by_env[index].check_not_within()
        if busy := sorted(self._running_ids().intersection(ids)):
            raise AlreadyPendingError(f"the envs {busy} belong to the request that runs this code of an env")

    def _running_ids(self) -> set[int]:
        """Return the envs of `_running_batches`. The caller holds the lock, so no other thread runs any of them.

        Either the code of one of these envs makes the call, or an interrupt has ended the requests.
        """
        return {index for running in self._running_batches for index in running.ids}

    def _settle_interrupted(self) -> None:
        """Drop the results of requests that an interrupt has ended; their envs are busy until `make_idle`.

        If the interrupt came in a reset within a step, the episode has ended, and the next step resets the env.
        """
        for interrupted in self._running_batches:
            self._drop(interrupted.ids)
            self._interrupted_envs.update(interrupted.ids)
            for index in interrupted.ids:
                self.episodes.forget_failed_resets(index)  # the env may have been in a reset that answers a failure
            if self._is_within_reset(interrupted.index):
                self.episodes.end_without_result(interrupted.index, awaits_autoreset=True)
        self._running_batches.clear()

    def _begin(self, running: _InlineRequests) -> None:
        """Begin requests under the lock. Check again: another thread may have run requests of these envs meanwhile."""
        if self._running_batches and not running.is_nested:
            self._settle_interrupted()
        self._check_delivered(running.ids)
        self._counters[running.index][METHOD] = METHOD_STEP  # its last step may have left the method of its reset
        self._running_batches.append(running)

    def _is_within_reset(self, index: int) -> bool:
        """Return whether the step that an env runs, or has raised in, has come as far as its reset by autoreset."""
        return self.episodes.autoreset.resets_within_step and bool(self._counters[index][METHOD] == METHOD_RESET)

    def _run_reset(self, running: _InlineRequests, index: int, *, keeps_seed: bool = True) -> bool:
        """Run the reset of an env; keep its result or failure, and return whether it has succeeded.

        Args:
            running: The requests, among them that of the env.
            index: The env.
            keeps_seed: Whether it uses the user's seed, if there is one.
        """
        running.index = running.reset_env = index
        seed, options = running.reset_args.get(index, _NO_ARGS)
        episodes, incarnation = self.episodes, self._actor_by_env[index].process.incarnation
        if seed is not None and keeps_seed:
            episodes.set_root_seed(index, seed)
        else:
            seed = episodes.seed_of_reset(index, incarnation)
        try:
            fields = self._resets[index](seed, copy_value(options))  # a later attempt needs the options
            self._undelivered_infos[index] = self._last.take(index, fields, is_first=True)
        except Exception as error:
            self._lose(running, Progress.ENDED, error, "reset", episode_is_over=True)
            return False
        self._last.set_incarnation(index, incarnation)
        self._requests_beside_steps[index] += 1
        episodes.record(index, ends=False, is_reset=True)
        return True

    def _lose(
        self, running: _InlineRequests, progress: Progress, error: BaseException, method: str, *, episode_is_over: bool
    ) -> None:
        """Keep the loss of the current env's request until the others have run; see `RequestLoss`."""
        index = running.index
        self._requests_beside_steps[index] += progress is not Progress.NOT_BEGUN
        outcome, incarnation = ReadyOutcome(None, error), self._actor_by_env[index].process.incarnation
        loss = RequestLoss(progress, outcome, incarnation, Activity(method, index), may_continue=True)
        running.losses[index] = loss._replace(episode_is_over=episode_is_over)

    def _lost_episode_error(self, activity: Activity) -> ActorError:
        """Return the error of a request whose episode was lost when the envs of its actor were replaced."""
        actor = self._actor_by_env[activity.index]
        if actor.last_exit_error is None:  # its envs have not been replaced: the actor is closed
            return actor.unusable_error(activity)
        return actor.errors.unblamed(activity, actor.last_exit_error)

    def _complete(self, running: _InlineRequests, futures: Futures) -> None:
        """Handle the failures, once all envs have run, and resolve the futures.

        A failure may replace all envs of an actor, which ends the episodes of those that did not fail, too.
        """
        while running.losses:  # again after resets that were to answer failures, and have failed themselves
            # One loss replaces the envs of its actor for all that failed in the same incarnation, as with workers.
            for loss in [running.losses.pop(index) for index in [*running.losses]]:
                self._recover(running, loss)
        for index, future in zip(running.ids, futures, strict=False):
            error = self._undelivered_errors.pop(index, None)
            step = self._last.read(index, self._undelivered_infos.pop(index)) if error is None else None
            future.set_outcome(ReadyOutcome(step, error))
        self._running_batches.remove(running)

    def _recover(self, running: _InlineRequests, loss: RequestLoss) -> None:
        """End an attempt at a step or reset, as `EnvRecovery.apply_fate` does with workers; keep the outcome.

        1. Complete the loss, and collect the facts.
        2. Decide, and apply the decision to the episode and the seeds.
        3. Replace the envs of the actor, unless another failure has done so. The actor is in its next incarnation then,
           in which all that follows takes place.
        4. Keep the outcome: the error, or the last result, truncated, or a reset. A reset overwrites the last result,
           so that is read before. If the reset fails, its failure is the new loss of the env.
        """
        running.index = index = loss.activity.index
        actor, user_called_reset = self._actor_by_env[index], index in running.reset_args
        error = loss.error.read()[1]
        assert error is not None, "the request has failed"
        policy = actor.config.restart
        # In-process, the restart policy limits only how often a reset is repeated.
        most = max(1, min(policy.max_restarts, MOST_WITHOUT_BACKOFF))
        # Nothing is replayed here, and the only requests that have not begun are steps of a lost episode.
        facts = RequestFacts(
            user_called_reset=user_called_reset,
            has_result=self.episodes.has_result(index),
            ran_reset=loss.activity.method == "reset",
            failed_resets=self.episodes.failed_resets[index],
            most_failures=most,
            reports_lost_episode=True,
        )
        loss = loss._replace(may_continue=actor.is_usable)
        decision = decide(loss, facts, self.episodes.on_failure, self.episodes.autoreset)
        self.episodes.apply(index, decision)
        if decision.replaces_process:  # the actor ignores it if another failure has done so
            text = f"{loss.activity.method} raised {safe_repr(error)}"
            make_error = functools.partial(actor.errors.env_raised, loss.activity, loss.incarnation, actor.pid)
            actor.replace_after_raise(loss.incarnation, functools.partial(make_error, error, text))
        if decision.fate in (EnvFate.REPORT, EnvFate.FAIL):
            self._undelivered_errors[index] = error
        elif decision.fate is EnvFate.TRUNCATE:
            self._last.truncate(index, actor.process.incarnation, is_first=False)
            self._undelivered_infos[index] = failure_info({}, loss.error)
        else:
            assert decision.fate is EnvFate.RESET, "nothing is replayed in-process"
            last = None if user_called_reset else self.read_last(index)
            if self._run_reset(running, index, keeps_seed=not decision.changes_seed):
                before = last and (last.obs, last.info)
                self._undelivered_infos[index] = failure_info(self._undelivered_infos[index], loss.error, before)
                if not user_called_reset:
                    self._last.truncate(index, actor.process.incarnation, is_first=True)

    # Delivering ------------------------------------------------------------------------------------------

    def wait_for_results(
        self, envs: Selection, timeout: float | None, deadline: float | None, caller: str
    ) -> Delivered:
        del timeout, deadline
        with self._lock:  # so that no other thread takes the same results, or steps the envs while they are copied
            pending, errors = self._undelivered_infos, self._undelivered_errors
            failures = {index: errors[index] for index in envs.ids if index in errors} if errors else {}
            ids = [index for index in envs.ids if index not in failures] if failures else envs.ids
            try:
                infos = [pending[index] for index in ids]
            except KeyError:
                text = f"{caller} has nothing to wait for, or the results were taken meanwhile"
                raise NothingPendingError(text) from None
            # The results are dropped once they are copied: an interrupt leaves them to the next attempt.
            if not failures and not self.batcher.infers_spec:
                results = self._last.read_results(envs, infos)
                pending.clear() if envs.is_all else self._drop(envs.ids)
                return results
            steps = list(map(self._last.read, ids, infos))
            self._drop(envs.ids)
            return self._batch(envs, steps, failures, caller)[1:]

    def _drop(self, ids: list[int]) -> None:
        """Forget the results and errors of envs."""
        for outcomes in filter(None, (self._undelivered_infos, self._undelivered_errors)):
            for index in ids:
                outcomes.pop(index, None)

    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        del min_envs
        ready = self.receivable()
        failed = [index for index in ready if index in self._undelivered_errors]
        succeeded = [index for index in ready if index not in self._undelivered_errors]
        envs = self.select(succeeded[:max_envs] + failed)
        return batch_of(envs.ids, self.wait_for_results(envs, None, deadline, "recv"))

    def make_idle(self, envs: Selection, timeout: float | None, deadline: float | None) -> None:
        del timeout, deadline
        self._check_caller(envs.ids)
        self._drop(envs.ids)
        self._interrupted_envs.difference_update(envs.ids)
