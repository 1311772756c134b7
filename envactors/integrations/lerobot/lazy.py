"""`LazyActorVectorEnv`: the vector env of one task of LeRobot, whose actors start when they are first needed.

It has the methods that LeRobot's evaluation uses. What happens to other tasks when one fails is the matter of
`envactors.integrations.lerobot.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium

from envactors.integrations.adapter import adapter_factories
from envactors.integrations.gymnasium.vector_env import ActorVectorEnv
from envactors.integrations.options import check_options, preloading
from envactors.mailbox.factory import Factory
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.options import CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")

# LeRobot's module with the wrapper around each env. Importing it takes seconds: it imports PyTorch.
_WRAPPERS = "lerobot.envs.utils"

_REFUSED = {"autoreset": "LeRobot expects Gymnasium's autoreset in the next step"}


class _PrivateNames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reads the attributes that begin with an underscore, which actors keep private and LeRobot asks for."""

    def call_private(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self.get_wrapper_attr(name)
        return value(*args, **kwargs) if callable(value) else value


class LazyActorVectorEnv:
    """Vector env of one task for LeRobot's evaluation, with each env in an actor.

    The actors start at the first use and end with `close`, after which the next use starts new ones. No env is ever
    created in the caller's process, not even for its spaces. As with LeRobot's own vector envs, an env whose episode
    has ended repeats its last result until the next rollout.

    Args:
        env_fns: One callable per env; called only in the workers.
        **options: See `envactors.VectorOptions`. Unless given, the deadline for starting an env is 120 s, and a process
            is replaced once: one that hangs while it creates a renderer is killed, and the env gets another attempt.
            ``env_vars`` takes one mapping per process, such as its GPU.

    Attributes:
        num_envs: Number of envs.
        failure: The last exception that the envs raised; None if there was none.

    Raises:
        TypeError: An option does not exist, or ``env_fns`` is not a sequence of factories.
        VectorInputError: The option is ``autoreset``.
    """

    def __init__(self, env_fns: Sequence[Factory], **options: Unpack[CommonOptions]) -> None:
        check_options(type(self).__name__, options, _REFUSED)
        options.setdefault("backend", preloading(_WRAPPERS))
        options.setdefault("deadlines", Deadlines(start=120.0))
        options.setdefault("restart", RestartPolicy(max_restarts=1))
        self._factories = adapter_factories(_make_env, env_fns)
        self.num_envs: int = len(self._factories)
        self.failure: Exception | None = None
        self._options = options
        self._envs: ActorVectorEnv | None = None

    @property
    def unwrapped(self) -> LazyActorVectorEnv:
        return self

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the envs; starts the actors."""
        return self._recorded(lambda envs: envs.metadata)

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Observation space of one env; starts the actors."""
        return self._recorded(lambda envs: envs.single_observation_space)

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Action space of one env; starts the actors."""
        return self._recorded(lambda envs: envs.single_action_space)

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """The same as ``single_observation_space``, as in LeRobot."""
        return self.single_observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """The same as ``single_action_space``, as in LeRobot."""
        return self.single_action_space

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset all envs; see ``ActorVectorEnv.reset``."""
        return self._recorded(lambda envs: envs.reset(**kwargs))

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all envs; see ``ActorVectorEnv.step``."""
        return self._recorded(lambda envs: envs.step(actions))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute that is not a method; return one value per env."""
        if name.startswith("_"):
            return self._recorded(lambda envs: envs.call("call_private", name, args, kwargs))
        return self._recorded(lambda envs: envs.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute per env; a method is called."""
        return self.call(name)

    def close(self) -> None:
        """Close the envs and end their processes."""
        envs, self._envs = self._envs, None
        if envs is not None:
            envs.close()

    def _recorded(self, request: Callable[[ActorVectorEnv], _T]) -> _T:
        """Send a request to the envs, which start if they do not run, and record its exception."""
        try:
            if self._envs is None:
                self._envs = ActorVectorEnv(self._factories, **self._options)
            return request(self._envs)
        except Exception as error:
            self.failure = error
            raise


def _make_env(make: Callable[[], Any]) -> gymnasium.Env[Any, Any]:
    """Make an env in its worker."""
    from lerobot.envs.utils import freeze_after_episode_end

    return _PrivateNames(freeze_after_episode_end(make)())
