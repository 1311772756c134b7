"""`ActorEnvWorker` and `ActorVectorEnv`: tianshou's workers and vector envs on actors, one actor per env.

tianshou's base class keeps track of which workers are stepping. A worker keeps only the future of its last request.
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

from envactors.actor.bound import BoundToProcess
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.actor.spawn import next_name
from envactors.integrations.access import warn_of_interrupted
from envactors.integrations.adapter import adapted
from envactors.integrations.options import launch_each
from envactors.integrations.tianshou.adapter import TianshouEnvAdapter
from envactors.mailbox.factory import Factory, as_factories
from envactors.mailbox.messages import episode_seed
from envactors.vector.options import VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


_CALLS = "tianshou calls each env separately"
_REFUSED = {
    "envs_per_actor": f"{_CALLS}, and envs in one process would run one after the other",
    "autoreset": "tianshou's collectors reset envs themselves",
    "on_failure": f"{_CALLS}, and a failed call raises the error; reset the env then",
    "max_journal": f"{_CALLS}, and calls are not replayed",
    "recycle": f"{_CALLS}, and an actor does not know when an episode ends",
    "standbys": f"{_CALLS}, and actors do not share standbys",
    "copy": f"{_CALLS}, and results are always copies",
    "snapshot": f"{_CALLS}, and single actors do not take snapshots",
}
_OF_ONE = {**_REFUSED, "max_running": "a worker has one env. Pass it to ActorVectorEnv"}


def _launch(
    whose: str, env_fns: Sequence[Factory], options: VectorOptions, refused: Mapping[str, str]
) -> list[ActorHandle]:
    seeds_episodes = options.get("seed_episodes", False)
    factories = [adapted(TianshouEnvAdapter, env_fn, seeds_episodes) for env_fn in env_fns]
    return launch_each(whose, factories, [next_name() for _ in factories], options, refused)


class ActorEnvWorker(EnvWorker):  # type: ignore[misc] # mypy skips its module
    """One env in an actor, for ``BaseVectorEnv(env_fns, worker_fn=ActorEnvWorker)``.

    The caller receives the exception from an env unchanged, and the env remains usable. After a crash, the env needs a
    reset.

    Args:
        env_fn: Creates the env; called only in the worker.
        actor: The actor of the env, if it already exists.
        **options: See `envactors.VectorOptions`. With ``seed_episodes`` each reset gets a different seed, and `seed`
            starts again with episode 0.

    Attributes:
        future: The future of the last request; None before the first.

    Raises:
        ActorStartError: The env could not be created.
    """

    def __init__(
        self,
        env_fn: Factory,
        *,
        actor: ActorHandle | None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        seeds_episodes = options.get("seed_episodes", False)
        self.actor: ActorHandle[Any] = (
            _launch("ActorEnvWorker", [env_fn], options, _OF_ONE)[0] if actor is None else actor
        )
        self.future: ActorFuture | None = None
        self._seeds_episodes = seeds_episodes
        # The seed of episode 0, and the index of the next episode.
        self._root_seed, self._episode = int(np.random.SeedSequence().generate_state(1)[0]), 0
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
        if action is not None:
            self.future = self.actor.call("step", action)
            return
        if "seed" in kwargs:
            super().seed(kwargs["seed"])
        if self._seeds_episodes:
            kwargs["seed"] = self._next_seed(kwargs.get("seed"))
        self.future = self.actor.call("reset", **kwargs)

    def _next_seed(self, seed: int | None) -> int:
        """Return the seed of the episode that begins. A seed from the user starts again with episode 0."""
        if seed is not None:
            self._root_seed, self._episode = seed, 0
        episode, self._episode = self._episode, self._episode + 1
        return episode_seed(self._root_seed, episode) if episode else self._root_seed

    def recv(self) -> Any:
        """Return the result of the last `send`.

        Raises:
            Exception: The exception from the env.
        """
        assert self.future is not None, "cannot call recv(): nothing was sent. Call send(action) first"
        return self.future.result()

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
        if self._seeds_episodes:
            seed = self._next_seed(seed)
        return self.actor.call("envactors_seed", seed).result()

    def render(self, **kwargs: Any) -> Any:
        """Return a frame of the env."""
        return self.actor.call("render", **kwargs).result()

    def close_env(self) -> None:
        """Wait for the pending request, close the env, and end its process, within the close deadline."""
        self.actor.close()


class ActorVectorEnv(BoundToProcess, BaseVectorEnv):  # type: ignore[misc] # mypy skips its module
    """A vector env of tianshou whose envs run in one actor each.

    Args:
        env_fns: One callable per env; called only in the workers, which start in parallel.
        wait_num: Number of envs that a step waits for; None for all.
        timeout: How long a step waits for them, in seconds; it returns at least one result in any case.
        **options: See `envactors.VectorOptions`. Options about batches are rejected.

    Attributes:
        actors: The handle of each process.

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
        self.actors: list[ActorHandle[Any]] = _launch("ActorVectorEnv", env_fns, options, _REFUSED)
        actors = iter(self.actors)
        seed_episodes = options.get("seed_episodes", False)

        def make(env_fn: Factory) -> ActorEnvWorker:
            return ActorEnvWorker(env_fn, seed_episodes=seed_episodes, actor=next(actors))

        self._was_interrupted = False
        self.waiting_conn: list[ActorEnvWorker]
        self.waiting_id: list[int]
        super().__init__(env_fns, make, wait_num, timeout)

    def reset(self, env_id: Any = None, **kwargs: Any) -> Any:
        """Reset envs as ``BaseVectorEnv.reset`` does."""
        self._was_interrupted &= env_id is not None
        return super().reset(env_id, **kwargs)

    def step(self, action: Any, id: Any = None) -> Any:  # noqa: A002 # tianshou's name
        """Step envs as ``BaseVectorEnv.step`` does. If a step was interrupted before, discard its results and warn.

        Raises:
            Exception: The exception from an env. That env can be reset, and the others are not affected.
        """
        if self._was_interrupted:
            self._was_interrupted = False
            warn_of_interrupted(stacklevel=3)
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
            self.ready_id: list[int] = [i for i in range(self.env_num) if i not in self.waiting_id]
            raise
