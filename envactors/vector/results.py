"""Results as users get them, and how they are read out of the rows of shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.errors import ActorError
from envactors.mailbox.info_codec import INLINE_INFO, PLAIN, decode, encode
from envactors.mailbox.messages import Description
from envactors.mailbox.pickling import try_to_read
from envactors.mailbox.specs import ArraySpec, Spec, flatten, stack, unflatten, zeros
from envactors.vector.episodes import NO_EPISODE, NO_RESULT
from envactors.vector.table import EnvRequest, EnvTable, Selection


class EnvStep(NamedTuple):
    """One env's step, the result of the futures of `VectorEnv.submit`.

    Attributes:
        env_id: Id of the env.
        obs: Observation with the shapes and dtypes of the observation spec.
        reward: Reward as a float, or as a float64 array if the env's rewards are vectors.
        terminated: Whether the episode ended.
        truncated: Whether the episode was cut off.
        info: The env's own info.
        incarnation: Incarnation of the process that returned the result.
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
        rewards: Rewards; float64, shape (n, ...).
        terminated: Whether each episode ended; bool, shape (n,).
        truncated: Whether each episode was cut off; bool, shape (n,).
        infos: Each env's own info.
        incarnations: Incarnations of the processes that returned the results; int64, shape (n,).
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
# The info of a result, and the leaves of its observation and reward that are objects.
Content: TypeAlias = tuple[Any, list[Any]]


def as_dict(info: Any) -> dict[str, Any]:
    """Return a new dict of an info, to add to it; if it is not a mapping, a dict that contains it."""
    return dict(info) if isinstance(info, Mapping) else {"info": info}


def failure_in(info: Any) -> BaseException | None:
    """Return the failure that the vector has put into an info. Envs may use its key for something else."""
    failure = info.get("failure") if isinstance(info, Mapping) else None
    return failure if isinstance(failure, BaseException) else None


