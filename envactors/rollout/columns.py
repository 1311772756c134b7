"""Columns of one worker's envs in a trajectory: steps the envs and writes their results, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.control_page import ENV_INDEX, METHOD, METHOD_RESET, METHOD_STEP, SINCE
from envactors.mailbox.info_codec import PLAIN, Infos
from envactors.mailbox.messages import Failure, Fault, episode_seed
from envactors.mailbox.pickling import copy_value, pack_failure
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec, conform, flatten, reader, split_batch, unflatten
from envactors.rollout.trajectory import REPEAT, RESET, STEP, Trajectory
from envactors.worker.env_rows import PayloadError, WorkerRetiredError, as_failure
from envactors.worker.host import Fields, HostedEnv
from envactors.worker.main import Server


class EnvFailedError(Exception):
    """An env raised in a step of a rollout, or returned what cannot be written.

    Args:
        position: Position of the env in the actor.
        failure: What has failed.
    """

    def __init__(self, position: int, failure: Failure) -> None:
        super().__init__(position, failure)
        self.position = position
        self.failure = failure


class Column:
    """One env in a rollout, and what its next step does.

    Args:
        hosted: Env to step.
        ended: Whether its episode has ended, so that the next step resets it.
        repeats: Whether its episode has ended and nothing resets it.
        seed: Seed of its next reset; None lets the env choose.
        root_seed: Seed that the seeds of later episodes are derived from; None if episodes are not seeded.
        episode: Index of the next episode.

    Attributes:
        hosted: Env to step.
        position: Position of the env in the actor.
        index: Index of the env in the vector.
        env_step: The env's own ``step``.
        op: What the next step does: ``STEP``, ``RESET``, or ``REPEAT``.
        seed: Seed of the next reset; None lets the env choose.
    """

    def __init__(
        self, hosted: HostedEnv, ended: bool, repeats: bool, seed: int | None, root_seed: int | None, episode: int
    ) -> None:
        self.hosted = hosted
        self.position: int = hosted.position
        self.index: int = hosted.index
        self.env_step: Any = hosted.env.step
        self.op: int = REPEAT if repeats else RESET if ended else STEP
        self.seed = seed
        self._root_seed = root_seed
        self._episode = episode

    def begin_episode(self) -> None:
        """Choose the next operation, and the seed of the next reset, after a reset."""
        self.op = STEP
        self.seed = None
        if self._root_seed is not None:
            self._episode += 1
            self.seed = episode_seed(self._root_seed, self._episode)

    def end_episode(self, autoreset: str) -> None:
        """Choose the next operation after the last step of an episode."""
        if autoreset == "same_step":
            self.begin_episode()
        else:
            self.op = RESET if autoreset == "next_step" else REPEAT


class _Observed:
    """Observations of several leaves, or of leaves without a place in the trajectory.

    Args:
        columns: Knows the leaves without a place.
        seen: Read-only array per leaf; None for leaves without a place.
    """

    def __init__(self, columns: Columns, seen: Sequence[Any]) -> None:
        self._columns = columns
        self._seen = seen

    def __getitem__(self, step: int) -> Any:
        objects = zip(*self._columns.objects, strict=True)
        leaves = (list(next(objects)) if array is None else array[step] for array in self._seen)
        return unflatten(self._columns.trajectory.layout.observation, leaves)


class Columns:
    """Steps the envs of a worker, and writes their results into the trajectory.

    Args:
        trajectory: Trajectory to write to.
        server: The worker's server.
        first: Index of the worker's first env.
        count: Number of envs of the worker.

    Attributes:
        trajectory: Trajectory to write to.
        chosen: Number of steps that the policy has chosen actions for, at the index of the worker's first env.
        objects: Leaves of each env's last observation that have no place in the trajectory.
        observed, starts: Read-only batches by step: the observations before it, and whether each is the first of its
            episode; starts is bool, shape (t + 1, n).
        my_action: Actions that are single arrays, shape (t, n, ...); None for others.
        action_shape: Shape of one step's actions in it.
        action_dtype: Their dtype, as policies return it; None if the policy returns more than such actions.
    """

    def __init__(self, trajectory: Trajectory, server: Server, first: int, count: int) -> None:
        self.trajectory = trajectory
        self.objects: list[list[Any]] = []
        # Without observation spaces, the spec is what the vector learned from some env; others may differ.
        self._conforms = trajectory.layout.is_learnt
        self._server = server
        self._guard = server.guard
        self._infos = Infos(trajectory)
        layout = trajectory.layout
        self._envs = layout.envs
        self._spec = layout.observation
        is_array = isinstance(self._spec, ArraySpec)
        self._only_obs: Any = trajectory.observations[0] if is_array else None
        is_action_array = isinstance(layout.action, ArraySpec)
        # One row of actions per step; None per step if an action has several leaves.
        self._only_action: Any = trajectory.actions[0] if is_action_array else [None] * layout.steps
        self._copies_action = is_action_array and trajectory.actions[0].ndim > 2
        self._mine = slice(first, first + count)
        self.my_action: Any = trajectory.actions[0][:, self._mine] if is_action_array else None
        self.action_shape: tuple[int, ...] = (count, *trajectory.actions[0].shape[2:]) if is_action_array else ()
        # NumPy's own object, as policies return it: one that was unpickled is another.
        is_all = is_action_array and not layout.extras
        self.action_dtype: Any = np.dtype(trajectory.actions[0].dtype.type) if is_all else None
        self.chosen: memoryview[int] = trajectory.chosen.data
        # The policy gets read-only views, since they also are the observations of the result.
        seen = trajectory.columns(trajectory.observations, first, first + count)
        self.starts: npt.NDArray[np.bool_] = trajectory.starts[:, self._mine]
        for view in (*seen, self.starts):
            if view is not None:
                view.flags.writeable = False
        self.observed: Any = seen[0] if self._only_obs is not None else _Observed(self, seen)
        # Writing one number through a memoryview takes a third of the time of an array.
        self._rewards: Any = trajectory.rewards.reshape(-1).data if layout.reward == PLAIN_REWARD else None
        self._terminated = trajectory.terminated.reshape(-1).data
        self._truncated = trajectory.truncated.reshape(-1).data
        self._ops = trajectory.ops.reshape(-1).data
        self._flat_starts = trajectory.starts.reshape(-1).data
        self._checks = trajectory.checks.reshape(-1).data
        self._done = trajectory.done.data
        self._encodings = trajectory.info_encoding.data
        # All observations as one sequence of numbers, and how many of these are one observation's, for plain results,
        # which `run` writes. Assigning a slice of a memoryview checks the dtype and the shape, and takes half of the
        # time that NumPy takes.
        obs: Any = self._only_obs
        is_flat = obs is not None and obs.ndim == 3 and obs.dtype.kind in "biuf" and self._rewards is not None
        is_short = is_flat and self._guard is None and not server.host.hosted_envs[0].journal
        self._size: int = obs.shape[2] if is_short else 0
        self._cells: Any = obs.reshape(-1).data if is_short else None

    def write_actions(self, step: int, actions: Any) -> None:
        """Write the actions that the policy has chosen.

        Raises:
            SpaceMismatchError: The actions do not conform to the action spec.
        """
        mine = self.my_action
        spec = self.trajectory.layout.action
        assert spec is not None, "the spec was learned"
        if mine is not None:
            mine[step] = split_batch(spec, actions, self.action_shape[0], "the policy's actions")
            return
        count = self._mine.stop - self._mine.start
        for position, value in enumerate(split_batch(spec, actions, count, "the policy's actions"), self._mine.start):
            for array, leaf in zip(self.trajectory.actions, flatten(spec, value), strict=True):
                array[step, position] = leaf

    def clear(self, start: int, due: list[int]) -> None:
        """Clear flags, resets, and infos of the steps to come, so that `step` only writes what differs.

        Args:
            start: First step of the order.
            due: Envs that take the first step; all envs take the later ones.
        """
        flags = self.trajectory.flags[:, start + 1 :, self._mine]
        if len(due) < flags.shape[2]:
            self.trajectory.flags[:, start + 1, due] = 0
            flags = flags[:, 1:]
        flags[...] = 0

    def run(self, steps: range, due: Sequence[Column], columns: Sequence[Column], autoreset: str) -> Iterator[int]:
        """Take steps, each once its action has been chosen: yield the step first.

        Args:
            steps: Steps within the rollout.
            due: Envs that take the first one.
            columns: All envs, which take the others.
            autoreset: What happens at the end of an episode.

        Raises:
            EnvFailedError: An env raised, or returned what cannot be written.
        """
        page, now, within = self._server.page, time.monotonic, autoreset == "same_step"
        counters, times, done, rewards, envs = page.counters, page.times, self._done, self._rewards, self._envs
        cells, size, copies = self._cells, 0 if page.is_timing else self._size, self._copies_action
        for step, actions in zip(steps, self._only_action[steps.start :], strict=False):
            yield step
            row = step * envs
            for column in due if step == steps.start else columns:
                index, op = column.index, column.op
                times[SINCE] = now()
                counters[METHOD] = METHOD_STEP
                counters[ENV_INDEX] = column.position
                try:
                    if op == STEP:
                        action = self._action(step, index) if actions is None else actions[index]
                        result = column.env_step(action.copy() if copies else action)
                    elif op == RESET:
                        result = self._reset(column)
                    else:
                        self._repeat(column.hosted, step)
                        continue
                    if size and type(result) is tuple and len(result) == 5:
                        # Plain results are written here: the same as `_finish`, without its calls.
                        obs, reward, terminated, truncated, info = result
                        is_turn = terminated or truncated or op == RESET
                        if isinstance(reward, float) and type(info) is dict and not (is_turn and within):
                            cell = (row + envs + index) * size
                            try:
                                cells[cell : cell + size] = obs
                                rewards[row + index] = reward
                                if info:
                                    self._write_beside(row + index, info, [])
                                if is_turn:
                                    self._write_turn(column, row + index, op, terminated, truncated, autoreset)
                                done[index] = step + 1
                                continue
                            except (TypeError, ValueError, BufferError):
                                pass  # the observation has another type, dtype, or shape
                    self._finish(column, step, op, result, autoreset)
                except BaseException as error:
                    raise EnvFailedError(column.position, as_failure(error, page)) from error

    def _reset(self, column: Column) -> Fields:
        self._server.page.counters[METHOD] = METHOD_RESET
        return column.hosted.reset(column.seed, None)

    def _write_turn(self, column: Column, row: int, op: int, terminated: Any, truncated: Any, autoreset: str) -> None:
        """Write that an episode has ended, or that a reset has begun one."""
        if op == RESET:
            self._ops[row] = RESET
            self._flat_starts[row + self._envs] = True
            column.begin_episode()
        else:
            self._terminated[row] = terminated
            self._truncated[row] = truncated
            column.end_episode(autoreset)

    def _finish(self, column: Column, step: int, op: int, result: Any, autoreset: str) -> None:
        """Write what an env has returned from a step, or the result of its reset.

        Raises:
            PayloadError: It cannot be written.
            BaseException: A reset within the step raises.
        """
        server, page, same_step = self._server, self._server.page, autoreset == "same_step"
        fields: Fields = result if op == RESET else column.hosted.take(result, same_step, column.seed)
        if page.is_timing:
            page.spans.add(page.times[SINCE], time.monotonic(), server.call_id, column.position, page.counters[METHOD])
        over = bool(fields[2]) or bool(fields[3])
        try:
            self._write(column.hosted, step, fields, op, starts=op == RESET or (over and same_step))
        except (WorkerRetiredError, PayloadError):
            raise
        except BaseException as error:
            raise PayloadError(pack_failure(error, Fault.RESULT)) from error
        if op == RESET:
            column.begin_episode()
        elif over:
            column.end_episode(autoreset)

    def _action(self, step: int, index: int) -> Any:
        spec = self.trajectory.layout.action
        assert spec is not None, "the spec was learned"
        return reader(spec, [array[step] for array in self.trajectory.actions], index)()

    def _write(self, hosted: HostedEnv, step: int, fields: Fields, op: int, *, starts: bool) -> None:
        """Write the result of an env.

        Args:
            hosted: Env that returned it.
            step: Step within the rollout.
            fields: The result.
            op: ``STEP`` or ``RESET``.
            starts: Whether the observation is the first of its episode.
        """
        obs, reward, terminated, truncated, info = fields
        if self._conforms:
            obs = conform(self._spec, obs, f"the observation of env {hosted.index}")
        index, guard = hosted.index, self._guard
        row = step * self._envs + index
        leaves = [] if self._only_obs is not None else flatten(self._spec, obs)
        objects = self._copy_objects(leaves) if not self.trajectory.is_whole else []
        if guard is not None:
            guard.begin_write()
        try:
            if self._only_obs is not None:
                self._only_obs[step + 1, index] = obs
            for array, leaf in zip(self.trajectory.observations, leaves, strict=False):
                if array is not None:
                    array[step + 1, index] = leaf
            if self._rewards is not None:
                self._rewards[row] = reward
            else:
                self.trajectory.rewards[step, index] = reward
            self._terminated[row] = terminated
            self._truncated[row] = truncated
            self._ops[row] = op
            self._flat_starts[row + self._envs] = starts
            if hosted.journal:
                self._checks[row] = hosted.check
            if type(info) is dict and not info and not objects:
                self._encodings[row] = PLAIN
            else:
                self._write_beside(row, info, objects)
            if objects:
                self.objects[hosted.position] = objects
            self._done[index] = step + 1
        finally:
            if guard is not None:
                guard.writer = None

    def _copy_objects(self, leaves: list[Any]) -> list[Any]:
        """Return copies of the leaves without a place in the trajectory, since the env may change them later."""
        pairs = zip(self.trajectory.observations, leaves, strict=True)
        return [copy_value(leaf) for array, leaf in pairs if array is None]

    def _write_beside(self, row: int, info: Any, objects: list[Any]) -> None:
        """Write an info and object leaves.

        Raises:
            PayloadError: They cannot be pickled.
        """
        try:
            part = self._infos.put(row, self._infos.pack(info, objects))
        except BaseException as error:
            raise PayloadError(pack_failure(error, Fault.RESULT)) from error
        if part is not None:
            self._server.send_part(row, part)

    def _repeat(self, hosted: HostedEnv, step: int) -> None:
        """Write the last observation of an env again."""
        trajectory, index = self.trajectory, hosted.index
        row = step * self._envs + index
        for array in trajectory.observations:
            if array is not None:
                array[step + 1, index] = array[step, index]
        trajectory.rewards[step, index] = 0
        if not trajectory.is_whole:
            self._write_beside(row, {}, self.objects[hosted.position])
        self._ops[row] = REPEAT
        if hosted.journal:
            self._checks[row] = hosted.check
        self._done[index] = step + 1
