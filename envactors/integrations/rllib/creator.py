"""`on_actors`: an env creator for RLlib that makes an ``ActorVectorEnv``.

RLlib calls it in each env runner; with ``gym_env_vectorize_mode="vector_entry_point"`` it takes the vector env as it
is. Nothing here imports Ray, so neither do the workers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium

from envactors.errors import VectorInputError
from envactors.integrations.gymnasium.vector_env import ActorVectorEnv
from envactors.integrations.options import check_options
from envactors.vector.options import CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = {"autoreset": "RLlib expects Gymnasium's autoreset in the next step"}
# The id under which an env runner registers the env creator with Gymnasium.
_RUNNERS_ID = "rllib-single-agent-env-v0"


def on_actors(
    env: str | Callable[[dict[str, Any]], Any], **options: Unpack[CommonOptions]
) -> Callable[[Mapping[str, Any]], gymnasium.vector.VectorEnv[Any, Any, Any]]:
    """Return an env creator for RLlib's ``register_env`` that makes each env of a runner in an actor.

    It needs ``config.env_runners(gym_env_vectorize_mode="vector_entry_point")``.

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
    check_options("on_actors", options, _REFUSED)
    options.setdefault("on_failure", "renew")
    return functools.partial(_make_vector, env, options)


def _make_vector(
    env: str | Callable[[dict[str, Any]], Any], options: CommonOptions, config: Mapping[str, Any]
) -> ActorVectorEnv:
    if "num_envs" not in config:
        raise VectorInputError(
            "on_actors makes a vector env, but RLlib asked for a single env: call "
            "config.env_runners(gym_env_vectorize_mode='vector_entry_point')"
        )
    env_config = {name: value for name, value in config.items() if name != "num_envs"}
    if isinstance(env, str):
        factory = functools.partial(gymnasium.make, env, **env_config)
    else:
        factory = functools.partial(env, env_config)
    with _hidden_registration():
        return ActorVectorEnv([factory] * config["num_envs"], **options)


@contextlib.contextmanager
def _hidden_registration() -> Iterator[None]:
    """Hide the env runner's own registration from the workers, which would import Ray and PyTorch to load it."""
    registration = gymnasium.registry.pop(_RUNNERS_ID, None)
    try:
        yield
    finally:
        if registration is not None:
            gymnasium.registry[_RUNNERS_ID] = registration
