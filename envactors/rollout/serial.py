"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture
from envactors.actor.inline import InlineActor
from envactors.errors import AlreadyPendingError, VectorInputError, VectorStepError
from envactors.mailbox.pickling import dumps_by_value
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import Spec, flatten, leaves, split_batch, stack, unflatten
from envactors.rollout.context import PolicyContext, generator_of
from envactors.rollout.results import Rollout
from envactors.rollout.rollouts import check_loads, evaluation_seed
from envactors.rollout.runner import check_extras, spec_of_actions, specs_of_extras, split_returned
from envactors.vector.episodes import NEEDS_RESET
from envactors.vector.failures import step_error
from envactors.vector.results import Batch, failure_in
from envactors.vector.serial import SerialEngine


class SerialRollouts:
    """Runs rollouts in the calling thread; has the interface of `envactors.rollout.rollouts.Rollouts`.

    Args:
        engine: Steps the envs.
    """

    def __init__(self, engine: SerialEngine) -> None:
        self._engine = engine
        self._seed = self._next = self._version = 0
        # The policy of each actor.
        self._policies: list[Any] = []
        # The actor of each policy, with the range of its envs.
        self._actors: list[tuple[InlineActor, range]] = engine.ranges()
        self.num_envs: int = len(engine.all.ids)
        self.reward_shape: tuple[int, ...] = getattr(engine.reward_spec, "shape", PLAIN_REWARD.shape)

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Make the policy of each actor; see `RolloutMethods.set_policy`."""
        self.check_idle()
        for actor, envs in self._actors:
            if not actor.is_usable:
                raise actor.errors.closed(Step("set_policy", envs.start), actor.incarnation.index)
        if self._engine.observation_spec is None:
            raise VectorInputError("rollouts need envs with an observation space: give the envs one")
        pickled = dumps_by_value(make_policy)
        self._policies = [pickle.loads(pickled)() for _ in self._actors]
        self._seed, self._next, self._version = seed, 0, 0

    @property
    def has_policy(self) -> bool:
        """Whether `set_policy` has succeeded."""
        return bool(self._policies)

    def give(self, parameters: Any) -> None:
        """Have the policies load parameters; see `Rollouts.give`."""
        if parameters is None:
            return
        check_loads(all(hasattr(policy, "load") for policy in self._policies))
        buffers: list[pickle.PickleBuffer] = []
        pickled = cloudpickle.dumps(parameters, 5, buffer_callback=buffers.append)
        contents = [bytes(buffer.raw()) for buffer in buffers]  # of which arrays are read-only views
        for policy in self._policies:
            policy.load(pickle.loads(pickled, buffers=contents))
        self._version += 1

    def seed_of_episode(self, number: int) -> int:
        """Return the seed of an episode of `evaluate`."""
        return evaluation_seed(self._seed, number)

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        self._engine.end_episodes()

    def check_idle(self) -> None:
        """Raise `AlreadyPendingError` if a result is pending."""
        if busy := self._engine.busy():
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them before a rollout")

    def start(
        self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None
    ) -> list[ActorFuture[Rollout]]:
        """Run a rollout; see `Rollouts.start`."""
        del copy
        self.check_idle()
        self._engine.check_steppable(self._engine.all)
        self.give(parameters)
        record = _Record(self._engine, steps, self._version)
        policy_errors: dict[range, BaseException] = {}
        for (_, envs), policy in zip(self._actors, self._policies, strict=True):
            try:
                self._run(record, policy, envs, steps)
            except Exception as error:  # raised by the policy
                policy_errors[envs] = error
        self._next += 1
        futures: list[ActorFuture[Rollout]] = []
        for envs in [envs for _, envs in self._actors] if each else [range(self.num_envs)]:
            future: ActorFuture[Rollout] = ActorFuture(self._actors[0][0], None)
            future.set_running()
            raised = [error for mine, error in policy_errors.items() if mine.start in envs]
            failures = {index: failure for index, failure in record.errors.items() if index in envs}
            if raised:
                future.set_error(raised[0])
            else:
                rollout = record.read(envs, 1 if each else len(self._actors))
                if failures:
                    future.set_error(step_error(failures, rollout, len(envs), "rollout"))
                else:
                    future.set_result(rollout)
            futures.append(future)
        return futures

    def _run(self, record: _Record, policy: Any, envs: range, steps: int) -> None:
        """Run the envs of one actor.

        Raises:
            Exception: Raised by the policy.
        """
        engine, ids = self._engine, np.arange(envs.start, envs.stop)
        for step in range(steps):
            obs, starts = record.write_observations(step, envs)
            rng = generator_of(self._seed, step, self._next, envs.start)
            returned = policy(obs, PolicyContext(ids, starts, step, rng))
            actions = record.write_actions(step, envs, returned)
            due = [index for index in envs if not engine.episodes.flags[index] & NEEDS_RESET]
            record.resets[step, due] = [bool(engine.episodes.resets_next_of[index]) for index in due]
            selection = engine.select(due)
            engine.start_steps(selection, [actions[index - envs.start] for index in due], rings_each=True)
            try:
                batch = engine.finish(selection, None, None, "rollout")
            except VectorStepError as error:
                batch = error.batch
                record.fail(step, error.failures)
            record.write_results(step, batch)
            if record.errors.keys() & envs:
                return
        record.write_observations(steps, envs)


class _Record:
    """The arrays of a rollout of in-process envs.

    Args:
        engine: Steps the envs.
        steps: Number of steps.
        version: How often the user has given parameters.

    Attributes:
        errors: Errors to raise, by env.
        resets: Whether a step resets an env; bool, shape (t, n).
    """

    def __init__(self, engine: SerialEngine, steps: int, version: int) -> None:
        count = len(engine.all.ids)
        assert engine.observation_spec is not None, "the envs have been reset"
        self.errors: dict[int, BaseException] = {}
        self.resets: npt.NDArray[np.bool_] = np.zeros((steps, count), np.bool_)
        self._engine = engine
        self._version = version
        self._spec: Spec = engine.observation_spec
        self._action: Spec | None = engine.action_spec
        self._observations = _columns(self._spec, steps + 1, count)
        self._actions = [] if self._action is None else _columns(self._action, steps, count)
        self._rewards: npt.NDArray[np.float64] = np.zeros((steps, count, *getattr(engine.reward_spec, "shape", ())))
        self._flags: npt.NDArray[np.bool_] = np.zeros((4, steps + 1, count), np.bool_)
        self._starts, self._terminated, self._truncated, self._valid = self._flags
        self._extras: dict[str, npt.NDArray[Any]] = {}
        self._extra_specs: Any = ()
        self._infos: list[tuple[int, int, Any]] = []
        self._failures: list[tuple[int, int, BaseException]] = []

    def write_observations(self, step: int, envs: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        obs = stack(self._spec, [self._engine.last_obs(index) for index in envs])
        mine = slice(envs.start, envs.stop)
        for column, leaf in zip(self._observations, flatten(self._spec, obs), strict=True):
            if isinstance(leaf, np.ndarray):
                column[step, mine] = leaf
                leaf.flags.writeable = False
            else:
                for index, value in zip(envs, leaf, strict=True):
                    column[step, index] = value
        starts = np.array([self._engine.episodes.starts[index] for index in envs], np.bool_)
        self._starts[step, mine] = starts
        return obs, starts

    def write_actions(self, step: int, envs: range, returned: Any) -> Any:
        """Write the policy's actions and extras; return one action per env."""
        count, mine = len(envs), slice(envs.start, envs.stop)
        steps, total = len(self._starts) - 1, len(self._engine.all.ids)
        actions, extras = split_returned(self._action, returned, count)
        if self._action is None:
            self._action = spec_of_actions(actions, count)
            self._actions = _columns(self._action, steps, total)
        if not self._extras and extras and step == 0:
            self._extra_specs = specs_of_extras(extras)
            for name, spec in self._extra_specs:
                self._extras[name] = np.zeros((steps, total, *spec.shape), spec.dtype)
        check_extras(self._extra_specs, extras)
        for name, values in extras.items():
            self._extras[name][step, mine] = values
        each = split_batch(self._action, actions, count, "the policy's actions")
        for index, value in zip(envs, each, strict=True):
            for column, leaf in zip(self._actions, flatten(self._action, value), strict=True):
                column[step, index] = leaf
        return each

    def fail(self, step: int, failures: dict[int, BaseException]) -> None:
        """Note the errors of envs in a step."""
        self.errors.update(failures)
        self._failures += [(step, index, error) for index, error in failures.items()]

    def write_results(self, step: int, batch: Batch) -> None:
        """Write the results of a step."""
        ids = batch.env_ids
        self._rewards[step, ids], self._terminated[step, ids] = batch.rewards, batch.terminated
        self._truncated[step, ids], self._valid[step, ids] = batch.truncated, ~self.resets[step, ids]
        for index, info in zip(ids.tolist(), batch.infos, strict=True):
            if not isinstance(info, dict) or info:
                self._infos.append((step, index, info))
            if (failure := failure_in(info)) is not None:
                self._failures.append((step, index, failure))
                self._valid[step, index] = False

    def read(self, envs: range, actors: int) -> Rollout:
        """Return the result of some envs."""
        mine, steps = slice(envs.start, envs.stop), len(self._starts) - 1
        last_obs = [column[steps, mine].copy() for column in self._observations]
        return Rollout(
            np.arange(envs.start, envs.stop),
            unflatten(self._spec, (column[:steps, mine] for column in self._observations)),
            None if self._action is None else unflatten(self._action, (column[:, mine] for column in self._actions)),
            self._rewards[:, mine],
            self._terminated[:steps, mine],
            self._truncated[:steps, mine],
            self._starts[:steps, mine],
            {name: values[:, mine] for name, values in self._extras.items()},
            unflatten(self._spec, iter(last_obs)),
            sorted((info for info in self._infos if info[1] in envs), key=lambda info: info[:2]),
            sorted((one for one in self._failures if one[1] in envs), key=lambda one: one[:2]),
            np.full(actors, self._version),
            self._valid[:steps, mine],
        )


def _columns(spec: Spec, steps: int, count: int) -> list[npt.NDArray[Any]]:
    """Return an array of shape (steps, count, ...) for each leaf of a spec, of objects if it is not batchable."""
    return [np.zeros((steps, count, *leaf.shape), leaf.dtype) for leaf in leaves(spec)]
