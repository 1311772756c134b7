"""Caller and agent get to know each other: nothing of a stranger is unpickled, and each is told why not."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading

import pytest
from helpers import SOON

from envactors.remote import greeting
from envactors.remote.greeting import GreetingError, answer_greeting, greet, new_secret

SECRET, EPOCH = new_secret(), "epoch-1"
NODE = {"stamp": 1.5}


@contextlib.contextmanager
def agent(secret=SECRET, epoch=EPOCH):
    """An agent's half in a thread; yields the caller's socket and what the agent has to say in the end."""
    ours, theirs = socket.socketpair()
    said = []

    def answer():
        with theirs:
            try:
                answer_greeting(theirs, secret, epoch, NODE)
                said.append("welcome")
            except (GreetingError, OSError) as error:
                said.append(str(error))

    thread = threading.Thread(target=answer)
    thread.start()
    with ours:
        yield ours, said
    thread.join(SOON)


def test_both_know_the_secret():
    with agent() as (sock, said):
        assert greet(sock, SECRET, EPOCH) == NODE
    assert said == ["welcome"]


def test_a_caller_without_the_secret_is_refused():
    with agent() as (sock, said), pytest.raises(GreetingError, match="does not know the secret"):
        greet(sock, new_secret(), EPOCH)
    assert "welcome" not in said


def test_a_caller_that_proves_nothing_is_refused():
    with agent() as (sock, said):
        greeting._send(
            sock, {"protocol": greeting.PROTOCOL, "python": greeting._python(), "epoch": EPOCH, "nonce": "x"}
        )
        assert greeting._receive(sock)["nonce"]
        greeting._send(sock, {"proof": "00"})
        with pytest.raises(GreetingError, match="the caller does not know the secret of this agent"):
            greeting._receive(sock)
    assert said == ["the caller does not know the secret of this agent"]


def test_an_agents_proof_is_not_the_callers():
    """Otherwise a caller could hand the agent's own proof back to it."""
    with agent() as (sock, said):
        greeting._send(
            sock, {"protocol": greeting.PROTOCOL, "python": greeting._python(), "epoch": EPOCH, "nonce": "x"}
        )
        greeting._send(sock, {"proof": greeting._receive(sock)["proof"]})
        with pytest.raises(GreetingError):
            greeting._receive(sock)
    assert said != ["welcome"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("epoch", "epoch-0", "the agent's epoch is 'epoch-1', and the caller's is 'epoch-0'"),
        ("protocol", 999, "the agent's protocol is 1, and the caller's is 999"),
        ("python", "2.7", "and the caller's is '2.7'"),
    ],
)
def test_what_does_not_fit_is_named(field, value, text):
    with agent() as (sock, said):
        message = {"protocol": greeting.PROTOCOL, "python": greeting._python(), "epoch": EPOCH, "nonce": "x"}
        greeting._send(sock, {**message, field: value})
        with pytest.raises(GreetingError, match=text):
            greeting._receive(sock)
    assert text in said[0]


class Bomb:
    def __reduce__(self):
        return exit, (7,)


@pytest.mark.parametrize(
    "rubbish",
    [
        pickle.dumps(Bomb()),
        struct.pack("<I", 20) + pickle.dumps(Bomb())[:20].ljust(20, b"."),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 2) + b"[]",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["pickle", "framed pickle", "too long", "no dict", "another protocol", "nothing"],
)
def test_rubbish_is_refused_and_never_unpickled(rubbish):
    with agent() as (sock, said):
        sock.sendall(rubbish)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(SOON)
        with contextlib.suppress(ConnectionResetError):  # it need not have read all of it
            while sock.recv(1024):
                pass
    assert len(said) == 1
    assert said != ["welcome"]


def test_a_peer_that_says_nothing_holds_nobody_up_for_ever(monkeypatch):
    monkeypatch.setattr(greeting, "PATIENCE", 0.2)
    with agent() as (sock, said):
        assert sock.recv(1) == b""
    assert "timed out" in said[0]


def test_a_stranger_at_the_agents_address_is_found_out():
    ours, theirs = socket.socketpair()

    def pretend():
        with theirs:
            greeting._receive(theirs)
            text = json.dumps({"nonce": "y", "proof": "0" * 64}).encode()
            theirs.sendall(struct.pack("<I", len(text)) + text)

    thread = threading.Thread(target=pretend)
    thread.start()
    with ours, pytest.raises(GreetingError, match="is another program at its address"):
        greet(ours, SECRET, EPOCH)
    thread.join(SOON)
