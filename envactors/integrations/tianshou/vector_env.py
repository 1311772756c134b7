"""`ActorEnvWorker` and `ActorVectorEnv`: tianshou's workers and vector envs on actors, one actor per env.

`envactors.vector_env.VectorEnv` runs the envs, with ``autoreset="disabled"``. tianshou's base class keeps track of
which workers are stepping. A worker keeps only the future of its last request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

import numpy as np
from tianshou.env import BaseVectorEnv
from tianshou.env.worker import EnvWorker

from envactors.actor.future import BoundToProcess
from envactors.actor.handle import ActorHandle
from envactors.actor.spawn import next_name
from envactors.errors import SpaceMismatchError
from envactors.integrations.access import VectorAccess, warn_of_interrupted
from envactors.integrations.adapter import adapter_factories
from envactors.integrations.failures import or_first_failure
from envactors.integrations.options import make_vector
from envactors.integrations.tianshou.adapter import MISFIT, TianshouEnvAdapter
from envactors.mailbox.factory import Factory, as_factories
from envactors.mailbox.specs import row_splitter
from envactors.vector.options import VectorOptions
from envactors.vector_env import EnvFuture, VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack


_REFUSED = {
    "envs_per_actor": "each worker of tianshou is a process, which can be closed alone",
    "autoreset": "tianshou's collectors reset envs themselves, which is autoreset='disabled'",
    "on_failure": "in tianshou a step that fails raises the error; reset the env then",
    "max_journal": "in tianshou a step that fails raises the error, and is not replayed",
    "copy": "tianshou keeps observations, and views of the shared memory would change",
}
_OF_ONE = {**_REFUSED, "max_running": "a worker has one env. Pass it to ActorVectorEnv"}


def _make_vector(
    whose: str, env_fns: Sequence[Factory], options: VectorOptions, refused: Mapping[str, str]
) -> VectorEnv:
    def make(shares: bool) -> VectorEnv:
        factories = adapter_factories(TianshouEnvAdapter, env_fns, shares)
        vector = make_vector(VectorEnv, whose, factories, options, refused, autoreset="disabled")
        VectorAccess(vector).disable_reset_checks()
        return vector

    try:
        return make(shares=True)
    except SpaceMismatchError:
        return make(shares=False)  # tianshou lets envs have different spaces


class ActorEnvWorker(EnvWorker):  # type: ignore[misc] # mypy skips its module
    """One env in an actor, for ``BaseVectorEnv(env_fns, worker_fn=ActorEnvWorker)``.

    The caller receives the exception from an env unchanged, and the env remains usable. After a crash, the env needs a
    reset.

    Args:
        env_fn: Creates the env; called only in the worker.
        vector: The vector of the env, if it already exists.
        env_id: The index of the env in the vector.
        **options: See `envactors.VectorOptions`. With ``seed_episodes`` each reset gets a different seed, and `seed`
            starts again with episode 0.

    Attributes:
        actor: The handle of the process.
        future: The future of the last request; None before the first.

    Raises:
        ActorStartError: The env could not be created.
    """

    def __init__(
        self,
        env_fn: Factory,
        *,
        vector: VectorEnv | None = None,
        env_id: int = 0,
        **options: Unpack[VectorOptions],
    ) -> None:
        self._own: VectorEnv | None = None
        if vector is None:
            options.setdefault("name", next_name())
            vector = self._own = _make_vector("ActorEnvWorker", [env_fn], options, _OF_ONE)
        self.actor: ActorHandle[Any] = vector.actors[env_id]
        self.future: EnvFuture | None = None
        self._env_id = env_id
        self._access = VectorAccess(vector)
        self._is_reset = False  # whether the last request was a reset
        super().__init__(env_fn)

    def get_env_attr(self, key: str) -> Any:
        """Return an attribute of the env, even if wrappers hide it, or None if the env does not have it."""
        try:
            return self.actor.get(key).result()
        except AttributeError:
            return None

    def set_env_attr(self, key: str, value: Any) -> None:
        """Set an attribute of the innermost env."""
        self.actor.set(key, value).result()

    def send(self, action: Any, **kwargs: Any) -> None:
        """Start a step, or a reset if the action is None; `recv` returns the result."""
        if action is None:
            if "seed" in kwargs:
                super().seed(kwargs["seed"])
            self._send_reset(kwargs.get("seed"), kwargs or None)
        else:
            self._access.discard([self._env_id])
            self.future, self._is_reset = self._access.submit_step(self._env_id, action), False

    def _send_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._access.discard([self._env_id])
        self.future, self._is_reset = self._access.submit_reset(self._env_id, seed, options), True

    def recv(self) -> Any:
        """Return the result of the last `send`.

        Raises:
            Exception: The exception from the env.
        """
        assert self.future is not None, "cannot call recv(): nothing was sent. Call send(action) first"
        _, obs, *others, info, _ = self.future.result()
        return _restore((obs, info) if self._is_reset else (obs, *others, info))

    def reset(self, **kwargs: Any) -> Any:
        """Reset the env and return the result."""
        self.send(None, **kwargs)
        return self.recv()

    @staticmethod
    def wait(workers: list[ActorEnvWorker], wait_num: int, timeout: float | None = None) -> list[ActorEnvWorker]:
        """Wait until ``wait_num`` workers have a result, for at most ``timeout`` seconds; return those that have one.

        A worker whose env failed is returned only if no other worker has a result, and then alone. Its `recv` raises,
        so results that are received together with it would be lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        futures = [worker.future for worker in workers if worker.future is not None]
        while sum(future.done() for future in futures) < min(wait_num, len(futures)):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            wait_for([future for future in futures if not future.done()], left, FIRST_COMPLETED)
        ready = [worker for worker in workers if worker.future is not None and worker.future.done()]
        fine = [worker for worker in ready if worker.future is not None and worker.future.exception() is None]
        return fine or ready[:1]

    def seed(self, seed: int | None = None) -> Any:
        """Seed the env and its action space, with the env's own ``seed`` or, if it has none, with a reset."""
        super().seed(seed)
        self._send_reset(seed, {})
        return self.recv()[0]

    def render(self, **kwargs: Any) -> Any:
        """Return a frame of the env."""
        return self.actor.call("render", **kwargs).result()

    def close_env(self) -> None:
        """Wait for the pending request, close the env, and end its process, within the close deadline."""
        (self._own or self.actor).close()


