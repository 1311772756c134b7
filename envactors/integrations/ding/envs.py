"""The base class of the DI-engine drop-ins: it starts the envs, and reads their attributes and calls their methods.

Steps and resets live in `envactors.integrations.ding.async_manager`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envactors.actor.handle import ActorHandle
from envactors.actor.spawn import spawn
from envactors.backends.base import Backend
from envactors.errors import ActorError
from envactors.integrations.access import VectorAccess
from envactors.integrations.adapter import adapted
from envactors.integrations.ding.adapter import DingEnvAdapter
from envactors.integrations.ding.states import require
from envactors.integrations.ding.values import PRELOAD, BaseEnvManager
from envactors.integrations.options import as_start_method, make_vector, preloading
from envactors.mailbox.factory import Factory, as_factories
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.options import VectorEnvVars
from envactors.vector_env import VectorEnv

# Entries of the configuration that are options of the vector.
_PASSED_ON = ("seed_episodes", "max_running", "recycle", "standbys", "snapshot", "name", "crash_dir")
# Methods of envs that DI-engine calls through the manager.
_METHODS = "reset", "step", "seed", "close", "enable_save_replay", "render", "reward_shaping", "enable_save_figure"


class Reference:
    """A proxy of an env that reads attributes and calls methods in its worker."""

    def __init__(self, handle: Callable[[], ActorHandle]) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_method, value = self._handle().call("envactors_inspect", name).result()
        return functools.partial(self._invoke, name) if is_method else value

    def _invoke(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._handle().call("envactors_invoke", name, *args, **kwargs).result()


class Envs(BaseEnvManager):
    """The envs of a manager; a base class.

    Args:
        env_fn: One callable per env; called only in the workers.
        cfg: The complete configuration of the manager.
    """

    def __init__(self, env_fn: Sequence[Factory], cfg: Mapping[str, Any]) -> None:
        self._closed = True
        self._cfg = cfg
        self._env_fn = as_factories(env_fn, "env_fn")
        self._env_num = len(self._env_fn)
        require(self._env_num > 0, "env_fn is empty: expected at least one callable")
        self._env_replay_path: Sequence[str | None] = [None] * self._env_num
        self._reset_inplace = cfg["reset_inplace"]
        self._step_timeout = cfg["step_timeout"]
        self._reset_timeout = cfg["reset_timeout"]
        self._connect_timeout = cfg["connect_timeout"]
        self._action_seed: int | None = None
        self._spaces: tuple[Any, ...] | None = None
        self._scout: ActorHandle | None = None
        self._vector: VectorEnv
        self._access: VectorAccess

    # State -----------------------------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """The number of envs."""
        return self._env_num

    @property
    def actors(self) -> list[ActorHandle]:
        """The handle of each process."""
        self._check_closed()
        return self._vector.actors

    @property
    def vector(self) -> VectorEnv:
        """The vector behind this manager, with handles of the envs (``vector[i]``) and ``stats()``."""
        self._check_closed()
        return self._vector

    @property
    def closed(self) -> bool:
        """True if the manager is closed or not launched yet."""
        return self._closed

    @property
    def observation_space(self) -> Any:
        """The observation space of env 0, read from its worker; None if the env has none."""
        return self._known_spaces()[0]

    @property
    def action_space(self) -> Any:
        """The action space of env 0, read from its worker; None if the env has none."""
        return self._known_spaces()[1]

    @property
    def reward_space(self) -> Any:
        """The reward space of env 0, read from its worker; None if the env has none."""
        return self._known_spaces()[2]

    def _known_spaces(self) -> tuple[Any, ...]:
        if self._spaces is None:
            self._spaces = self._first_env().call("envactors_spaces").result()
            self._seed_actions(self._action_seed)
        return self._spaces

    def _seed_actions(self, seed: int | None) -> None:
        """Seed the action space, now or as soon as it is known."""
        self._action_seed = seed
        if self._spaces is not None and seed is not None and hasattr(self._spaces[1], "seed"):
            self._spaces[1].seed(seed)

    @property
    def env_ref(self) -> Any:
        """A proxy of env 0. Before the launch, it starts a separate actor with such an env."""
        return Reference(self._first_env)

    @property
    def _env_ref(self) -> Any:
        return self.env_ref

    def _first_env(self) -> ActorHandle:
        if not self._closed:
            return self._vector.actors[0]
        if self._scout is None:
            factory = adapted(DingEnvAdapter, self._env_fn[0], False, False)
            variables = self._env_vars()
            self._scout = spawn(
                factory,
                deadlines=Deadlines(start=self._start_deadline()),
                backend=self._backend(),
                env_vars=variables[0] if isinstance(variables, Sequence) else variables,
            )
        return self._scout

    @property
    def method_name_list(self) -> list[str]:
        """The methods of the envs that can be called through the manager."""
        return list(_METHODS)

    def __getattr__(self, key: str) -> Any:
        """Read an attribute of all envs. For a method in `method_name_list`, return a function that calls it in all.

        Raises:
            AttributeError: An env lacks the attribute.
            RuntimeError: The attribute is a method that is not in `method_name_list`.
            AssertionError: The manager is closed.
        """
        if key.startswith("__") or key in ("_closed", "_vector", "_access"):
            raise AttributeError(key)
        self._check_closed()
        found = self._ask(range(self._env_num), "envactors_inspect", key)
        if not found[0][0]:
            return [value for _, value in found]
        if key not in self.method_name_list:
            raise RuntimeError(f"cannot call {key}, a method of the envs: add it to method_name_list first")
        return functools.partial(self._ask, range(self._env_num), "envactors_invoke", key)

    def reward_shaping(self, env_id: int, transitions: list[dict[str, Any]]) -> Any:
        """Return the result of an env's ``reward_shaping``."""
        return self._ask([env_id], "envactors_invoke", "reward_shaping", transitions)[0]

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Call an env's ``enable_save_figure``."""
        self._ask([env_id], "envactors_invoke", "enable_save_figure", figure_path)

    def _ask(self, env_ids: Iterable[int], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._vector.call(method, *args, env_ids=env_ids, **kwargs)

    def enable_save_replay(self, replay_path: list[str] | str) -> None:
        """Save replays after the next launch, to one path for all envs or to one path per env."""
        paths = [replay_path] * self._env_num if isinstance(replay_path, str) else list(replay_path)
        require(len(paths) == self._env_num, f"{len(paths)} paths for {self._env_num} envs: expected one per env")
        self._env_replay_path = paths

    # Starting and ending ---------------------------------------------------------------------------------

    def _start(self, restart: RestartPolicy) -> None:
        """Start the processes of the envs. The caller then sets ``_closed``.

        Args:
            restart: Limits for restarting processes.

        Raises:
            RuntimeError: An env could not be created.
            SpaceMismatchError: The envs' spaces differ, and shared memory is on.
        """
        limits = [limit for limit in (self._reset_timeout, self._connect_timeout) if limit is not None]
        self._close_scout()
        start = self._start_deadline()
        try:
            self._vector = make_vector(
                VectorEnv,
                type(self).__name__,
                self._factories(),
                {name: self._cfg[name] for name in _PASSED_ON},  # type: ignore[arg-type] # they are options
                {},
                autoreset="disabled",
                deadlines=Deadlines(start=start, step=self._step_timeout, reset=min(limits, default=None)),
                restart=restart,
                backend=self._backend(),
                copy=self._cfg["copy_on_get"],
                env_vars=self._env_vars(),
            )
        except ActorError as error:
            raise RuntimeError(f"cannot create an env: {error}") from error
        self._access = VectorAccess(self._vector)
        self._access.disable_reset_checks()

    def _factories(self) -> list[Factory]:
        """Return the factory of each env.

        Envs with the same factory and replay path get the same object, since standbys can only replace workers with
        the same factory.
        """
        made: dict[Any, Factory] = {}
        shared = bool(self._cfg["shared_memory"])
        return [
            made.setdefault((id(env_fn), path), adapted(DingEnvAdapter, env_fn, shared, self._reset_inplace, path))
            for env_fn, path in zip(self._env_fn, self._env_replay_path, strict=True)
        ]

    def _env_vars(self) -> VectorEnvVars:
        given = self._cfg["env_vars"]
        return dict(given) if isinstance(given, Mapping) else given  # an EasyDict is not a plain dict

    def _start_deadline(self) -> float | None:
        """Return the start deadline: at least 60 s, since importing torch may take longer than ``connect_timeout``."""
        return None if self._connect_timeout is None else max(self._connect_timeout, 60.0)

    def _backend(self) -> str | Backend:
        backend: str | Backend | None = self._cfg["backend"]
        if backend is not None:
            return backend
        return preloading(*PRELOAD, start_method=as_start_method(self._cfg["context"]))

    def close(self) -> None:
        """Close the envs and end their processes. Calling it again does nothing, and `launch` starts new envs."""
        self._close_scout()
        if not self._closed:
            self._closed = True
            self._vector.close()

    def _close_scout(self) -> None:
        if self._scout is not None:
            self._scout.close()
            self._scout = None

    def _check_closed(self) -> None:
        require(not self._closed, "the env manager is closed: launch it first")
