"""Environments as actors: processes whose methods return futures, and a vector facade over them.

This module defines nothing itself: it imports each public name from its module on first use. ``import envactors``
therefore takes almost no time, and workers never import the code that only the parent needs.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future as Future
    from concurrent.futures import as_completed as as_completed
    from concurrent.futures import wait as wait

    from envactors.actor.awaiting import as_completed_async as as_completed_async
    from envactors.actor.future import ActorFuture as ActorFuture
    from envactors.actor.handle import ActorHandle as ActorHandle
    from envactors.actor.launch import spawn as spawn
    from envactors.actor.pool import ActorPool as ActorPool
    from envactors.actor.states import ActorState as ActorState
    from envactors.actor.states import ActorStats as ActorStats
    from envactors.backends.local import InlineBackend as InlineBackend
    from envactors.backends.local import ThreadBackend as ThreadBackend
    from envactors.backends.process import ProcessBackend as ProcessBackend
    from envactors.errors import ActorClosedError as ActorClosedError
    from envactors.errors import ActorDiedError as ActorDiedError
    from envactors.errors import ActorError as ActorError
    from envactors.errors import ActorStartError as ActorStartError
    from envactors.errors import ActorTimeoutError as ActorTimeoutError
    from envactors.errors import AlreadyPendingError as AlreadyPendingError
    from envactors.errors import EnvActorsError as EnvActorsError
    from envactors.errors import NodeLostError as NodeLostError
    from envactors.errors import NothingPendingError as NothingPendingError
    from envactors.errors import RemoteTraceback as RemoteTraceback
    from envactors.errors import RestartsExhaustedError as RestartsExhaustedError
    from envactors.errors import SerializationError as SerializationError
    from envactors.errors import SpaceMismatchError as SpaceMismatchError
    from envactors.errors import VectorEnvError as VectorEnvError
    from envactors.errors import VectorInputError as VectorInputError
    from envactors.errors import VectorStepError as VectorStepError
    from envactors.errors import VectorTimeoutError as VectorTimeoutError
    from envactors.mailbox.specs import ArraySpec as ArraySpec
    from envactors.observe.monitor import monitor as monitor
    from envactors.observe.trace import trace as trace
    from envactors.options import Deadlines as Deadlines
    from envactors.options import RecyclePolicy as RecyclePolicy
    from envactors.options import RestartPolicy as RestartPolicy
    from envactors.options import SnapshotPolicy as SnapshotPolicy
    from envactors.remote.backend import RemoteBackend as RemoteBackend
    from envactors.rollout.context import PolicyContext as PolicyContext
    from envactors.rollout.results import Evaluation as Evaluation
    from envactors.rollout.results import Rollout as Rollout
    from envactors.sessions.outcomes import Completed as Completed
    from envactors.sessions.outcomes import Failed as Failed
    from envactors.sessions.pool import SessionPool as SessionPool
    from envactors.sessions.statistics import SessionStats as SessionStats
    from envactors.tuning.tuner import Tuning as Tuning
    from envactors.tuning.tuner import tune as tune
    from envactors.vector.facade import VectorEnv as VectorEnv
    from envactors.vector.making import make_vec as make_vec
    from envactors.vector.options import VectorOptions as VectorOptions
    from envactors.vector.results import Batch as Batch
    from envactors.vector.results import EnvStep as EnvStep
    from envactors.vector.statistics import VectorStats as VectorStats
    from envactors.worker.context import ActorContext as ActorContext
    from envactors.worker.context import current_actor as current_actor

# The public names that each module defines.
_HOMES = {
    "concurrent.futures": "Future as_completed wait",
    "envactors.actor.awaiting": "as_completed_async",
    "envactors.actor.future": "ActorFuture",
    "envactors.actor.handle": "ActorHandle",
    "envactors.actor.launch": "spawn",
    "envactors.actor.pool": "ActorPool",
    "envactors.actor.states": "ActorState ActorStats",
    "envactors.mailbox.specs": "ArraySpec",
    "envactors.backends.local": "InlineBackend ThreadBackend",
    "envactors.backends.process": "ProcessBackend",
    "envactors.errors": (
        "ActorClosedError ActorDiedError ActorError ActorStartError ActorTimeoutError AlreadyPendingError "
        "EnvActorsError NodeLostError NothingPendingError RemoteTraceback RestartsExhaustedError SerializationError "
        "SpaceMismatchError VectorEnvError VectorInputError VectorStepError VectorTimeoutError"
    ),
    "envactors.observe.monitor": "monitor",
    "envactors.observe.trace": "trace",
    "envactors.options": "Deadlines RecyclePolicy RestartPolicy SnapshotPolicy",
    "envactors.remote.backend": "RemoteBackend",
    "envactors.rollout.context": "PolicyContext",
    "envactors.rollout.results": "Evaluation Rollout",
    "envactors.sessions.outcomes": "Completed Failed",
    "envactors.sessions.pool": "SessionPool",
    "envactors.sessions.statistics": "SessionStats",
    "envactors.tuning.tuner": "Tuning tune",
    "envactors.vector.facade": "VectorEnv",
    "envactors.vector.making": "make_vec",
    "envactors.vector.options": "VectorOptions",
    "envactors.vector.results": "Batch EnvStep",
    "envactors.vector.statistics": "VectorStats",
    "envactors.worker.context": "ActorContext current_actor",
}
# The new name of each deprecated one.
_OLD_NAMES = {"Snapshot": "SnapshotPolicy"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__version__ = "0.2.0"
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 # one list of names, not two


# A type checker that saw `__getattr__` would accept any attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _OLD_NAMES:
            from envactors.deprecations import warn_deprecated

            warn_deprecated(f"envactors.{name} was renamed: use envactors.{_OLD_NAMES[name]} instead")
            return getattr(sys.modules[__name__], _OLD_NAMES[name])
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'envactors' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
