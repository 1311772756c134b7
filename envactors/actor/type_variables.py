"""The type variables of handles, futures, and pools.

Those of classes default to Any: in annotations, `ActorHandle` alone means ``ActorHandle[Any]``. Only type checkers know
about defaults and about several positional arguments, because `typing` has neither in Python 3.10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from typing_extensions import TypeVar, TypeVarTuple

    # The result of a call.
    R = TypeVar("R", default=Any)
    # The env of an actor.
    T_co = TypeVar("T_co", covariant=True, default=Any)
    # The positional arguments of a factory.
    Ts = TypeVarTuple("Ts")
else:
    from typing import TypeVar

    R = TypeVar("R")
    T_co = TypeVar("T_co", covariant=True)

# What a factory makes.
T = TypeVar("T")
# The parameters of a method, without ``self``.
P = ParamSpec("P")
# The item that `ActorPool.map` passes to a method.
Item = TypeVar("Item")
