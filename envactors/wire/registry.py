"""Envs that the caller has registered with Gymnasium: a worker never runs the caller's main module, so they travel."""

from __future__ import annotations

import copy
import operator
import sys
from typing import Any

from envactors.wire.pickling import dumps_by_value, loads


def collect() -> list[bytes]:
    """Pickles every registration that a fresh Gymnasium would not have; none where Gymnasium is not in use."""
    registry: dict[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    pickled = []
    for spec in registry.values():
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."):
            continue
        try:
            pickled.append(dumps_by_value(_resolved(spec)))
        except Exception:  # noqa: S112 # one that cannot travel is missed only by a factory that asks for it
            continue
    return pickled


def _resolved(spec: Any) -> Any:
    """A registration that names something in ``__main__`` gets that something in place of the name."""
    module, _, name = str(spec.entry_point).partition(":")
    if module != "__main__":
        return spec
    spec = copy.copy(spec)
    spec.entry_point = operator.attrgetter(name)(sys.modules["__main__"])
    return spec


def install(pickled: list[bytes]) -> None:
    """Registers what `collect` found, where this process has nothing under the same name."""
    if not pickled:
        return
    import gymnasium

    for data in pickled:
        try:
            spec = loads(data)
        except Exception:  # noqa: S112 # as above
            continue
        gymnasium.registry.setdefault(spec.id, spec)