class ActorVectorEnv(BoundToProcess, BaseVectorEnv):  # type: ignore[misc] # mypy skips its module
    """A vector env of tianshou whose envs run in one actor each.

    Args:
        env_fns: One callable per env; called only in the workers, which start in parallel.
        wait_num: Number of envs that a step waits for; None for all.
        timeout: How long a step waits for them, in seconds; it returns at least one result in any case.
        **options: See `envactors.VectorOptions`. Some of them are rejected.

    Attributes:
        actors: The handle of each process.
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.

    Raises:
        ActorStartError: An env could not be created.
    """

    def __init__(
        self,
        env_fns: Sequence[Factory],
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        env_fns = as_factories(env_fns, "env_fns")
        self.vector: VectorEnv = _make_vector("ActorVectorEnv", env_fns, options, _REFUSED)
        self.actors: list[ActorHandle[Any]] = self.vector.actors
        self._access = VectorAccess(self.vector)
        assert self.vector.observation_spec is not None, "the adapter has a space"
        self._split_rows = row_splitter(self.vector.observation_spec)
        self._was_interrupted = False
        self.waiting_conn: list[ActorEnvWorker]
        self.waiting_id: list[int]
        self.ready_id: list[int]
        ids = iter(range(len(env_fns)))
        super().__init__(
            env_fns, lambda env_fn: ActorEnvWorker(env_fn, vector=self.vector, env_id=next(ids)), wait_num, timeout
        )

    def step(self, action: Any, id: Any = None) -> Any:  # noqa: A002 # tianshou's name
        """Step envs as ``BaseVectorEnv.step`` does. If a step was interrupted before, discard its results and warn.

        Raises:
            Exception: The exception from an env. That env can be reset, and the others are not affected.
        """
        if self.is_async:
            return self._step_async(action, id)
        self._assert_is_not_closed()
        ids = self._wrap_id(id)
        if action is None:
            raise ValueError("action must be not-None for non-async")
        assert len(action) == len(ids)
        env_ids = None if id is None else [range(self.env_num)[i] for i in ids]  # negative ids count from the end
        obs, *arrays, infos = or_first_failure(lambda: self._access.step_as_given(action, env_ids))
        if not isinstance(obs, np.ndarray):
            obs = self._split_rows(obs, len(ids))
        if any(infos) and any(MISFIT in info for info in infos):
            obs, *columns, each = zip(*map(_restore, zip(obs, *arrays, infos, strict=True)), strict=True)
            infos = list(each)
            arrays = [np.stack(column) for column in columns]
        for env_id, info in zip(ids, infos, strict=True):
            info["env_id"] = env_id
        return obs if isinstance(obs, np.ndarray) else _stack(obs), *arrays, _as_objects(infos)

    def _step_async(self, action: Any, id: Any) -> Any:  # noqa: A002 # tianshou's name
        if self._was_interrupted:
            self._was_interrupted = False
            warn_of_interrupted(stacklevel=4)
        waiting = [*self.waiting_conn], [*self.waiting_id]
        try:
            return super().step(action, id)
        except BaseException as error:
            if not isinstance(error, Exception):
                # The envs that this step has started become ready, and those that were waiting before wait again.
                self.waiting_conn, self.waiting_id = waiting
                self._was_interrupted = action is not None
            # If `recv` raises, the base class counts the env neither as waiting nor as ready, so that it could never
            # step again.
            self.ready_id = [i for i in range(self.env_num) if i not in self.waiting_id]
            raise

    def close(self) -> None:
        """Wait for pending requests, close the envs, and end their processes, within the close deadline."""
        self._assert_is_not_closed()
        self.vector.close()
        super().close()


def _restore(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a result with the values that its row does not hold; see `MISFIT`."""
    *others, info = fields
    if MISFIT not in info:
        return fields
    info = {**info}
    misfit = info.pop(MISFIT)
    return *others[: len(others) - len(misfit)], *misfit, info


def _stack(rows: Sequence[Any]) -> Any:
    """Stack observations as tianshou does."""
    if type(rows[0]) is dict:
        return _as_objects(rows)
    try:
        return np.stack(rows)
    except ValueError:  # of different shapes
        return np.array(rows, dtype=object)


def _as_objects(values: Sequence[Any]) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array
