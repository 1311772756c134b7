"""Results and snapshots as users get them, and how a result or an error tells that requests have failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.actor.future import Outcome
from envactors.errors import ActorError, VectorStepError
from envactors.mailbox.pickling import safe_str


class EnvStep(NamedTuple):
    """One env's step, the result of the futures of `VectorEnv.submit`.

    Attributes:
        env_id: Id of the env.
        obs: Observation with the shapes and dtypes of the observation spec.
        reward: Reward in the form of the reward spec: a float, a float64 array if rewards are vectors, or an object.
        terminated: Whether the episode ended.
        truncated: Whether the episode was cut off.
        info: The env's own info. The vector may have added ``failure``, ``final_obs``, ``final_info``, or
            ``episode_seed``.
        incarnation: Incarnation of the process that returned the result; if it answers a failure, of the one after it.
    """

    env_id: int
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int


class Batch(NamedTuple):
    """Results of several envs; row ``k`` belongs to env ``env_ids[k]``.

    Attributes:
        env_ids: Ids of the envs; int64, shape (n,).
        obs: Observations; an array of shape (n, ...) per leaf of the observation spec, a list for values that cannot be
            batched.
        rewards: Rewards; float64, shape (n, ...), or a list for rewards that cannot be batched.
        terminated: Whether each episode ended; bool, shape (n,).
        truncated: Whether each episode was cut off; bool, shape (n,).
        infos: The info of each env, as in `EnvStep`.
        incarnations: Incarnations of the processes that returned the results, or, if these answer failures, of those
            after them; int64, shape (n,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    incarnations: npt.NDArray[np.int64]


# What `VectorEnv.step` returns: observations, rewards, terminated, truncated, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], list[dict[str, Any]]
]
# A `Batch` without its ids: what `VectorEnv.step` returns, and the incarnations.
Delivered: TypeAlias = tuple[
    Any,
    npt.NDArray[np.float64],
    npt.NDArray[np.bool_],
    npt.NDArray[np.bool_],
    list[dict[str, Any]],
    npt.NDArray[np.int64],
]


def batch_of(ids: Sequence[int], delivered: Delivered) -> Batch:
    """Return the results of envs with their ids."""
    return Batch(np.array(ids, np.int64), *delivered)


def as_dict(info: Any) -> dict[str, Any]:
    """Return a new dict of an info, to add to it; if it is not a mapping, a dict that contains it."""
    return dict(info) if isinstance(info, Mapping) else {"info": info}


class FailureInfo(dict[str, Any]):
    """An info to which the vector has added a failure. Envs may use the key ``failure`` for something else.

    Copies are plain dicts, since an env may step another vector, and return its infos.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def failure_in(info: Any) -> BaseException | None:
    """Return the failure that the vector has put into an info."""
    return info["failure"] if isinstance(info, FailureInfo) else None


def failure_info(info: Any, failure: Outcome, before: tuple[Any, Any] | None = None) -> FailureInfo:
    """Return the info of the answer to a request that has failed: the last result, truncated, or a reset.

    Args:
        info: The info of the reset; empty without one.
        failure: The failure.
        before: The observation and the info before a step, whose episode the reset has ended; None if there was no
            reset, or no step before it.
    """
    additions = {} if before is None else {"final_obs": before[0], "final_info": as_dict(before[1])}
    return FailureInfo({**as_dict(info), "failure": failure.read()[1], **additions})


def step_error(
    errors: dict[int, BaseException],
    batch: Any,
    count: int,
    caller: str,
    describe_actor: Callable[[int], str] | None = None,
) -> VectorStepError:
    """Return the error of some envs.

    Args:
        errors: The errors, by env.
        batch: The results of the other envs.
        count: How many envs there are in all.
        caller: Name of the user's method.
        describe_actor: Describes the actor of an env; None to leave that out.
    """
    errors = dict(sorted(errors.items()))
    first, cause = next(iter(errors.items()))
    # An `ActorError` already names the actor.
    where = "" if describe_actor is None or issubclass(type(cause), ActorError) else f" ({describe_actor(first)})"
    text = f"{len(errors)} of {count} envs failed in {caller}; env {first}{where}: {safe_str(cause)}"
    error = VectorStepError(text, failures=errors, batch=batch)
    error.__cause__ = cause
    return error


@dataclasses.dataclass(frozen=True)
class EnvSnapshot:
    """The state of one env between two steps. It can be pickled.

    Attributes:
        env_id: Id of the env.
        state: Pickled return value of ``snapshot.get``.
        checksum: Checksum over the observations before the snapshot.
        root_seed: Seed of the env's last seeded reset.
        episode: Index of its next episode, if episodes are seeded.
        resets_next: Whether its next step is a reset.
        is_start: Whether its last observation is the first of an episode.
        last: Its last result; None if it has none.
    """

    env_id: int
    state: bytes = dataclasses.field(repr=False)
    checksum: int
    root_seed: int | None
    episode: int
    resets_next: bool
    is_start: bool
    last: EnvStep | None = dataclasses.field(repr=False)
