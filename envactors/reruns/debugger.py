"""Running the inputs of a bundle in this process, and stopping in pdb before the last request."""

from __future__ import annotations

import os
import pdb
import traceback
from collections.abc import Callable
from typing import Any

from envactors.mailbox.control_page import ControlPage, page_size
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import REQUESTS, Kind
from envactors.mailbox.pickling import content_of, loads
from envactors.reruns.bundle import Bundle
from envactors.worker.host import find
from envactors.worker.main import Server


def debug(bundle: Bundle, env: Factory | None = None) -> None:
    """Run the inputs in this process; stop in pdb at the first line of the request that failed.

    Args:
        bundle: The bundle.
        env: Makes the env in place of the factory.

    Raises:
        ValueError: The inputs begin in the middle, or lack the request that failed.
    """
    bundle.check_complete()
    os.environ.update(bundle.inputs.env_vars)
    start = bundle.start(env)
    page: Any = ControlPage(bytearray(page_size(len(start.factories))), None, None)  # type: ignore[arg-type] # nobody rings
    server = Server(None, page, send=lambda _frame: None)  # type: ignore[arg-type] # nothing is sent
    if bundle.report["method"] == "start":
        _stop_in(server.host.start, start, 0, lambda _count: None)
        return
    server.host.start(start, 0, lambda _count: None)
    if bundle.inputs.journal is not None:
        server.host.replay(*loads(bundle.inputs.journal))
    if bundle.inputs.request is None:
        print("no request was running")
        return
    kind, payload = bundle.inputs.request
    message = REQUESTS[kind](*loads(payload))
    target = server.host.hosted_envs[message.env].env
    if kind == Kind.STEP:
        _stop_in(target.step, content_of(message.action))
    elif kind == Kind.RESET:
        given = {"seed": message.seed, "options": content_of(message.options)}
        _stop_in(target.reset, **{name: value for name, value in given.items() if value is not None})
    elif kind == Kind.CALL:
        _stop_in(find(target, message.method), *message.args, **message.kwargs)
    else:
        _stop_in(server.execute, kind, payload)


def _stop_in(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    debugger = pdb.Pdb(nosigint=True)  # without a signal handler
    try:
        debugger.runcall(function, *args, **kwargs)
    except Exception:
        traceback.print_exc()
