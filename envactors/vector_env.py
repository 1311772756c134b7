"""`VectorEnv`, which steps many envs as one, and `make_vec`. Its parts are in `vector` and `rollout`."""

from __future__ import annotations

import concurrent.futures
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from envactors import backends, runtime
from envactors.actor.future import ActorFuture, BoundToProcess, results_of
from envactors.actor.handle import ActorHandle, ActorView, check_closable, close_all
from envactors.errors import ActorClosedError, NothingPendingError, VectorEnvError, VectorInputError, VectorTimeoutError
from envactors.mailbox.factory import Factory, as_callable, as_factories, make_gymnasium, names_callable
from envactors.mailbox.messages import Kind, Restore, Save
from envactors.mailbox.specs import Spec
from envactors.options import as_timeout, check_kind, deadline_after, is_int
from envactors.rollout.base import RolloutEngine
from envactors.rollout.engine import WorkerRolloutEngine
from envactors.rollout.evaluation import Evaluator
from envactors.rollout.inline import InlineRolloutEngine
from envactors.rollout.results import Evaluation, Rollout
from envactors.vector import inputs
from envactors.vector.base import Engine
from envactors.vector.build import build_row_engine, describe_envs, launch_actors
from envactors.vector.engine import RowEngine
from envactors.vector.inline import InlineEngine
from envactors.vector.options import VectorOptions, VectorSettings, check_names
from envactors.vector.results import Batch, EnvSnapshot, EnvStep, StepResults
from envactors.vector.selection import Selection
from envactors.vector_stats import VectorStatistics, VectorStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EnvFuture(ActorFuture[EnvStep]):
    """Future of one env's step or reset, which resolves to an `EnvStep`.

    Attributes:
        env_id: Id of the env.
    """

    env_id: int


