"""A caller with the default action for SIGPIPE survives the end of nodes, and of connections to them."""

from __future__ import annotations

import pytest
from helpers import run_script

LINK = """
import signal, socket, ssl, sys, threading, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from envactors.remote.link import Link
from envactors.remote.records import Record, RecordKind
from envactors.remote.streams import TlsStream

def encrypt(sock, server):  # without certificates
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("aNULL:@SECLEVEL=0")
    stream = TlsStream(sock, context, server_side=server)
    stream.handshake()
    return stream

with socket.create_server(("127.0.0.1", 0)) as listener:
    sock = socket.create_connection(listener.getsockname())
    peer = listener.accept()[0]
    if sys.argv[1] == "tls":
        peers = []
        thread = threading.Thread(target=lambda: peers.append(encrypt(peer, True)))
        thread.start()
        sock = encrypt(sock, False)
        thread.join()
        peer, = peers
    link = Link(sock)
    peer.close()
    errors, deadline = [], time.monotonic() + 20
    while len(errors) < 3 and time.monotonic() < deadline:  # the first writes may still be accepted
        try:
            link.send(Record(RecordKind.BEAT, payload=bytes(1 << 10)))
        except OSError as error:
            errors.append(error)
    assert len(errors) == 3
    link.close()
print("alive")
assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "and the mask is as before"
"""
NODES = """
import contextlib, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
import envactors as ea
from envactors.remote import LocalNodes

class Env:
    def echo(self, value):
        return value

launcher = LocalNodes(2)
backend = ea.RemoteBackend(launcher, lease=2.0, heartbeat=0.2)
with ea.spawn(Env, backend=backend, restart=ea.RestartPolicy(max_restarts=10**6, backoff=0.0)) as actor:
    for number in range(int(sys.argv[1])):
        assert actor.options(retries=5).echo(number).result(40) == number
        node = actor.node
        launcher.add()
        launcher.agents[node].kill()
        for _ in range(50):  # while the loss of the node is noticed
            with contextlib.suppress(ea.ActorDiedError):
                actor.echo(bytes(1 << 10)).cancel()
print("alive")
"""


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_a_link_whose_other_end_is_closed_does_not_end_the_caller(kind, run_warm):
    ended = run_warm(LINK, kind)
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr[-2000:]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_nodes_that_are_killed_do_not_end_the_caller():
    ended = run_script(NODES, "20", timeout=1100)
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr[-2000:]