def failure_info(info: Any, failure: BaseException, before: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """Return the info of a request that has failed and was answered with a reset.

    Args:
        info: The info of that reset.
        failure: The failure.
        before: The observation and the info before a step, whose episode the reset has ended; None without one.
    """
    additions = {} if before is None else {"final_obs": before[0], "final_info": as_dict(before[1])}
    return {**as_dict(info), "failure": failure, **additions}


@dataclasses.dataclass(frozen=True)
class EnvSnapshot:
    """The state of one env between two steps. It can be pickled.

    Attributes:
        env_id: Id of the env.
        state: Pickled return value of ``snapshot.get``.
        check: Checksum over the observations before the snapshot.
        root_seed: Seed of the env's last seeded reset.
        episode: Index of its next episode, if episodes are seeded.
        resets_next: Whether its next step is a reset.
        starts: Whether its last observation is the first of an episode.
        last: Its last result; None if it has none.
    """

    env_id: int
    state: bytes = dataclasses.field(repr=False)
    check: int
    root_seed: int | None
    episode: int
    resets_next: bool
    starts: bool
    last: EnvStep | None = dataclasses.field(repr=False)


class RowResult(NamedTuple):
    """A result that was copied out of its row, not unpickled yet.

    Attributes:
        leaves: The leaves of the observation; None for those that are objects.
        reward: The reward; None if it is an object.
        content: The info and the objects, pickled; None if the info is empty and there are no objects.
    """

    env_id: int
    leaves: list[Any]
    reward: Any
    terminated: bool
    truncated: bool
    content: bytes | memoryview | None
    incarnation: int


class RowReader:
    """Reads results out of rows.

    Args:
        table: The envs.
        description: The specs of one env.
        copies: Whether batches of all envs are copied out of the rows.

    Attributes:
        copies: As above.
    """

    def __init__(self, table: EnvTable, description: Description, *, copies: bool) -> None:
        self._table = table
        self._slab = table.slab
        self._layout = table.slab.layout
        self.copies = copies
        self._all_ids = np.arange(self._layout.envs)
        self._reward_spec: Spec = description.reward
        # Whether the spec of observations follows from the first one. Workers do not know it.
        self.learns: bool = description.observation is None
        # Whether observations or rewards have leaves without a place in rows.
        arrays = (*self._slab.observations, self._layout.reward)
        self.has_objects: bool = any(array is None for array in arrays)
        # Whether infos and objects may have to be returned again.
        self.keeps_infos: bool = table.on_failure != "raise" or self.has_objects
        # The array of observations, if an observation is a single array.
        is_array = isinstance(self._layout.observation, ArraySpec) and not self.learns
        self._only = self._slab.observations[0] if is_array else None

    # Batches ---------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> list[Content]:
        """Return the content of each env's complete row. Runs code of users.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        table = self._table
        return [table.infos.decode(env_id, table.overflow.get(env_id)) for env_id in ids]

    def batch(self, envs: Selection, buffers: npt.NDArray[np.uint8], contents: Sequence[Content] | None) -> Batch:
        """Copy the results in the rows of envs.

        Args:
            envs: The envs, whose rows are complete.
            buffers: The buffer that each observation is in.
            contents: The content of each row; None if all are empty.
        """
        slab, at = self._slab, envs.at
        buffer = _common_value(buffers.tobytes()) if envs.is_all else None
        if buffer is not None and self._only is not None:
            obs: Any = self._only[buffer].copy() if self.copies else self._only[buffer]
        else:
            obs = unflatten(self._layout.observation, iter(self._observations(buffer, buffers, at, contents or ())))
        if self._layout.reward is None:
            rewards = stack(self._reward_spec, [content[1][-1] for content in contents or ()])
        else:
            rewards = slab.rewards[at].copy() if envs.is_all else slab.rewards[at]
        infos = [{} for _ in envs.ids] if contents is None else [content[0] for content in contents]
        posted_in = self._table.posted_in
        if envs.is_all:
            flags = slab.terminated.copy(), slab.truncated.copy()
            return Batch(self._all_ids.copy(), obs, rewards, *flags, infos, posted_in.copy())
        return Batch(at.copy(), obs, rewards, slab.terminated[at], slab.truncated[at], infos, posted_in[at])

    def _observations(
        self, buffer: int | None, buffers: npt.NDArray[np.uint8], at: Any, contents: Sequence[Content]
    ) -> list[Any]:
        """Return the leaves of the observations of envs."""
        columns: list[Any] = []
        objects = 0
        ids = self._all_ids[at]
        for array in self._slab.observations:
            if array is None:
                columns.append([content[1][objects] for content in contents])
                objects += 1
            elif buffer is not None:
                columns.append(array[buffer].copy() if self.copies else array[buffer])
            else:
                columns.append(array[buffers, ids])
        return columns

    # Single results --------------------------------------------------------------------------------------

    def copy_row(self, env_id: int) -> RowResult:
        """Copy a complete result out of its row, without running code of users."""
        return self._copy(env_id, self.content_of(env_id))

    def copy_last(self, env_id: int, *, has_info: bool = True) -> RowResult | None:
        """Copy the last complete result of an env whose present request has none; None if there is none to return.

        Only the observation and the content are those of that result: the row has the rest of it no longer.

        Args:
            env_id: The env.
            has_info: Whether the copy has the info of that result, which may be one that cannot be unpickled.
        """
        table = self._table
        if table.episodes.flags[env_id] & NO_RESULT:
            return None
        return self._copy(env_id, table.last_infos[env_id] if has_info or self.has_objects else None)

    def _copy(self, env_id: int, content: bytes | memoryview | None) -> RowResult:
        table, slab, buffer = self._table, self._slab, self._table.buffer_index[env_id]
        leaves = [None if array is None else array[buffer, env_id, ...].copy()[()] for array in slab.observations]
        reward: Any = None
        if self._layout.reward is not None:
            reward = slab.rewards[env_id]
            reward = reward.copy() if isinstance(reward, np.ndarray) else float(reward)
        flags = bool(slab.terminated[env_id]), bool(slab.truncated[env_id])
        return RowResult(env_id, leaves, reward, *flags, content, int(table.posted_in[env_id]))

    def content_of(self, env_id: int) -> bytes | memoryview | None:
        """Return the content of a complete row, pickled."""
        encoding = self._table.infos.encodings[env_id]
        if encoding == PLAIN:
            return None
        return bytes(self._slab.inline_info(env_id)) if encoding == INLINE_INFO else self._table.overflow[env_id]

    def keep_info(self, env_id: int) -> None:
        """Keep the content of a result that is about to be delivered, if it may have to be returned again."""
        table = self._table
        if self.keeps_infos and (table.last_infos[env_id] or table.infos.encodings[env_id] != PLAIN):
            content = self.content_of(env_id)
            table.last_infos[env_id] = None if content is None else bytes(content)

    def read_last(self, env_id: int) -> EnvStep | None:
        """Return the last result of an idle env; None if it has none. Runs code of users.

        Its info is empty if infos are not kept. A result that was repeated for a failure has reward 0 and is truncated.
        """
        last = self.copy_last(env_id)
        if last is None:
            return None
        step = self.read(last)
        return self.truncate(step) if self._table.episodes.flags[env_id] & NO_EPISODE else step

    def truncate(self, step: EnvStep) -> EnvStep:
        """Return the last result of an env as that of a step which cuts off the episode."""
        return step._replace(reward=zeros(self._reward_spec), terminated=False, truncated=True)

    def encode(self, env_id: int, step: EnvStep) -> RowResult:
        """Return a result, which conforms to the specs, as `put_back` takes it."""
        leaves: list[Any] = []
        objects: list[Any] = []
        for array, leaf in zip(self._slab.observations, flatten(self._layout.observation, step.obs), strict=True):
            leaves.append(None if array is None else leaf)
            objects += [leaf] if array is None else []
        reward = step.reward
        if self._layout.reward is None:
            objects.append(reward)
            reward = None
        content = bytes(encode(step.info, objects)) if step.info or objects else None
        return RowResult(env_id, leaves, reward, step.terminated, step.truncated, content, step.incarnation)

    def put_back(self, env_id: int, row: RowResult) -> None:
        """Make an earlier result the last one of an env, which is idle and whose worker runs nothing."""
        table, slab, buffer = self._table, self._slab, self._table.buffer_index[env_id]
        for array, leaf in zip(slab.observations, row.leaves, strict=True):
            if array is not None:
                array[buffer, env_id] = leaf
        if self._layout.reward is not None:
            slab.rewards[env_id] = row.reward
        slab.terminated[env_id], slab.truncated[env_id] = row.terminated, row.truncated
        table.last_infos[env_id] = bytes(row.content) if row.content is not None and self.keeps_infos else None
        table.episodes.flags[env_id] &= ~NO_RESULT

    def read_row(self, env_id: int) -> EnvStep:
        """Copy a complete result out of its row, and unpickle it. Runs code of users; for the errors see `read`."""
        return self.read(self.copy_row(env_id))

    def read(self, row: RowResult) -> EnvStep:
        """Unpickle a result. Runs code of users.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        info, objects = ({}, []) if row.content is None else decode(row.content)
        reward = objects[-1] if row.reward is None and objects else row.reward
        others = iter(objects)
        leaves = [next(others, None) if leaf is None else leaf for leaf in row.leaves]
        obs = unflatten(self._layout.observation, iter(leaves))
        return EnvStep(row.env_id, obs, reward, row.terminated, row.truncated, info, row.incarnation)


def _common_value(values: bytes) -> int | None:
    """Return the value of all bytes; None if it is not the same."""
    return values[0] if values.count(values[0]) == len(values) else None


class RowOutcome:
    """A complete result that was copied out of its row, with the additions of the vector.

    Args:
        reader: Reads the rows.
        row: The result.
        request: The request, which may have an earlier failure to report.
        before: The result before it, if the request is a step that was answered with a reset.
        unreadable: Makes the error of a result that cannot be unpickled.
        continues_in: The process that the env continues in, if the request has failed and the row is the last result
            before it; None if the row is the result of the request.
    """

    is_failure = False

    def __init__(
        self,
        reader: RowReader,
        row: RowResult,
        request: EnvRequest,
        before: RowResult | None,
        unreadable: Callable[[BaseException], ActorError],
        continues_in: int | None = None,
    ) -> None:
        self._reader, self._row, self._request, self._before = reader, row, request, before
        self._unreadable, self._continues_in = unreadable, continues_in

    def read(self) -> tuple[EnvStep | None, BaseException | None]:
        """Return the result, or the error."""
        step, error = try_to_read(self._read)
        return step, None if error is None else self._unreadable(error)

    def _read(self) -> EnvStep:
        step, request = self._reader.read(self._row), self._request
        failure = None if request.failure is None else request.failure.read()[1]
        if self._continues_in is not None:
            last = self._reader.truncate(step)
            return last._replace(info={"failure": failure}, incarnation=self._continues_in)
        if request.ending is not None:
            ending: EnvStep
            ending, error = request.ending.read()
            if error is not None:
                raise error
            info = {**as_dict(step.info), "final_obs": ending.obs, "final_info": ending.info}
            if failure is not None:
                info["failure"] = failure
            return ending._replace(obs=step.obs, info=info, incarnation=step.incarnation)
        if failure is None:
            return step
        before = None if self._before is None else self._reader.read(self._before)
        info = failure_info(step.info, failure, None if before is None else (before.obs, before.info))
        return step._replace(truncated=step.truncated or request.method == "step", info=info)
