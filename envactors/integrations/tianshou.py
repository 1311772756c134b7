"""`ActorEnvWorker` and `ActorVectorEnv`: tianshou's vector envs over actors, one an env.

tianshou's vector envs keep account of who is stepping; a worker has one future, that of what it was asked last.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, spawn
from envactors.integrations.inside import TianshouGuest
from envactors.options import Deadlines, RestartPolicy

try:
    from tianshou.env import BaseVectorEnv
    from tianshou.env.worker import EnvWorker
except ImportError as error:
    raise ImportError(
        f"envactors.integrations.tianshou needs tianshou ({error}): pip install 'envactors[tianshou]'"
    ) from error


class ActorEnvWorker(EnvWorker):  # type: ignore[misc] # its module is checked nowhere
    """One env in an actor, for ``BaseVectorEnv(env_fns, worker_fn=ActorEnvWorker)``.

    What the env raises is raised as itself, and it goes on. After the loss of its process it needs a reset.

    Args:
        env_fn: Makes the env; run in the worker alone.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        actor: The env's actor, where `start` has made it already.

    Raises:
        ActorStartError: The env could not be made.
    """

    def __init__(
        self,
        env_fn: Callable[[], Any],
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 # frozen
        restart: RestartPolicy = RestartPolicy(max_restarts=3),  # noqa: B008 # frozen
        actor: ActorHandle | None = None,
    ) -> None:
        self.actor = self.start(env_fn, deadlines, restart) if actor is None else actor
        self._future: ActorFuture | None = None
        super().__init__(env_fn)

    @staticmethod
    def start(env_fn: Callable[[], Any], deadlines: Deadlines, restart: RestartPolicy) -> ActorHandle:
        """Starts an env's actor in the background."""
        return spawn(functools.partial(TianshouGuest, env_fn), deadlines=deadlines, restart=restart)

    def get_env_attr(self, key: str) -> Any:
        """Reads an attribute of the env, also one that wrappers hide; None where it has none."""
        try:
            return self.actor.get(key).result()
        except AttributeError:
            return None

    def set_env_attr(self, key: str, value: Any) -> None:
        """Writes an attribute of the innermost env."""
        self.actor.set(key, value).result()

    def send(self, action: Any, **kwargs: Any) -> None:
        """Starts a step, or a reset where the action is None; `recv` gives its result."""
        if action is not None:
            self._future = self.actor.call("step", action)
            return
        if "seed" in kwargs:
            super().seed(kwargs["seed"])
        self._future = self.actor.call("reset", **kwargs)

    def recv(self) -> Any:
        """Waits for what was sent last.

        Raises:
            Exception: What the env has raised.
        """
        assert self._future is not None, "recv() with nothing sent: call send(action) first"
        return self._future.result()

    def reset(self, **kwargs: Any) -> Any:
        """Resets the env and waits for it."""
        self.send(None, **kwargs)
        return self.recv()

    @staticmethod
    def wait(workers: list[ActorEnvWorker], wait_num: int, timeout: float | None = None) -> list[ActorEnvWorker]:
        """Waits until ``wait_num`` workers have a result, at most ``timeout`` seconds; gives all that have one.

        One whose env has failed is given alone, and only when no other has a result: its `recv` raises, and what was
        received together with it would be lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        futures = [worker._future for worker in workers if worker._future is not None]
        while sum(future.done() for future in futures) < min(wait_num, len(futures)):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            wait_for([future for future in futures if not future.done()], left, FIRST_COMPLETED)
        ready = [worker for worker in workers if worker._future is not None and worker._future.done()]
        fine = [worker for worker in ready if worker._future is not None and worker._future.exception() is None]
        return fine or ready[:1]

    def seed(self, seed: int | None = None) -> Any:
        """Seeds the env by its own ``seed``, or where it has none by a reset; and its action space."""
        super().seed(seed)
        return self.actor.call("envactors_seed", seed).result()

    def render(self, **kwargs: Any) -> Any:
        """The env's frame."""
        return self.actor.call("render", **kwargs).result()

    def close_env(self) -> None:
        """Takes in what is under way, closes the env and ends its process, within the close deadline."""
        self.actor.close()


class ActorVectorEnv(BaseVectorEnv):  # type: ignore[misc] # its module is checked nowhere
    """Steps many envs as one, each in an actor of its own, under tianshou's interface.

    Args:
        env_fns: One callable an env; run in the workers alone, which start side by side.
        wait_num: How many envs a step waits for; None: all.
        timeout: How long a step waits for them, in seconds; it returns at least one env's result.
        deadlines: How long things may take.
        restart: When a lost process is replaced.

    Raises:
        ActorStartError: An env could not be made.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 # frozen
        restart: RestartPolicy = RestartPolicy(max_restarts=3),  # noqa: B008 # frozen
    ) -> None:
        actors = iter([ActorEnvWorker.start(env_fn, deadlines, restart) for env_fn in env_fns])
        super().__init__(env_fns, lambda env_fn: ActorEnvWorker(env_fn, actor=next(actors)), wait_num, timeout)

    def step(self, action: Any, id: Any = None) -> Any:  # noqa: A002 # its name there
        """Steps envs, as there.

        Raises:
            Exception: What an env has raised; it can be reset, and the others go on.
        """
        try:
            return super().step(action, id)
        except Exception:
            # One that fails in `recv` is neither waiting nor ready there, and could never be asked again.
            self.ready_id += [i for i in range(self.env_num) if i not in {*self.ready_id, *self.waiting_id}]
            raise
