"""Caller and agent authenticate each other: nothing from a stranger is unpickled, and each side learns why."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import socket
import struct
import threading
import time

import pytest
from budget import examples
from helpers import SOON, Counter, promised
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.remote import LocalNodes, greeting
from envactors.remote.greeting import GreetingError, greet, new_secret
from envactors.remote.launching import NodeAddress, connect
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent

SECRET, EPOCH = new_secret(), "epoch-1"
NODE = {"pid": 1}


def answer_greeting(sock, secret, epoch, node, claim=lambda: True):
    """Answer a caller as an agent, on a socket that blocks."""
    sock.settimeout(greeting.PATIENCE)
    said = None
    conversation = greeting.answer(secret, epoch, node, claim)
    with contextlib.suppress(StopIteration):
        while True:
            to_say = conversation.send(said)
            said = None
            if to_say is None:
                said = greeting._receive(sock)
            else:
                sock.sendall(greeting.frame(to_say))


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


def test_a_caller_without_the_secret_is_rejected():
    with agent() as (sock, said), pytest.raises(GreetingError, match="does not know the secret"):
        greet(sock, new_secret(), EPOCH)
    assert "welcome" not in said


def test_a_caller_without_a_proof_is_rejected():
    with agent() as (sock, said):
        sock.sendall(hello())
        assert greeting._receive(sock)["nonce"]
        sock.sendall(greeting.frame({"proof": "00"}))
        with pytest.raises(GreetingError, match="the caller does not know the secret of this agent"):
            greeting._receive(sock)
    assert said == ["the caller does not know the secret of this agent"]


def test_an_agents_proof_is_not_the_callers():
    """Otherwise a caller could hand the agent's own proof back to it."""
    with agent() as (sock, said):
        sock.sendall(hello())
        sock.sendall(greeting.frame({"proof": greeting._receive(sock)["proof"]}))
        with pytest.raises(GreetingError):
            greeting._receive(sock)
    assert said != ["welcome"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("epoch", "epoch-0", "the agent's epoch is 'epoch-1', and the caller's is 'epoch-0'"),
        ("protocol", 999, f"the agent's protocol is {greeting.PROTOCOL}, and the caller's is 999"),
        ("python", "2.7", "and the caller's is '2.7'"),
        ("numpy", "0", "and the caller's is '0': install the same version on both sides"),
    ],
)
def test_an_agent_names_the_field_of_the_greeting_that_does_not_match(field, value, text):
    with agent() as (sock, said):
        sock.sendall(hello(**{field: value}))
        with pytest.raises(GreetingError, match=text):
            greeting._receive(sock)
    assert text in said[0]


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path="/nowhere/at/all"):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def framed(text):
    return struct.pack("<I", len(text)) + text


def hello(**changes):
    message = {**greeting._versions(), "epoch": EPOCH, "nonce": "x"}
    return framed(json.dumps({**message, **changes}).encode())


RUBBISH = {
    "pickle": pickle.dumps(Bomb()),
    "framed pickle": framed(pickle.dumps(Bomb())),
    "too long": struct.pack("<I", 1 << 31),
    "no dict": framed(b"[]"),
    "no text": framed(b"\xff\xfe\x00"),
    "nested too deeply": framed(b"[" * (1 << 14)),
    "a long number": framed(b'{"nonce": ' + b"9" * 10_000 + b"}"),
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "half a length": b"\0\0",
    "half a message": hello()[:40],
    "no nonce": hello(nonce=None),
    "a nonce that is no ASCII": hello(nonce="\xe9"),
    "a nonce that is no text": hello(nonce="\ud800"),
    "no proof": hello() + framed(b"{}"),
    "a proof that is no ASCII": hello() + framed(b'{"proof": "\\u00e9"}'),
    "another epoch": hello(epoch="x" * 10_000),
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_garbage_is_rejected_and_never_unpickled(rubbish):
    with agent() as (sock, said):
        sock.sendall(rubbish)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(SOON)
        with contextlib.suppress(ConnectionResetError):  # it need not have read all of it
            while sock.recv(1024):
                pass
    assert len(said) == 1
    assert said != ["welcome"]
    assert len(said[0]) < 300
    assert "\n" not in said[0]


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_a_caller_that_receives_garbage_raises_and_unpickles_nothing(rubbish):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(rubbish)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((GreetingError, ConnectionError)) as said:
            greet(ours, SECRET, EPOCH)
    assert "\n" not in str(said.value)


texts = st.text(st.characters(), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["protocol", "python", "epoch", "nonce", "proof", "node", "refused"])
right = st.fixed_dictionaries(
    {name: st.just(value) for name, value in {**greeting._versions(), "epoch": EPOCH}.items()}
)
messages = st.builds(lambda rest, most: {**most, **rest}, st.dictionaries(fields, values), right | st.just({}))


@pytest.mark.parametrize("side", ["agent", "caller"])
def test_any_bytes_from_a_stranger_raise_the_same_error(side):
    @settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
    @given(st.lists(messages, max_size=3))
    def check(said):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"".join(framed(json.dumps(message).encode()) for message in said))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises((GreetingError, ConnectionError)):
                greet(ours, SECRET, EPOCH) if side == "caller" else answer_greeting(ours, SECRET, EPOCH, NODE)

    check()


