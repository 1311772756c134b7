"""Functions that `envactors.reruns.bundle` has workers run."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from typing import Any

from envactors.mailbox.messages import REQUESTS, Kind
from envactors.mailbox.pickling import content_of, loads
from envactors.worker.main import Server


def run_request(server: Server, kind: int, payload: bytes) -> Any:
    """Run a step or a reset, and return its result, so that it is pickled as well."""
    message = REQUESTS[kind](*loads(payload))
    hosted = server.host.hosted_envs[message.env]
    if kind == Kind.RESET:
        return hosted.reset(message.seed, content_of(message.options))
    return hosted.step(content_of(message.action), message.resets_within_step, message.next_seed)


def wait_for_start(server: Server) -> None:
    """Do nothing: the envs are made."""
    del server


class SkippedFactory:
    """Stands for the factory of another env of the same process, which is not made. Only the worker unpickles it."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return skip_factory, (self._pickled,)


def skip_factory(pickled: bytes) -> Callable[[], Any]:
    """Load a factory, for the modules that it imports, and return one of an empty env."""
    pickle.loads(pickled)
    return types.SimpleNamespace
