"""The caller's side: the class that an OpenEnv server makes one instance of for each session."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, get_type_hints

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

from envactors.actor.future import BoundToProcess
from envactors.errors import ActorClosedError
from envactors.integrations.openenv.hosted import Description, HostedEnvironment, Result, describe_class, hosting
from envactors.integrations.shared_pool import SharedPool
from envactors.sessions.lease import Lease
from envactors.sessions.outcomes import Failed
from envactors.sessions.session import Session, fatal_error_of


class ActorEnvironment(BoundToProcess, Environment[Any, Any, Any]):  # type: ignore[misc] # it is typed where OpenEnv is installed
    """An OpenEnv environment that lives in an actor; see `on_actors`, which makes a subclass of it.

    The actor is leased at the first call. After a failure calls raise, and ``reset`` leases another actor.
    """

    SUPPORTS_CONCURRENT_SESSIONS: bool = True
    shared: ClassVar[SharedPool]
    description: ClassVar[Description]

    def __init__(self) -> None:
        super().__init__()
        self._lease: Lease[HostedEnvironment] | None = None
        self._session: Session[HostedEnvironment] | None = None
        # Gives the actor back if nobody closes the environment: a server whose task is cancelled drops it.
        self._finalizer: weakref.finalize[Any, ActorEnvironment] | None = None
        self._last: Result | None = None
        self._is_closed = False

    # Calls -----------------------------------------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Reset the environment; lease an actor if there is none, or if the one before has failed."""
        self._drop_failed()
        return self._take(self._enter().call("call", "reset", *args, **kwargs).result())

    async def reset_async(self, *args: Any, **kwargs: Any) -> Any:
        """Reset the environment, like `reset`."""
        self._drop_failed()
        return self._take(await (await self._enter_async()).call("call", "reset", *args, **kwargs))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        return self._take(self._enter().call("call", "step", *args, **kwargs).result())

    async def step_async(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        return self._take(await (await self._enter_async()).call("call", "step", *args, **kwargs))

    @property
    def state(self) -> Any:
        """The state after the last call; before the first one, that of a new environment.

        The server reads it in its event loop, so it waits for no actor of the pool.
        """
        if self._last is None:
            return self._ask("read_state")
        if self._last.error is not None:
            raise self._last.error
        return self._last.state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the metadata of the environment."""
        metadata: EnvironmentMetadata = self._ask("metadata")
        return metadata

    def close(self) -> None:
        """Give the actor back; its process is replaced, whatever it is doing."""
        self._is_closed = True
        self._give_back()

    def _ask(self, question: str) -> Any:
        self._check_open()
        return self.shared.ask(question)

    # The lease -------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        if self._lease is not None and self._session is not None:
            self._lease.__exit__(None, None, None)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._lease = self._session = self._last = None

    def _enter(self) -> Session[HostedEnvironment]:
        if self._session is None:
            self._session = self._make_lease().__enter__()
        return self._session

    async def _enter_async(self) -> Session[HostedEnvironment]:
        if self._session is None:
            self._session = await self._make_lease().__aenter__()
        return self._session

    def _check_open(self) -> None:
        if self._is_closed:
            raise ActorClosedError(f"this {self.description.name} is closed: make another")

    def _make_lease(self) -> Lease[HostedEnvironment]:
        self._check_open()
        self._lease = self.shared.lease(self.description.name)
        dropped = concurrent.futures.CancelledError("the environment was dropped, and nobody has closed it")
        self._finalizer = weakref.finalize(self, self._lease.cancel, dropped)
        self._finalizer.atexit = False
        return self._lease

    def _drop_failed(self) -> None:
        """Give the actor back if its session has failed."""
        session = self._session
        if session is not None and (fatal_error_of(session) is not None or isinstance(session.outcome, Failed)):
            self._give_back()

    def _take(self, result: Result) -> Any:
        self._last = result
        return result.value


class ToolClient:
    """The part of an environment's MCP client that a server uses. It is always connected, since the worker's is.

    Args:
        enter: Returns the session that the calls go to.
        take: Is given the result of a call, and returns its value.
    """

    def __init__(
        self, enter: Callable[[], Awaitable[Session[HostedEnvironment]]], take: Callable[[Result], Any]
    ) -> None:
        self._enter = enter
        self._take = take

    def is_connected(self) -> bool:
        """Return whether calls can be made without entering the client."""
        return True

    async def list_tools(self) -> Any:
        """Return the tools."""
        return await (await self._enter()).list_tools()

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Call a tool."""
        return self._take(await (await self._enter()).call_tool(name, arguments or {}))

    async def __aenter__(self) -> ToolClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


class ActorToolEnvironment(ActorEnvironment):
    """An `ActorEnvironment` that serves MCP tools."""

    mcp_server = None

    @property
    def mcp_client(self) -> ToolClient | None:
        """The client; None once the environment is closed. It refers to the environment, which is why none is kept."""
        return None if self._is_closed else ToolClient(self._enter_async, self._take)

    @contextlib.asynccontextmanager
    async def mcp_session(self) -> AsyncIterator[ToolClient]:
        """Return the client; the connection lasts as long as the session."""
        client = self.mcp_client
        if client is None:
            raise RuntimeError("cannot use the tools of this environment: it is closed")
        yield client


def on_actors(factory: Callable[[], Any], size: int, **pool_options: Any) -> type[ActorEnvironment]:
    """Return an environment factory for OpenEnv's ``create_app`` that gives each session its own process.

    A crash, a hang, or a leak of one environment ends one session with a protocol error, and the server lives::

        app = create_app(on_actors(EchoEnvironment, 64), EchoAction, EchoObservation, max_concurrent_envs=64)

    The actors are started when the first session needs one. Set deadlines, ``on_actors(..., deadlines=30.0)``: without
    them a call that hangs is ended only when its client disconnects.

    Args:
        factory: Makes an environment, in the worker: its class, or any callable without arguments. Unless it is a
            class, or its return annotation is one, the first environment is made at once, to learn its methods.
        size: How many sessions run at a time; what ``max_concurrent_envs`` is.
        **pool_options: Options of `envactors.SessionPool`.

    Returns:
        A subclass of OpenEnv's ``Environment`` with the methods' signatures of the environment. Its ``shared``
        pool has ``get()`` for statistics and ``close()``.

    Raises:
        TypeError: ``factory`` cannot be called.
        ActorStartError: The first environment could not be made.
    """
    if not callable(factory):
        raise TypeError(f"on_actors({factory!r}): expected the class of an environment, or a function that makes one")
    shared = SharedPool(hosting(factory), size, _module_of(factory), pool_options)
    kind = _class_made_by(factory)
    if kind is None:
        description: Description = shared.ask("describe")
    else:
        description = describe_class(kind)
    base = ActorToolEnvironment if description.has_tools else ActorEnvironment
    methods = {}
    for method, signature in description.signatures.items():
        for name in (method, f"{method}_async"):
            methods[name] = _with_signature(getattr(base, name), signature)
    attributes = {"shared": shared, "description": description, "__doc__": base.__doc__, **methods}
    return type(description.name, (base,), attributes)


def _module_of(factory: Callable[[], Any]) -> str:
    """Return the module to preload: the factory's, or OpenEnv's own if workers cannot import that."""
    module = getattr(factory.func if isinstance(factory, functools.partial) else factory, "__module__", "__main__")
    return Environment.__module__ if module == "__main__" else module


def _class_made_by(factory: Callable[[], Any]) -> type | None:
    """Return the class that a factory makes instances of, None if only calling it could tell."""
    made = factory.func if isinstance(factory, functools.partial) else factory
    if inspect.isfunction(made):
        try:
            made = get_type_hints(made).get("return", made)
        except Exception:  # an annotation that cannot be evaluated says nothing
            return None
    return made if inspect.isclass(made) and issubclass(made, Environment) and not inspect.isabstract(made) else None


def _with_signature(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Wrap a function so that `inspect.signature` reports another signature."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined] # what `inspect` looks for
    return call