def test_a_caller_that_hears_nothing_from_the_node_gives_up():
    """The bytes are garbled before the first record, so no checksum protects them."""
    ours, theirs = socket.socketpair()

    def pretend():
        with theirs, contextlib.suppress(GreetingError):
            answer_greeting(theirs, SECRET, EPOCH, [])

    thread = threading.Thread(target=pretend)
    thread.start()
    with ours, pytest.raises(GreetingError, match="did not send a greeting of envactors"):
        greet(ours, SECRET, EPOCH)
    thread.join(SOON)


def test_a_silent_peer_blocks_nobody_forever(monkeypatch):
    monkeypatch.setattr(greeting, "PATIENCE", 0.2)
    with agent() as (sock, said):
        assert sock.recv(1) == b""
    assert "timed out" in said[0]


def test_a_peer_that_sends_single_bytes_blocks_nobody(monkeypatch):
    monkeypatch.setattr(greeting, "PATIENCE", 0.3)
    with agent() as (sock, said):
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in hello():
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begun < promised(3.0)
    assert "timed out" in said[0]


def test_a_caller_that_knows_the_secret_is_rejected_if_there_is_another():
    ours, theirs = socket.socketpair()

    def answer():
        with theirs, contextlib.suppress(GreetingError):
            answer_greeting(theirs, SECRET, EPOCH, NODE, lambda: False)

    thread = threading.Thread(target=answer)
    thread.start()
    with ours, pytest.raises(GreetingError, match="this agent has a caller already"):
        greet(ours, SECRET, EPOCH)
    thread.join(SOON)


def test_a_stranger_at_the_agents_address_is_detected():
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


@contextlib.contextmanager
def waiting_agent():
    """An agent, as a process, that waits for its caller; yields the process, and its address."""
    process = start_agent(AgentOrders("a node", "127.0.0.1", SECRET, EPOCH, 10.0, 1.0, {}))
    try:
        address = NodeAddress("a node", "127.0.0.1", read_port(process), SECRET, EPOCH)
        yield process, address
    finally:
        end_agents([process])


@pytest.fixture
def waiting():
    with waiting_agent() as agent:
        yield agent


def call(address):
    return socket.create_connection((address.host, address.port), SOON)


def test_an_agent_keeps_waiting_for_the_right_caller(capfd, tmp_path):
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    rubbish = [*RUBBISH.values(), bomb, framed(bomb), hello() + framed(bomb)]
    with contextlib.ExitStack() as stack, waiting_agent() as (process, address):
        for _ in range(3):
            stack.enter_context(call(address))  # says nothing
        for said in rubbish:
            with contextlib.suppress(OSError), call(address) as sock:  # it may be refused before all was said
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1024):
                    pass
        with pytest.raises(GreetingError, match="does not know the secret"):
            connect(address._replace(secret=new_secret()))
        with pytest.raises(GreetingError, match="the agent's epoch is 'epoch-1', and the caller's is 'epoch-0'"):
            connect(address._replace(epoch="epoch-0"))
        begun = time.monotonic()
        link = connect(address)
        assert time.monotonic() - begun < promised(5.0), "sooner than silent strangers are given up"
        with pytest.raises(GreetingError, match="this agent has a caller already"):
            connect(address)
        assert process.poll() is None
        link.close()
        assert process.wait(SOON) == 0, "it ends with its caller"
    assert not (tmp_path / "exploded").exists()
    # The second caller may be refused while the agent is still letting the first one in, and only then is that told.
    beside = "the link is given up", "has a caller already"
    said = [line for line in capfd.readouterr().err.splitlines() if not any(text in line for text in beside)]
    assert len(said) == len(rubbish) + 2
    assert all(line.startswith("envactors agent: a caller was refused: ") for line in said), said


def test_only_one_of_many_callers_at_once_is_admitted(waiting):
    process, address = waiting
    barrier, links, refusals = threading.Barrier(8), [], []

    def come():
        barrier.wait(SOON)
        try:
            links.append(connect(address))
        except GreetingError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert len(links) == 1
    assert refusals == ["this agent has a caller already"] * 7
    links[0].close()
    assert process.wait(SOON) == 0


def test_an_agent_whose_starter_ends_does_not_wait_for_a_silent_stranger(waiting):
    process, address = waiting
    with call(address) as sock:
        sock.sendall(hello()[:20])
        process.stdin.close()
        assert process.wait(greeting.PATIENCE / 2) == 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"epoch": "old"}, "and the caller's is 'old'"), ({"secret": "not hexadecimal"}, "number found in fromhex")],
    ids=["epoch", "secret"],
)
def test_a_node_that_cannot_be_used_is_skipped_and_logged_in_one_line(wrong, text, caplog):
    class Changed(LocalNodes):
        def start(self, options, nodes):
            class Registry:
                expect_nodes, refuse_node = nodes.expect_nodes, nodes.refuse_node

                def add_node(self, address):
                    nodes.add_node(address._replace(**wrong) if address.name == "local-0" else address)

            return super().start(options, Registry())

    with (
        caplog.at_level(logging.WARNING, "envactors"),
        ea.spawn(Counter, backend=ea.RemoteBackend(Changed(2))) as actor,
    ):
        assert actor.add(1).result(SOON) == 1
        assert actor.node == "local-1"
    (said,) = caplog.messages
    assert said.startswith("node local-0 cannot be used: its agent at 127.0.0.2:")
    assert text in said
