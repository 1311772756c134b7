"""The mutual authentication of a caller and an agent, before anything is unpickled.

    caller ── versions, epoch, a random number ───────────▶ agent
    caller ◀── another one, proof over both ──────────────── agent, or the reason of a refusal
    caller ── proof over both ────────────────────────────▶ agent
    caller ◀── facts about the node ──────────────────────── agent, or the reason of a refusal

Both sides prove that they know the secret. The messages are JSON of limited length. Both sides must have the same
release of envactors, minor version of Python, and major version of NumPy, since the formats of later messages and of
pickles depend on them.
"""

from __future__ import annotations

import hmac
import importlib
import json
import platform
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from typing import Any, Final

import numpy as np

from envactors.remote.streams import Stream

PROTOCOL: Final = 2
# How long each message may take, in seconds, and how long it may be, in bytes.
PATIENCE: Final = 10.0
_LONGEST = 1 << 14
_LENGTH = struct.Struct("<I")
_RUBBISH = "the peer did not send a greeting of envactors"
CLOSED: Final = "the peer has closed the connection in the middle of the greeting"


class GreetingError(Exception):
    """The peer is not the right one, or has refused this side."""


def new_secret() -> str:
    """Return a new secret: 32 random bytes, in hexadecimal digits."""
    return secrets.token_hex(32)


def greet(sock: Stream | socket.socket, secret: str, epoch: str) -> dict[str, Any]:
    """Greet an agent as its caller, and return its facts about the node.

    Raises:
        GreetingError: The agent does not know the secret, or refuses the caller.
        OSError: The connection is lost, or the agent takes too long.
    """
    sock.settimeout(PATIENCE)
    mine = secrets.token_hex(16)
    sock.sendall(frame({**_versions(), "epoch": epoch, "nonce": mine}))
    answer = _receive(sock)
    theirs = _text(answer, "nonce")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(secret, "agent", mine, theirs)):
        raise GreetingError("the agent does not know the secret of this cluster: is another program at its address?")
    sock.sendall(frame({"proof": _proof(secret, "caller", mine, theirs)}))
    node = _receive(sock).get("node")
    if not isinstance(node, dict):
        raise GreetingError(_RUBBISH)
    return node


def answer(
    secret: str, epoch: str, node: dict[str, Any], claim: Callable[[], bool]
) -> Generator[dict[str, Any] | None, dict[str, Any] | None, None]:
    """Answer a caller as an agent: yield the messages to send, and None to receive the next message.

    Args:
        secret: The secret that both sides must know.
        epoch: The epoch that both sides must belong to.
        node: The facts about the node that the caller gets.
        claim: Called once the caller has proved itself; returns False if there is another caller already.

    Raises:
        GreetingError: The caller was refused. It gets the reason.
    """
    greeting, mine = (yield None) or {}, secrets.token_hex(16)
    theirs = _text(greeting, "nonce")
    why = _describe_difference(greeting, epoch)
    if not why:
        yield {"nonce": mine, "proof": _proof(secret, "agent", theirs, mine)}
        proof = _text((yield None) or {}, "proof")
        if not hmac.compare_digest(proof, _proof(secret, "caller", theirs, mine)):
            why = "the caller does not know the secret of this agent"
        elif not claim():
            why = "this agent has a caller already"
    if why:
        yield {"refused": why}
        raise GreetingError(why)
    yield {"node": node}


def _describe_difference(greeting: dict[str, Any], epoch: str) -> str:
    """Return how a caller differs from this agent; an empty string if nothing relevant differs."""
    for what, mine in {**_versions(), "epoch": epoch}.items():
        theirs = greeting.get(what)
        if what == "envactors" and isinstance(theirs, str) and _release(theirs) == _release(mine):
            continue
        if theirs != mine:
            advice = ": install the same version on both sides" if what in ("envactors", "python", "numpy") else ""
            return f"the agent's {what} is {mine!r}, and the caller's is {theirs!r:.100}{advice}"
    return ""


def _versions() -> dict[str, Any]:
    python = ".".join(platform.python_version_tuple()[:2])
    # By name, since no module imports the package's root, which imports the modules.
    version = importlib.import_module("envactors").__version__
    return {"envactors": version, "protocol": PROTOCOL, "python": python, "numpy": np.__version__.partition(".")[0]}


def _release(version: str) -> list[str]:
    """Return major, minor, and patch number: different builds of one release are compatible."""
    return re.findall(r"\d+", version, re.ASCII)[:3]


def _proof(secret: str, who: str, callers: str, agents: str) -> str:
    return hmac.new(bytes.fromhex(secret), f"{who} {callers} {agents}".encode(), "sha256").hexdigest()


def frame(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def parse(data: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """Return the first message in some bytes, None if it is not complete, and the bytes after it.

    Raises:
        GreetingError: The bytes are not a message, or it says that this side was refused.
    """
    if len(data) < _LENGTH.size:
        return None, data
    (length,) = _LENGTH.unpack_from(data)
    if length > _LONGEST:
        raise GreetingError(_RUBBISH)
    end = _LENGTH.size + length
    if len(data) < end:
        return None, data
    try:
        message = json.loads(data[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:  # too many nested brackets
        raise GreetingError(_RUBBISH) from error
    if not isinstance(message, dict):
        raise GreetingError(_RUBBISH)
    if "refused" in message:
        raise GreetingError(" ".join(str(message["refused"]).split())[:500])  # it may be anything
    return message, data[end:]


def _receive(sock: Stream | socket.socket) -> dict[str, Any]:
    # For the whole message, so that a peer that sends single bytes takes no longer than a silent one.
    deadline = time.monotonic() + PATIENCE
    data = _read(sock, b"", _LENGTH.size, deadline)
    (length,) = _LENGTH.unpack(data)
    if length <= _LONGEST:  # else `parse` refuses it
        data = _read(sock, data, _LENGTH.size + length, deadline)
    message, _ = parse(data)
    assert message is not None, "it is complete"
    return message


def _text(message: dict[str, Any], field: str) -> str:
    """Return an ASCII field, which can be compared and encoded without another kind of error."""
    value = message.get(field)
    if not isinstance(value, str) or not value.isascii():
        raise GreetingError(_RUBBISH)
    return value


def _read(sock: Stream | socket.socket, data: bytes, length: int, deadline: float) -> bytes:
    """Read until ``data`` has this length, and nothing beyond, since records follow."""
    while len(data) < length:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        part = sock.recv(length - len(data))
        if not part:
            raise ConnectionError(CLOSED)
        data += part
    return data
