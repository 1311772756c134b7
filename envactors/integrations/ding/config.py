"""The configuration of the DI-engine drop-ins: entries, defaults, and the options that do not apply to DI-engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envactors.errors import VectorInputError
from envactors.integrations.ding.states import require
from envactors.options import RestartPolicy
from envactors.process.starting import DEFAULT
from envactors.vector.options import check_names

CONFIG: dict[str, Any] = {
    "episode_num": float("inf"),
    "max_retry": 1,
    "retry_type": "reset",
    "retry_waiting_time": 0.1,
    "auto_reset": True,
    "step_timeout": None,
    "reset_timeout": None,
    "shared_memory": True,
    "copy_on_get": True,
    "context": DEFAULT,
    "wait_num": 2,
    "step_wait_timeout": 0.01,
    "connect_timeout": 60,
    "reset_inplace": False,
    "on_failure": "raise",
    "restart": RestartPolicy(max_restarts=10, backoff_max=5.0),
    "seed_episodes": False,
    "max_running": None,
    "recycle": None,
    "standbys": 0,
    "snapshot": None,
    "env_vars": None,
    "name": None,
    "crash_dir": None,
    "backend": None,
}

_REFUSED = {
    "envs_per_actor": "DI-engine resets and restarts each env separately",
    "autoreset": "DI-engine's name for it is auto_reset",
    "max_journal": "DI-engine does not support on_failure='replay', since its envs may begin an episode without a seed",
    "deadlines": "DI-engine's names for them are step_timeout, reset_timeout and connect_timeout",
    "copy": "DI-engine's name for it is copy_on_get",
}


def check_entries(whose: str, given: Mapping[str, Any]) -> None:
    """Raise unless every entry exists and applies to DI-engine.

    Args:
        whose: Class of the manager, for the error.
        given: The entries.

    Raises:
        TypeError: An entry does not exist.
        VectorInputError: An option does not apply to DI-engine.
    """
    check_names(whose, [name for name in given if name not in CONFIG], CONFIG)
    for name in given.keys() & _REFUSED.keys():
        raise VectorInputError(f"{whose} does not take {name}={given[name]!r}: {_REFUSED[name]}")


def check_values(cfg: Mapping[str, Any]) -> None:
    """Raise if the value of an entry is invalid.

    Raises:
        AssertionError: A value is invalid; DI-engine raises this type too.
    """
    for name, allowed in (("retry_type", ("reset", "renew")), ("on_failure", ("raise", "renew"))):
        require(cfg[name] in allowed, f"{name} is {cfg[name]!r}: expected one of {allowed}")
    if cfg["reset_inplace"]:
        require(cfg["auto_reset"], "reset_inplace=True with auto_reset=False: expected auto_reset=True")
        require(
            not cfg["seed_episodes"],
            "seed_episodes=True with reset_inplace=True: omit one of them, since envs that reset themselves take no "
            "seeds",
        )
