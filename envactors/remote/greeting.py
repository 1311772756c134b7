"""How a caller and an agent get to know each other: both prove that they know the secret, before anything is unpickled.

    caller ── versions, epoch, a random number ───────────▶ agent
    caller ◀── another one, proof over both ──────────────── agent, or a line that says why not
    caller ── proof over both ────────────────────────────▶ agent
    caller ◀── what the node is ──────────────────────────── agent, or a line that says why not

The messages are JSON of limited length.
"""

from __future__ import annotations

import hmac
import json
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

PROTOCOL: Final = 1
# How long each message may take, in seconds, and how long it may be, in bytes.
PATIENCE: Final = 10.0
_LONGEST = 1 << 14
_LENGTH = struct.Struct("<I")
_RUBBISH = "what came is no greeting of envactors"


class GreetingError(Exception):
    """The other side is not the right one, or says that this one is not."""


def new_secret() -> str:
    """Return a new secret: 32 random bytes, in hexadecimal digits."""
    return secrets.token_hex(32)


def greet(sock: socket.socket, secret: str, epoch: str) -> dict[str, Any]:
    """Greet an agent as its caller, and return what it says of its node.

    Raises:
        GreetingError: It does not know the secret, or refuses.
        OSError: The connection is lost, or the agent takes too long.
    """
    sock.settimeout(PATIENCE)
    mine = secrets.token_hex(16)
    _send(sock, {"protocol": PROTOCOL, "python": _python(), "epoch": epoch, "nonce": mine})
    answer = _receive(sock)
    theirs = _text(answer, "nonce")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(secret, "agent", mine, theirs)):
        raise GreetingError("the agent does not know the secret of this cluster: is another program at its address?")
    _send(sock, {"proof": _proof(secret, "caller", mine, theirs)})
    node = _receive(sock).get("node")
    if not isinstance(node, dict):
        raise GreetingError(_RUBBISH)
    return node


def answer_greeting(
    sock: socket.socket, secret: str, epoch: str, node: dict[str, Any], claim: Callable[[], bool] = lambda: True
) -> None:
    """Answer a caller as an agent.

    Args:
        sock: The connection.
        secret: What both are to know.
        epoch: What both are to belong to.
        node: What the caller is told of the node.
        claim: Called once it is the right one; returns False if there is another caller already.

    Raises:
        GreetingError: It is not the right one, and was told so if there is no harm in that.
        OSError: The connection is lost, or the caller takes too long.
    """
    sock.settimeout(PATIENCE)
    greeting, mine = _receive(sock), secrets.token_hex(16)
    theirs = _text(greeting, "nonce")
    for what, is_mine in (("protocol", PROTOCOL), ("python", _python()), ("epoch", epoch)):
        if greeting.get(what) != is_mine:
            refuse(sock, f"the agent's {what} is {is_mine!r}, and the caller's is {greeting.get(what)!r:.100}")
    _send(sock, {"nonce": mine, "proof": _proof(secret, "agent", theirs, mine)})
    if not hmac.compare_digest(_text(_receive(sock), "proof"), _proof(secret, "caller", theirs, mine)):
        refuse(sock, "the caller does not know the secret of this agent")
    if not claim():
        refuse(sock, "this agent has a caller already")
    _send(sock, {"node": node})


def refuse(sock: socket.socket, why: str) -> None:
    """Tell the other side why not.

    Raises:
        GreetingError: Always.
    """
    _send(sock, {"refused": why})
    raise GreetingError(why)


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _proof(secret: str, who: str, callers: str, agents: str) -> str:
    return hmac.new(bytes.fromhex(secret), f"{who} {callers} {agents}".encode(), "sha256").hexdigest()


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def _receive(sock: socket.socket) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if length > _LONGEST:
        raise GreetingError(_RUBBISH)
    try:
        message = json.loads(_read(sock, length, deadline))
    except (ValueError, RecursionError) as error:  # brackets without end nest too deeply
        raise GreetingError(_RUBBISH) from error
    if not isinstance(message, dict):
        raise GreetingError(_RUBBISH)
    if "refused" in message:
        raise GreetingError(" ".join(str(message["refused"]).split())[:500])  # a stranger may say anything
    return message


def _text(message: dict[str, Any], field: str) -> str:
    """Return a field in plain ASCII, all that can be compared or encoded without an error of another kind."""
    value = message.get(field)
    if not isinstance(value, str) or not value.isascii():
        raise GreetingError(_RUBBISH)
    return value


def _read(sock: socket.socket, length: int, deadline: float) -> bytes:
    text = b""
    while len(text) < length:
        # Of the whole message: a peer that sends a byte now and then takes no longer than one that is silent.
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        part = sock.recv(length - len(text))
        if not part:
            raise ConnectionError("the other side has closed the connection in the middle of the greeting")
        text += part
    return text
