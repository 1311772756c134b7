"""Envs that the caller has registered with Gymnasium: a worker never runs the caller's main module, so they travel."""

from __future__ import annotations

import copy
import operator
import sys
import warnings
from typing import Any

from envactors.wire.pickling import dumps_by_value, loads

_OWN = ("gymnasium.", "shimmy.")
# The pickled form of each registration seen, with what it was made from: most are the same for every actor.
_known: dict[str, tuple[Any, bytes | None]] = {}


def collect() -> tuple[list[bytes], list[bytes]]:
    """Pickles what is registered with Gymnasium; nothing where Gymnasium is not in use.

    Returns:
        Those of the caller and of other packages, and those whose entry point is in Gymnasium itself: most of
        these a worker has anyway, but a script may have registered a variant.
    """
    registry: dict[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    foreign: list[bytes] = []
    own: list[bytes] = []
    for env_id, spec in registry.items():
        seen, data = _known.get(env_id, (None, None))
        if seen is not spec:
            data = _pickle(spec)
            _known[env_id] = spec, data
        if data is not None:
            (own if _home(spec).startswith(_OWN) else foreign).append(data)
    return foreign, own


def install(foreign: list[bytes], own: list[bytes]) -> None:
    """Registers what `collect` found, where this process has nothing under the same name.

    Gymnasium is imported for the first kind alone; call again once a factory has been loaded.
    """
    if not foreign and "gymnasium" not in sys.modules:
        return
    import gymnasium

    for data in (*foreign, *own):
        try:
            spec = loads(data)
        except Exception:  # noqa: S112 # one that cannot travel is missed only by a factory that asks for it
            continue
        gymnasium.registry.setdefault(spec.id, spec)
    # A package that registers its envs when a factory imports it says so once more for each of them.
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry", UserWarning)


def _home(spec: Any) -> str:
    entry_point = spec.entry_point
    return entry_point if isinstance(entry_point, str) else str(getattr(entry_point, "__module__", ""))


def _pickle(spec: Any) -> bytes | None:
    try:
        module, _, name = str(spec.entry_point).partition(":")
        if module == "__main__":
            # What the name stands for, in place of the name.
            spec = copy.copy(spec)
            spec.entry_point = operator.attrgetter(name)(sys.modules["__main__"])
        return dumps_by_value(spec)
    except Exception:
        return None
