"""`on_actors`: an env creator for RLlib that makes an ``ActorVectorEnv``.

RLlib calls it in each env runner; with ``gym_env_vectorize_mode="vector_entry_point"`` it takes the vector env as it
is. Nothing here imports Ray, so neither do the workers. `envactors.integrations.rllib.multi_agent` takes the options
of an env creator for multi-agent envs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium

from envactors.errors import VectorInputError
from envactors.integrations.options import check_options
from envactors.integrations.rllib.single_agent import SingleAgentVectorEnv
from envactors.vector.options import CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

REFUSED = {"autoreset": "RLlib expects Gymnasium's autoreset in the next step"}
# The id under which an env runner registers the env creator with Gymnasium.
_RUNNERS_ID = "rllib-single-agent-env-v0"


@dataclasses.dataclass(frozen=True)
class EnvCreator:
    """An env creator that makes an ``ActorVectorEnv``, as `on_actors` returns it.

    Attributes:
        env: Id of a Gymnasium env, or an env creator for RLlib.
        options: See `envactors.VectorOptions`.
    """

    env: str | Callable[[dict[str, Any]], Any]
    options: CommonOptions

    def __call__(self, config: Mapping[str, Any]) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Make the vector env of an env runner.

        Args:
            config: The ``env_config``, and ``num_envs``.

        Raises:
            VectorInputError: ``num_envs`` is missing, since RLlib asks for a single env.
        """
        if "num_envs" not in config:
            raise VectorInputError(
                "on_actors makes a vector env, but RLlib asked for a single env: call "
                "config.env_runners(gym_env_vectorize_mode='vector_entry_point'), or for multi-agent envs "
                "config.env_runners(env_runner_cls=ActorMultiAgentEnvRunner)"
            )
        factory = self.factory({name: value for name, value in config.items() if name != "num_envs"})
        with _hidden_registration():
            return SingleAgentVectorEnv([factory] * config["num_envs"], **self.options)

    def factory(self, env_config: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the factory of an env with this ``env_config``."""
        if isinstance(self.env, str):
            return functools.partial(gymnasium.make, self.env, **env_config)
        return functools.partial(self.env, dict(env_config))


def on_actors(
    env: str | Callable[[dict[str, Any]], Any], **options: Unpack[CommonOptions]
) -> Callable[[Mapping[str, Any]], gymnasium.vector.VectorEnv[Any, Any, Any]]:
    """Return an env creator for RLlib's ``register_env`` that makes each env of a runner in an actor.

    It needs ``config.env_runners(gym_env_vectorize_mode="vector_entry_point")``, or for multi-agent envs
    ``config.env_runners(env_runner_cls=ActorMultiAgentEnvRunner)``.

    Args:
        env: Id of a Gymnasium env, or an env creator (a class or function) for RLlib. It is called once per env, in the
            workers only, with ``config.env_config`` as a plain dict; an id gets it as keyword arguments.
        **options: See `envactors.VectorOptions`. Unless given, ``on_failure`` is ``"renew"``: a crash truncates one
            env's episode, and the runner continues. With ``"raise"``, RLlib replaces all envs of the runner.

    Returns:
        The env creator.

    Raises:
        TypeError: ``env`` is neither a string nor callable, or an option does not exist.
        VectorInputError: The option is ``autoreset``.
    """
    if not isinstance(env, str) and not callable(env):
        raise TypeError(f"on_actors({env!r}): expected the id of a Gymnasium env or an env creator")
    check_options("on_actors", options, REFUSED)
    options.setdefault("on_failure", "renew")
    return EnvCreator(env, options)


@contextlib.contextmanager
def _hidden_registration() -> Iterator[None]:
    """Hide the env runner's own registration from the workers, which would import Ray and PyTorch to load it."""
    registration = gymnasium.registry.pop(_RUNNERS_ID, None)
    try:
        yield
    finally:
        if registration is not None:
            gymnasium.registry[_RUNNERS_ID] = registration
