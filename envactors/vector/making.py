"""`make_vec`: a vector of equal envs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from envactors.mailbox.factory import Factory, as_callable, make_gymnasium, names_callable
from envactors.vector.facade import VectorEnv
from envactors.vector.inputs import check_counts
from envactors.vector.options import VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


def make_vec(env: Factory, num_envs: int, **options: Unpack[VectorOptions]) -> VectorEnv:
    """Make a vector of equal envs.

    Args:
        env: An id of Gymnasium such as ``"CartPole-v1"`` or ``"module:MyEnv-v0"``, where the worker imports the module
            first; or a factory as for `spawn`: a callable, or ``"module:callable"``.
        num_envs: Number of envs.
        **options: See `VectorOptions`.

    Raises:
        TypeError: ``env`` is neither a string nor callable, or an option does not exist.
        VectorInputError: ``num_envs`` is not an int above 0, or an option is invalid.
        ActorStartError: An env could not be created, for example because Gymnasium does not know the id.
    """
    check_counts(1, num_envs=num_envs)
    if isinstance(env, str) and not names_callable(env):
        make: Factory = functools.partial(make_gymnasium, env)
    else:
        make = as_callable(env, "make_vec")
    return VectorEnv([make] * num_envs, **options)
