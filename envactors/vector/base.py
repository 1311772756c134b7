"""The interface of the two engines, which step and reset the envs of a vector, and what they have in common.

`envactors.vector.engine.RowEngine` has the envs in workers, `envactors.vector.inline.InlineEngine` in-process.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from envactors.actor.actor import Actor
from envactors.actor.future import ActorFuture
from envactors.actor.inline import InlineActor
from envactors.actor.job import Activity
from envactors.mailbox.durations import Histograms
from envactors.mailbox.messages import Description, Frame
from envactors.mailbox.pickling import try_to_pickle
from envactors.mailbox.specs import Spec, conform
from envactors.vector.batching import Batcher
from envactors.vector.episodes import Episodes
from envactors.vector.results import Batch, Delivered, EnvSnapshot, EnvStep, step_error
from envactors.vector.selection import Selection

# The errors of envs, by env.
Failures: TypeAlias = dict[int, BaseException]
# One per env: the user's seeds and options of resets, and the futures of requests.
Seeds: TypeAlias = Sequence[int | None]
Options: TypeAlias = Sequence[dict[str, Any] | None]
Futures: TypeAlias = Sequence[ActorFuture]


class Engine(abc.ABC):
    """Steps and resets the envs of a vector.

    Args:
        described: The specs of one env.
        episodes: The episodes of the envs.
        actors: The actor of each env.

    Attributes:
        episodes: As above.
        all_envs: All envs.
        envs_per_process: For each worker, how many envs run one after another; in-process, one entry: all envs.
        action_spec: Spec of one env's action; None to leave actions unchecked.
        reward_spec: Spec of one env's reward.
        batcher: Batches results.
    """

    envs_per_process: list[int]

    def __init__(self, described: Description, episodes: Episodes, actors: Sequence[Actor | InlineActor]) -> None:
        self.episodes = episodes
        self.all_envs: Selection = self.select([*range(len(actors))])
        self.all_envs.array_index, self.all_envs.is_all = ..., True
        self.action_spec: Spec | None = described.action
        self.reward_spec: Spec = described.reward
        self.batcher: Batcher = Batcher(described)
        self._actor_by_env = actors

    @property
    def observation_spec(self) -> Spec | None:
        """Spec of one env's observation; None until it is known."""
        return self.batcher.observation_spec

    def select(self, ids: list[int]) -> Selection:
        """Return some envs."""
        return Selection(ids=ids, array_index=np.array(ids, np.int64))

    def close(self) -> None:  # noqa: B027 # in-process envs have nothing else to free
        """Free whatever belongs to no actor, once the actors are closed; may be called again."""

    # Statistics ------------------------------------------------------------------------------------------

    def counts(self) -> tuple[list[int], list[int]]:
        """Return how many steps and finished episodes each env has had."""
        return [*map(self.episodes.steps, self.all_envs.ids)], list(self.episodes.finished)

    @abc.abstractmethod
    def begin_timing(self) -> None:
        """Have steps and resets timed from now on; may be called again."""

    @abc.abstractmethod
    def histograms(self) -> Histograms:
        """Return the durations of the steps and resets of all envs, as far as they were timed."""

    # Requests --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def busy(self) -> list[int]:
        """Return the envs with a request whose result was not delivered, running or not."""

    @abc.abstractmethod
    def receivable(self) -> list[int]:
        """Return the envs whose results `receive` can deliver: those of all requests without futures."""

    @abc.abstractmethod
    def check_idle(self, envs: Selection) -> None:
        """Check that no rollout is in flight, and no env has a result pending.

        Raises:
            AlreadyPendingError: Something is.
            RuntimeError: The code of an in-process env makes a request for an env of its own actor.
        """

    @abc.abstractmethod
    def check_open(self, envs: Selection, method: str) -> None:
        """Raise the error of a request for an env of a closed actor."""

    @abc.abstractmethod
    def start_steps(
        self, envs: Selection, actions: Any, *, streams: bool, futures: Futures = (), check_actions: bool = True
    ) -> None:
        """Start a step of some envs.

        Args:
            envs: The envs.
            actions: Actions as `VectorEnv.step` takes them.
            streams: Whether the caller uses each result before the others are complete.
            futures: Futures that get the results; empty if the vector delivers them.
            check_actions: Whether actions are checked against the action spec.

        Raises:
            AlreadyPendingError: A rollout is in flight, or an env has a result pending.
            VectorInputError: An env needs a reset first.
            SpaceMismatchError: The actions do not conform to the action spec.
            SerializationError: An action cannot be pickled or copied.
            ActorClosedError: The actor of an env was closed.
            RuntimeError: See `check_idle`.
        """

    def _convert_each(
        self, convert: Callable[[Any], Any], envs: Selection, values: Iterable[Any], method: str
    ) -> list[Any]:
        """Convert the actions of envs, or the options of their resets, to a form in which they run no code of users.

        Raises:
            SerializationError: One cannot be pickled or copied.
        """
        converted = []
        for index, value in zip(envs.ids, values, strict=True):
            result, error = try_to_pickle(functools.partial(convert, value))
            if error is not None:
                raise self._actor_by_env[index].errors.unpicklable_arguments(Activity(method, index), error) from error
            converted.append(result)
        return converted

    def start_resets(self, envs: Selection, seeds: Seeds, options: Options, futures: Futures = ()) -> None:
        """Start resets; for the errors see `start_steps`."""
        self._start_resets(envs, seeds, self._convert_options(envs, options), futures)

    @abc.abstractmethod
    def _convert_options(self, envs: Selection, options: Options) -> list[Any]:
        """Return the options of resets as `_start_resets` takes them, so that no code of users runs there."""

    @abc.abstractmethod
    def _start_resets(self, envs: Selection, seeds: Seeds, options: list[Any], futures: Futures) -> None:
        """Start resets with converted options."""

    @abc.abstractmethod
    def wait_for_results(
        self, envs: Selection, timeout: float | None, deadline: float | None, caller: str
    ) -> Delivered:
        """Wait for the results of envs and deliver them.

        Args:
            envs: The envs.
            timeout: The user's timeout in seconds, for the error.
            deadline: When it is over (`time.monotonic`); None for no limit.
            caller: Name of the user's method, for errors.

        Raises:
            VectorTimeoutError: The timeout has passed; nothing is lost.
            NothingPendingError: A signal handler or another thread has taken the results.
            VectorStepError: Some envs failed.
        """

    @abc.abstractmethod
    def receive(self, min_envs: int | None, max_envs: int | None, deadline: float | None) -> Batch:
        """Wait for results and deliver them in the order of their completion; see `VectorEnv.recv`."""

    @abc.abstractmethod
    def make_idle(self, envs: Selection, timeout: float | None, deadline: float | None) -> None:
        """Wait for rollouts and for whatever these envs run. Results that were not delivered are dropped.

        Args:
            envs: The envs.
            timeout: The user's timeout in seconds, for the error.
            deadline: When it is over (`time.monotonic`); None for no limit.

        Raises:
            VectorTimeoutError: The timeout has passed; nothing is lost.
        """

    def reset(
        self, envs: Selection, seeds: Seeds, options: Options, timeout: float | None, deadline: float | None
    ) -> Delivered:
        """Make envs idle, reset them, and deliver the results. For the arguments see these methods.

        A reset that is refused drops no results.
        """
        converted = self._convert_options(envs, options)
        self.check_open(envs, "reset")
        self.make_idle(envs, timeout, deadline)
        self._start_resets(envs, seeds, converted, ())
        return self.wait_for_results(envs, timeout, deadline, "reset")

    def _describe_actor(self, index: int) -> str:
        """Return a description of the actor of an env, for errors."""
        actor = self._actor_by_env[index]
        return f"actor {actor.name!r}, pid {actor.pid}, incarnation {actor.process.incarnation}"

    def _batch(self, envs: Selection, steps: Sequence[EnvStep], failures: Failures, caller: str) -> Batch:
        """Batch the results of envs; raise `VectorStepError` if an env failed, or does not conform to the others."""
        batch, mismatches = self.batcher.batch_steps(steps)
        if failures or mismatches:
            raise step_error({**failures, **mismatches}, batch, len(envs.ids), caller, self._describe_actor)
        return batch

    # Last results and snapshots --------------------------------------------------------------------------

    @abc.abstractmethod
    def read_last(self, index: int) -> EnvStep | None:
        """Return the last result of an idle env; None if it has none.

        Its info is empty if infos are not kept, and lacks the failure that the vector has put into it.
        """

    def last_batch(self) -> Batch | None:
        """Return the last result of each env, all of which must be idle; None if an env has none."""
        self.check_idle(self.all_envs)
        steps = [step for index in self.all_envs.ids if (step := self.read_last(index)) is not None]
        return self._batch(self.all_envs, steps, {}, "last_batch") if len(steps) == len(self.all_envs.ids) else None

    @abc.abstractmethod
    def required_incarnation(self, index: int) -> int | None:
        """Return the incarnation that a snapshot must come from; None if any will do.

        Raises:
            ActorError: The episode of the env was lost with its process.
        """

    @abc.abstractmethod
    def last_obs_is_first(self, index: int) -> bool:
        """Return whether the last observation of an env is the first of its episode."""

    def snapshot_of(self, index: int, checksum: int, state: bytes) -> EnvSnapshot:
        """Return the snapshot of an env whose state was saved."""
        last, is_start = self.read_last(index), self.last_obs_is_first(index)
        # Without checks of resets, only the last result tells that the episode is over.
        has_ended = last is not None and not is_start and bool(last.terminated or last.truncated)
        return EnvSnapshot(
            env_id=index,
            state=state,
            checksum=checksum,
            root_seed=self.episodes.root_seeds[index],
            episode=self.episodes.episode_numbers[index],
            resets_next=has_ended or bool(self.episodes.awaits_autoreset[index]),
            is_start=is_start,
            last=last,
        )

    def _conforming_last(self, snapshot: EnvSnapshot, index: int) -> EnvStep | None:
        """Return the last result of a snapshot that an env is to be restored from; for the errors see `restorer`."""
        last = snapshot.last
        if last is None:
            return None
        whose = f"of the snapshot for env {index}"
        reward = conform(self.reward_spec, last.reward, f"the last reward {whose}")
        if self.observation_spec is None:  # the first observation of the vector determines it
            return last._replace(reward=reward)
        obs = conform(self.observation_spec, last.obs, f"the last observation {whose}")
        return last._replace(obs=obs, reward=reward)

    @abc.abstractmethod
    def restorer(self, index: int, snapshot: EnvSnapshot) -> Callable[[Frame], object]:
        """Return the function that takes the reply to a request to restore the state of a snapshot.

        Raises:
            SpaceMismatchError: The snapshot does not conform to the specs.
        """
