"""Send the caller's Gymnasium registrations to workers, which never run the caller's main module.

Gymnasium is not imported here before the caller or the worker's factory has imported it, or needs it.
"""

from __future__ import annotations

import copy
import operator
import sys
import warnings
from typing import Any

from envactors.mailbox.pickling import MAIN_NAMES, dumps_by_value, loads

# Prefixes of the entry points of envs that Gymnasium itself registers.
_OWN = ("gymnasium.", "shimmy.")
# env id: (registration, its pickle, None if it does not pickle). A cache, since most are the same for every actor.
_known: dict[str, tuple[Any, bytes | None]] = {}


def collect() -> tuple[list[bytes], list[bytes]]:
    """Pickle the registrations of Gymnasium; return empty lists if Gymnasium is not imported.

    Returns:
        The registrations of the caller and of other packages, and those whose entry point is in Gymnasium itself. A
        worker has most of the latter already, but a script may have registered a variant.
    """
    registry: dict[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    foreign: list[bytes] = []
    own: list[bytes] = []
    for env_id, spec in registry.items():
        if env_id not in _known or _known[env_id][0] is not spec:
            _known[env_id] = spec, _pickle(spec)
        data = _known[env_id][1]
        if data is not None:
            home = getattr(spec.entry_point, "__module__", spec.entry_point)
            (own if str(home).startswith(_OWN) else foreign).append(data)
    return foreign, own


def install(foreign: list[bytes], own: list[bytes]) -> None:
    """Add the registrations of `collect` whose names are not registered in this process.

    Gymnasium is imported only if there are foreign ones. Call this after a factory was loaded, which may import it.
    """
    if not foreign and "gymnasium" not in sys.modules:
        return
    try:
        import gymnasium
    except ImportError:
        return  # the caller has it, and the interpreter of the workers is another one

    for data in (*foreign, *own):
        try:
            spec = loads(data)
        except Exception:  # noqa: S112 # only a factory that makes this env needs it
            continue
        gymnasium.registry.setdefault(spec.id, spec)
    # Otherwise a package that registers its envs when a factory imports it would warn about each of them.
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry", UserWarning)


def _pickle(spec: Any) -> bytes | None:
    try:
        module, _, name = str(spec.entry_point).partition(":")
        if module in MAIN_NAMES:
            # The object itself in place of its name.
            spec = copy.copy(spec)
            spec.entry_point = operator.attrgetter(name)(sys.modules["__main__"])
        return dumps_by_value(spec)
    except Exception:
        return None