class VectorEnv(BoundToProcess):
    """Steps many envs as one, in actors.

    The constructor waits until every env is made. Let one thread at a time use a vector env. Threads that wait for
    the same results do not hang: one of them gets the results, and the others raise `NothingPendingError` if none are
    left.

    Args:
        factories: One factory per env, as for `spawn`, which runs in a worker. The envs have Gymnasium's
            ``reset(seed=, options=) -> (obs, info)`` and
            ``step(action) -> (obs, reward, terminated, truncated, info)``.
        **options: See `VectorOptions`.

    Attributes:
        num_envs: Number of envs.
        actors: Handle of each process.
        action_spec: Spec of one env's action; None if the envs have no action space, so that actions are not checked.
        reward_spec: Spec of one env's reward: float64, a scalar unless the env has a ``reward_space``.
        metadata, render_mode: Attributes of the first env.

    Raises:
        TypeError: ``factories`` is a single factory, or an option does not exist.
        VectorInputError: ``factories`` is empty, or an option is invalid.
        ActorStartError: An env could not be made.
        SpaceMismatchError: The specs of the envs differ, so that their values cannot be batched.
        VectorEnvError: There is not enough shared memory.
    """

    def __init__(self, factories: Iterable[Factory], **options: Unpack[VectorOptions]) -> None:
        check_names("VectorEnv", options)
        settings, factories = VectorSettings(**options), as_factories(factories)
        backend = backends.resolve(settings.backend)
        if settings.on_failure == "replay" and not backend.traits.can_kill:
            settings = settings._replace(on_failure="renew")  # no process can be lost
        factories_by_actor, variables = inputs.check_settings(settings, factories, backend)
        self._is_closed = False
        self._has_snapshots = settings.snapshot is not None
        self._rollout_engine: RolloutEngine | None = None  # None without a policy
        self._forks = runtime.forks
        self._memory = None if backend.traits.is_inline else backend.make_memory()
        launched = launch_actors(settings, backend, factories_by_actor, variables, self._memory)
        actors, self._handles, self._standbys = launched
        self.actors: list[ActorHandle[Any]] = actors
        self.num_envs: int = len(self._handles)
        try:
            self._check_made()
            described = describe_envs(self._handles)
            self.metadata: dict[str, Any] = described.metadata
            self.render_mode: str | None = described.render_mode
            self.action_spec: Any = described.action
            self.reward_spec: Any = described.reward
            if self._memory is None:
                self._engine: Engine = InlineEngine(settings, self.actors, described)
            else:
                self._engine = build_row_engine(settings, self.actors, self.num_envs, described, self._memory)
            self._statistics = VectorStatistics(self._engine, self.actors)
        except BaseException:
            self.close(0)
            raise

    def _check_made(self) -> None:
        """Check the envs before their specs are compared. For subclasses, which may call methods of the handles."""

    @property
    def observation_spec(self) -> Spec | None:
        """Spec of one env's observation. Without an observation space, it is None until the first reset."""
        return self._engine.observation_spec

    def stats(self) -> VectorStats:
        """Return statistics. The first call has times measured from then on."""
        return self._statistics.collect()

    # Steps and resets ------------------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        env_ids: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset envs in parallel.

        This first waits for rollouts in flight, and for whatever these envs are running. It drops results that were not
        received; futures of `submit` get theirs.

        Args:
            seed: An int, which gives env ``i`` the seed ``seed + i``, or a sequence with one seed (or None) per env.
                Without a seed, the env chooses, or gets the seed of its next episode with ``seed_episodes``.
            options: Options for each env's ``reset``, or a list or tuple with one value (or None) per env.
            env_ids: Ids of the envs, in this order; None for all.
            timeout: Longest time to wait, in seconds; None for no limit.

        Returns:
            ``(obs, infos)``: observations batched per leaf with the envs along axis 0, and a list of infos.

        Raises:
            VectorTimeoutError: The timeout passed. If that was while envs ran earlier requests, nothing was reset, and
                ``recv`` will return the earlier results; then reset again. Otherwise it will return those of the
                resets, with reward 0. The error says which.
            VectorStepError: Some envs failed.
            VectorInputError: ``env_ids``, ``seed``, or ``options`` is invalid.
        """
        engine, envs = self._engine, self._select(env_ids)
        deadline = deadline_after(timeout, "reset(timeout=...)")
        seeds, each = inputs.seeds_for(seed, envs.ids), inputs.one_each(options, len(envs.ids), "options")
        with self._statistics.waiting("reset"):
            obs, _, _, _, infos, _ = engine.reset(envs, seeds, each, timeout, deadline)
        return obs, infos

    def step(self, actions: Any, env_ids: Iterable[int] | None = None, timeout: float | None = None) -> StepResults:
        """Step envs in parallel and wait for all of them.

        Args:
            actions: An array with the envs along axis 0 per leaf of the action spec, or a list with one action per env.
                Without an action spec, any sequence.
            env_ids: Ids of the envs, in the order of the actions; None for all.
            timeout: Longest time to wait, in seconds; None for no limit. Use ``deadlines`` to kill envs that hang.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)`` in the order of ``env_ids``: observations batched per
            leaf, rewards as float64, flags as bool, and a list of infos.

        Raises:
            VectorTimeoutError: The timeout passed; nothing is lost, and ``recv`` will return the results.
            VectorStepError: Some envs failed; the other results are in ``.batch``.
            AlreadyPendingError: An env has a result pending.
            NothingPendingError: A signal handler or another thread has taken the results meanwhile.
            VectorInputError: ``env_ids`` or ``actions`` is invalid, or an env needs a reset first.
        """
        envs = self._select(env_ids)
        deadline = None if timeout is None else deadline_after(timeout, "step(timeout=...)")
        if self._statistics.is_timing:
            with self._statistics.waiting("step", envs.is_all):
                return self._step(envs, actions, timeout, deadline)
        return self._step(envs, actions, timeout, deadline)

    def _step(self, envs: Selection, actions: Any, timeout: float | None, deadline: float | None) -> StepResults:
        self._engine.start_steps(envs, actions, streams=False)
        return self._engine.wait_for_results(envs, timeout, deadline, "step")[:5]

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Start steps without waiting; `recv` returns the results. Arguments and errors are those of `step`."""
        self._engine.start_steps(self._select(env_ids), actions, streams=True)

    def recv(self, min_envs: int | None = None, max_envs: int | None = None, timeout: float | None = None) -> Batch:
        """Return results of `send`, and of `step` and `reset` that timed out, in the order of their completion.

        Args:
            min_envs: Number of results to wait for; None, or a larger number than there are, waits for all.
            max_envs: Largest number of results to return; None for no limit.
            timeout: Longest time to wait, in seconds; then the results that are ready are returned, and nothing is
                lost.

        Raises:
            NothingPendingError: No results are pending.
            VectorStepError: An env failed. Raised at once, with the results that are ready in ``.batch``.
            VectorInputError: ``min_envs`` or ``max_envs`` is invalid.
        """
        engine = self._engine
        self._check_open()
        deadline = deadline_after(timeout, "recv(timeout=...)")
        least, most = inputs.check_limits(min_envs, max_envs)
        if not engine.receivable():
            raise NothingPendingError("recv has nothing to wait for: send actions first")
        with self._statistics.waiting("recv"):
            return engine.receive(least, most, deadline)

    def submit(self, actions: Any, env_ids: Iterable[int] | None = None) -> list[EnvFuture]:
        """Start steps and return a future for each. Their results never appear in `recv`.

        Arguments and errors are those of `step`. A result that cannot be unpickled fails only its future, whatever
        ``on_failure`` is: that is found when the future is read, and the env may have continued by then.

        Returns:
            Futures that resolve to `EnvStep`, in the order of ``env_ids``, for use with ``as_completed``.
        """
        engine, envs = self._engine, self._select(env_ids)
        futures = [self._make_future(env_id) for env_id in envs.ids]
        engine.start_steps(envs, actions, streams=True, futures=futures)
        return futures

    def _make_future(self, env_id: int) -> EnvFuture:
        handle = self._handles[env_id]
        future = EnvFuture(handle._actor, handle._lifeline)
        future.env_id = env_id
        return future

    # Single envs -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_envs

    def __getitem__(self, env_id: int) -> ActorView:
        """Return the handle of an env.

        If any process has several envs, the vector alone steps and resets them, and `actors` replace the processes.
        """
        return self._handles[operator.index(env_id)]

    def call(self, method: str, /, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of envs in parallel.

        Args:
            method: Name of the method.
            *args: Arguments of the method.
            env_ids: Ids of the envs, in this order; None for all.
            **kwargs: Keyword arguments of the method.

        Returns:
            One value per env.

        Raises:
            Exception: Raised by the first env that failed, once all envs have replied.
        """
        return results_of([self[env_id].call(method, *args, **kwargs) for env_id in self._select(env_ids).ids])

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of envs, one value per env."""
        return results_of([self[env_id].get(name) for env_id in self._select(env_ids).ids])

    def set_attr(self, name: str, values: Any, env_ids: Iterable[int] | None = None) -> None:
        """Set an attribute of envs.

        Args:
            name: Name of the attribute.
            values: A list or tuple with one value per env, or one value for all.
            env_ids: Ids of the envs, in this order; None for all.

        Raises:
            VectorInputError: ``values`` does not have one value per env.
        """
        ids = self._select(env_ids).ids
        each = inputs.one_each(values, len(ids), "values", f"set_attr({name!r}): ")
        results_of([self[env_id].set(name, value) for env_id, value in zip(ids, each, strict=True)])

    def render(self) -> list[Any]:
        """Return the frames that the envs' ``render`` methods return."""
        return self.call("render")

    # Last results and snapshots --------------------------------------------------------------------------

    def snapshot(self, env_ids: Iterable[int] | None = None) -> list[EnvSnapshot]:
        """Save the states of envs, including wrappers and random generators, with the vector's ``snapshot`` policy.

        Args:
            env_ids: Ids of the envs, in this order; None for all.

        Returns:
            One snapshot per env, for `restore`.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending, or a rollout is in flight.
            VectorInputError: An env needs a reset first, or ``env_ids`` is invalid.
            ActorError: The episode of an env was lost with its process.
            Exception: Raised by ``snapshot.get``.
        """
        engine, envs = self._engine, self._select(env_ids)
        self._check_snapshots(envs)
        engine.episodes.check_steppable(envs.ids)
        futures = []
        for env_id, process in [(env_id, engine.required_incarnation(env_id)) for env_id in envs.ids]:
            handle = self._handles[env_id]
            futures.append(handle._submit(Kind.SAVE, Save(handle._position), "snapshot", incarnation=process))
        states = results_of(futures)
        return [engine.snapshot_of(env_id, *state) for env_id, state in zip(envs.ids, states, strict=True)]

    def restore(self, snapshots: Iterable[EnvSnapshot], env_ids: Iterable[int] | None = None) -> None:
        """Restore envs to states that `snapshot` of this vector, or of a similar one, has returned.

        From there, equal actions give the results that followed the snapshot. Steps and episodes continue to count.
        With ``autoreset="disabled"``, an env whose episode was over needs a reset.

        Args:
            snapshots: States to restore.
            env_ids: Id of the env for each state; None for the envs from which the states were taken.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending, or a rollout is in flight.
            VectorInputError: ``env_ids`` is invalid, or does not have one id per snapshot.
            TypeError: A snapshot is something else.
            SpaceMismatchError: The snapshot belongs to an env with other spaces.
            Exception: Raised by ``snapshot.set``; the env needs a reset then.
        """
        for one in (snapshots := list(snapshots)):
            check_kind("a snapshot", one, EnvSnapshot)
        envs = self._select([one.env_id for one in snapshots] if env_ids is None else env_ids)
        if len(envs.ids) != len(snapshots):
            raise VectorInputError(f"{len(envs.ids)} env_ids for {len(snapshots)} snapshots: expected one each")
        self._check_snapshots(envs)
        # All snapshots are checked before the first env is restored.
        restorers = list(map(self._engine.restorer, envs.ids, snapshots))
        futures = []
        for env_id, one, restorer in zip(envs.ids, snapshots, restorers, strict=True):
            handle = self._handles[env_id]
            message = Restore(handle._position, one.checksum, one.state)
            futures.append(handle._submit(Kind.RESTORE, message, "restore", before_outcome=restorer))
        results_of(futures)

    def last_batch(self) -> Batch:
        """Return the last result of each env again, with reward 0 after a reset.

        Raises:
            VectorEnvError: The vector has ``on_failure="raise"``, and keeps no results.
            AlreadyPendingError: An env has a result pending, or a rollout is in flight.
            NothingPendingError: An env has no result yet.
            VectorStepError: Observations of envs without an observation space differ in shape.
        """
        self._select(None)
        if self._engine.episodes.on_failure == "raise":
            raise VectorEnvError("on_failure='raise' keeps no results for last_batch: expected 'renew' or 'replay'")
        batch = self._engine.last_batch()
        if batch is None:
            raise NothingPendingError("last_batch of envs that have not been reset: reset them first")
        return batch

    def _check_snapshots(self, envs: Selection) -> None:
        if not self._has_snapshots:
            raise VectorEnvError("this vector env was made without snapshot: expected VectorEnv(..., snapshot=...)")
        self._engine.check_idle(envs)

    # Rollouts --------------------------------------------------------------------------------------------

    def set_policy(self, make_policy: Callable[[], Any], seed: int = 0) -> None:
        """Make a policy in each worker, for `rollout` to call there.

        Each new process makes the policy again.

        Args:
            make_policy: Called without arguments in each worker; returns the policy. The worker calls it as
                ``policy(obs, context)``: ``obs`` contains read-only observations of the worker's envs, batched as
                `step` returns them, and ``context`` is a `PolicyContext`. The policy returns actions, as `step` takes
                them, or ``(actions, extras)``, where ``extras`` is a dict of arrays with the envs along axis 0. The
                extras of all steps have the same names, shapes, and dtypes; steps without any get zeros. If the policy
                has a method ``load``, the worker calls it with the parameters of a rollout.
            seed: Seed of the random numbers that ``context.rng`` draws.

        Raises:
            TypeError: ``make_policy`` is not callable.
            ValueError: ``seed`` is not an int >= 0 and < 2**128.
            VectorInputError: The envs have no observation space, and were not reset yet, or their rewards are nested.
            AlreadyPendingError: Rollouts are in flight, or results are pending.
            SerializationError: ``make_policy`` cannot be pickled.
            ActorClosedError: The vector or an actor is closed.
            Exception: Raised by ``make_policy``.
        """
        self._check_open()
        if not callable(make_policy):
            raise TypeError(f"make_policy is {make_policy!r}: expected a function without arguments")
        if not is_int(seed, 0) or operator.index(seed) >> 128:
            raise ValueError(f"seed is {seed!r}: expected an int >= 0 and < 2**128")
        engine = self._rollout_engine or self._make_rollout_engine()
        engine.set_policy(make_policy, operator.index(seed))
        self._rollout_engine = engine

    def _make_rollout_engine(self) -> RolloutEngine:
        engine = self._engine
        if isinstance(engine, InlineEngine):
            return InlineRolloutEngine(engine)
        assert isinstance(engine, RowEngine), "there are two"
        assert self._memory is not None, "its rows are in memory"
        return WorkerRolloutEngine(engine, self._memory)

    def rollout(self, steps: int, parameters: Any = None, timeout: float | None = None) -> Rollout:
        """Step every env with the policy of `set_policy` in the workers, and wait for the result.

        Args:
            steps: Number of steps of each env.
            parameters: Parameters that the policy loads first: any nest of arrays, or another object that can be
                pickled. Arrays are copied once and reach the policy as read-only views of shared memory, which are
                valid until it loads the next ones. None keeps the current parameters.
            timeout: Longest time to wait, in seconds; None waits until the rollout has ended.

        Returns:
            The steps of all envs. With ``copy=False`` its arrays are views of the shared memory, valid until the next
            rollout but one begins.

        Raises:
            VectorInputError: No policy is set, ``steps`` is not an int >= 1, or an env needs a reset first.
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            VectorTimeoutError: The timeout passed. The rollout continues, and ``.future`` resolves to its result.
            VectorStepError: Some envs failed; ``.batch`` is a `Rollout` of full shape.
            VectorEnvError: There is too little memory for the steps or the parameters.
            ActorClosedError: The vector or an actor is closed.
            TypeError: ``parameters`` were given to a policy without a method ``load``.
            SerializationError: ``parameters`` cannot be pickled.
            Exception: Raised by the policy.
        """
        as_timeout(timeout, "rollout(timeout=...)")
        future = self.rollout_async(steps, parameters)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                return future.result()  # it has just ended, or the policy has raised this error
            text = f"rollout waited {timeout} s for {steps} steps, which continue: wait for .future"
            raise VectorTimeoutError(text, timeout=timeout, future=future) from None

    def rollout_async(self, steps: int, parameters: Any = None) -> ActorFuture[Rollout]:
        """Start a rollout and return its future. Two may be in flight. Arguments and errors are those of `rollout`."""
        return self._start_rollout(steps, parameters, each=False)[0]

    def rollout_each(self, steps: int, parameters: Any = None) -> list[ActorFuture[Rollout]]:
        """Start a rollout and return one future per actor, which resolves to the `Rollout` of the actor's envs.

        No actor waits for another. Arguments and errors are those of `rollout`.
        """
        return self._start_rollout(steps, parameters, each=True)

    def evaluate(self, episodes: int, parameters: Any = None) -> Evaluation:
        """Play whole episodes with the policy of `set_policy`.

        Which episodes count does not depend on their lengths: of ``n`` envs, env ``k % n`` plays episode ``k``, with a
        seed that is derived from the seed of the policy. All envs are reset first, and need a reset afterwards. An
        episode whose env raises or crashes is repeated.

        Args:
            episodes: Number of episodes.
            parameters: Parameters that the policy loads first, as for `rollout`.

        Raises:
            VectorInputError: No policy is set, or ``episodes`` is not an int >= 1.
            AlreadyPendingError: Rollouts are in flight, or results are pending.
            VectorStepError: An episode failed three times.
            VectorEnvError: There is too little memory.
            ActorClosedError: The vector or an actor is closed.
            TypeError: ``parameters`` were given to a policy without a method ``load``.
            SerializationError: ``parameters`` cannot be pickled.
            Exception: Raised by the policy.
        """
        engine = self._check_policy("evaluate")
        if not is_int(episodes):
            raise VectorInputError(f"episodes is {episodes!r}: expected an int >= 1")
        evaluator = Evaluator(engine, self.reset, operator.index(episodes), self.num_envs)
        engine.check_free()
        try:
            return evaluator.run(parameters)
        finally:
            engine.require_resets()

    def _start_rollout(self, steps: int, parameters: Any, *, each: bool) -> list[ActorFuture[Rollout]]:
        engine = self._check_policy("rollout")
        if not is_int(steps):
            raise VectorInputError(f"steps is {steps!r}: expected an int >= 1")
        return engine.start(operator.index(steps), parameters, each=each)  # a small int of NumPy would overflow

    def _check_policy(self, caller: str) -> RolloutEngine:
        self._check_open()
        if self._rollout_engine is None:
            raise VectorInputError(f"{caller} needs a policy: call set_policy first")
        return self._rollout_engine

    # The end ---------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Close the envs and end their processes in parallel. It may be called again.

        Args:
            timeout: Time in seconds after which the remaining processes are killed; None for the close deadline.
        """
        timeout = as_timeout(timeout, "close(timeout=...)")
        actors = [*self.actors, *self._standbys]
        check_closable(actors)
        self._is_closed = True
        close_all(actors, timeout)
        if all(actor._actor.closed.is_set for actor in actors):
            engine: Engine | None = vars(self).get("_engine")  # None if the constructor has failed
            if engine is not None:
                engine.close()
            if self._memory is not None:
                self._memory.close()  # not earlier: a process that was still starting may have needed it

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<VectorEnv of {self.num_envs} envs{', closed' if self._is_closed else ''}>"

    def _check_open(self) -> None:
        """Raise if the vector is closed, or belongs to another process."""
        if self._is_closed:
            raise ActorClosedError("this vector env is closed: make another")
        if runtime.forks != self._forks:
            self.actors[0]._actor.check_not_forked()

    def _select(self, env_ids: Iterable[int] | None) -> Selection:
        """Check that the vector is open, and return some envs, or all for None."""
        self._check_open()
        if env_ids is None:
            return self._engine.all_envs
        return self._engine.select(inputs.check_env_ids(env_ids, self.num_envs))


def make_vec(env: Factory, num_envs: int, **options: Unpack[VectorOptions]) -> VectorEnv:
    """Make a vector of equal envs.

    Args:
        env: An id of Gymnasium such as ``"CartPole-v1"`` or ``"module:MyEnv-v0"``, where the worker imports the module
            first; or a factory as for `spawn`: a callable, or ``"module:callable"``.
        num_envs: Number of envs.
        **options: See `VectorOptions`.

    Raises:
        TypeError: ``env`` is neither a string nor callable, or an option does not exist.
        VectorInputError: ``num_envs`` is not an int above 0, or an option is invalid.
        ActorStartError: An env could not be created, for example because Gymnasium does not know the id.
    """
    inputs.check_counts(1, num_envs=num_envs)
    if isinstance(env, str) and not names_callable(env):
        make: Factory = functools.partial(make_gymnasium, env)
    else:
        make = as_callable(env, "make_vec")
    return VectorEnv([make] * num_envs, **options)
