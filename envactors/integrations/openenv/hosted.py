"""The worker's side: an OpenEnv environment, called with plain arguments, in an event loop that lasts as long as it.

Nothing here imports OpenEnv; the factory does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

# Where OpenEnv defines the asynchronous methods that only call the synchronous ones.
_BASE_MODULE = "openenv.core.env_server.interfaces"
# The methods whose signatures the server inspects.
INSPECTED = ("reset", "step")


class Description(NamedTuple):
    """What the server needs to know about a class of environments.

    Attributes:
        name: The name of the class.
        signatures: The signature of each method of `INSPECTED`, without annotations and defaults: those may not pickle.
        has_tools: Whether it serves MCP tools.
    """

    name: str
    signatures: dict[str, inspect.Signature]
    has_tools: bool


def describe_class(kind: type) -> Description:
    """Return what the server needs to know about a class of environments."""
    signatures = {}
    for method in INSPECTED:
        declared = inspect.signature(getattr(kind, async_name_of(kind, method) or method)).parameters.values()
        signatures[method] = inspect.Signature(
            [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None) for p in declared]
        )
    return Description(kind.__name__, signatures, hasattr(kind, "mcp_session"))


def async_name_of(kind: type, method: str) -> str | None:
    """Return the name of the asynchronous form of a method if the class defines one, None otherwise."""
    name = f"{method}_async"
    definer = next((base for base in kind.__mro__ if name in vars(base)), None)
    return None if definer is None or definer.__module__ == _BASE_MODULE else name


class Result(NamedTuple):
    """The return value of a call.

    Attributes:
        value: What the environment returned.
        state: Its state after the call; None if reading it raised.
        error: What reading the state raised.
    """

    value: Any
    state: Any
    error: Exception | None


class HostedEnvironment:
    """An environment in a worker.

    Args:
        factory: Makes the environment.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        # Made here, since some environments create objects of asyncio when they are made.
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._coroutines: asyncio.Queue[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._task = self._loop.create_task(self._run_all())
        self._env = factory()
        self._stack = contextlib.AsyncExitStack()
        self._is_connected = False

    def describe(self) -> Description:
        """Return what the server needs to know about the environment."""
        return describe_class(type(self._env))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Result:
        """Call ``reset`` or ``step``, in its asynchronous form if the environment defines one."""
        async_name = async_name_of(type(self._env), method)
        if async_name is None:
            return self._result(getattr(self._env, method)(*args, **kwargs))
        return self._result(self._run(self._call_connected(async_name, args, kwargs)))

    def read_state(self) -> Any:
        """Return the state of the environment."""
        return self._env.state

    def metadata(self) -> Any:
        """Return the metadata of the environment."""
        return self._env.get_metadata()

    def list_tools(self) -> Any:
        """Return the MCP tools of the environment."""
        return self._run(self._with_tools(lambda client: client.list_tools()))

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Result:
        """Call an MCP tool of the environment."""
        return self._result(self._run(self._with_tools(lambda client: client.call_tool(name, arguments))))

    def close(self) -> None:
        """Close the environment, and the connection to its tools."""
        try:
            self._run(self._stack.aclose())
        finally:
            self._env.close()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            self._loop.close()

    async def _call_connected(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an asynchronous method. Without a connection, each step that calls a tool would make one."""
        await self._connect()
        return await getattr(self._env, method)(*args, **kwargs)

    async def _with_tools(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Use the MCP client."""
        await self._connect()
        return await ask(self._env.mcp_client)

    async def _connect(self) -> None:
        """Connect the MCP client, if there is one, once, so that the tools keep the state of the session."""
        if not self._is_connected and hasattr(self._env, "mcp_session"):
            await self._stack.enter_async_context(self._env.mcp_session())
            self._is_connected = True

    def _result(self, value: Any) -> Result:
        try:
            return Result(value, self._env.state, None)
        except Exception as error:
            return Result(value, None, error)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        ended: asyncio.Future[Any] = self._loop.create_future()
        self._coroutines.put_nowait((coroutine, ended))
        return self._loop.run_until_complete(ended)

    async def _run_all(self) -> None:
        """Run all coroutines in one task: AnyIO, which the tools run on, ends its threads with the task that uses them.

        A task for each call would start a thread in each call of a tool, and could not leave what another has entered.
        """
        while True:
            coroutine, ended = await self._coroutines.get()
            try:
                ended.set_result(await coroutine)
            except BaseException as error:
                ended.set_exception(error)


def hosting(factory: Callable[[], Any]) -> Callable[[], HostedEnvironment]:
    """Return the factory of an actor for an environment."""
    return functools.partial(HostedEnvironment, factory)
