"""Nodes behind links that are slow, encrypted or not: a proxy that throttles, and certificates."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time

from proxy import Proxy

from envactors.remote import LocalNodes, local_nodes
from envactors.remote.greeting import new_secret
from envactors.remote.launching import NodeAddress
from envactors.remote.starting import AgentOrders, read_port
from envactors.remote.tls import Certificates
from envactors.system.interpreters import python_command
from envactors.system.memory import file_of_text

# Used by these tests only.
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg2icHccWXEosXdX02
/8xrD+6J014YO2O4AMfjiEsdAq2hRANCAASEOK94gSOextwDtLmV2LZDIrS0TBtW
wQri3gjE6N+h3D3LrkIoaDyGzfQab0vGwHbON3xMZFpa2cQs5+0gtF/O
-----END PRIVATE KEY-----
"""
CERT = """\
-----BEGIN CERTIFICATE-----
MIIBjDCCATGgAwIBAgIUdCSc+Mog0KgdE1/14PROOgwcsFkwCgYIKoZIzj0EAwIw
GjEYMBYGA1UEAwwPZW52YWN0b3JzIHRlc3RzMCAXDTI2MTEyNDE5NDgyM1oYDzIx
MjYxMDMxMTk0ODIzWjAaMRgwFgYDVQQDDA9lbnZhY3RvcnMgdGVzdHMwWTATBgcq
hkjOPQIBBggqhkjOPQMBBwNCAASEOK94gSOextwDtLmV2LZDIrS0TBtWwQri3gjE
6N+h3D3LrkIoaDyGzfQab0vGwHbON3xMZFpa2cQs5+0gtF/Oo1MwUTAdBgNVHQ4E
FgQUwf5rCjU2rOe8+DFda7JsA/tO3RwwHwYDVR0jBBgwFoAUwf5rCjU2rOe8+DFd
a7JsA/tO3RwwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA0/rc
6m9dDnprGyOvVpGW6Kg7vgKS99WREgwBVf6pG6UCIQDuVK5UsSobQzTklMwA6w+x
V/w9LKOCHU+yuBWzaKHDzA==
-----END CERTIFICATE-----
"""
CERTIFICATES = Certificates(CERT, CERT, KEY)
CHUNK = 1 << 15


def client_context():
    """Returns the caller's side of links to nodes that have these certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=CERT)
    with file_of_text("cert", CERT) as cert, file_of_text("key", KEY) as key:
        context.load_cert_chain(cert, key)
    return context


class SlowProxy(Proxy):
    """Passes bytes on at a limited rate, each way by itself, as a slow network does.

    Attributes:
        rates: Bytes per second, by way; "there" leads to the agent.
        passed: How many bytes have passed, by way.
    """

    def __init__(self, host, port):
        self.rates = {"there": float("inf"), "back": float("inf")}
        self.passed = {"there": 0, "back": 0}
        super().__init__(host, port)

    def pass_on(self, source, target, way):
        free_at = 0.0  # when the wire has carried what was sent
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                free_at = max(free_at, time.monotonic()) + len(data) / self.rates[way]
                if self._closed.wait(max(0.0, free_at - time.monotonic())):
                    return
                target.sendall(data)
                self.passed[way] += len(data)
            target.shutdown(socket.SHUT_WR)


class SlowNodes(LocalNodes):
    """Local nodes that are reached through slow links.

    Args:
        count: How many there are.
        tls: Whether the links are encrypted.
    """

    def __init__(self, count=1, *, tls=False):
        super().__init__(count)
        self.tls = tls
        self.proxies = {}

    def _start(self, number, options, nodes, agents):
        name, host, secret = f"slow-{number}", "127.0.0.1", new_secret()
        certificates = CERTIFICATES if self.tls else None
        lease, heartbeat, process = options
        orders = AgentOrders(name, host, secret, "0", lease, heartbeat, process, certificates)
        agent = agents[name] = self.start_agent(orders)

        def join():
            proxy = self.proxies[name] = SlowProxy(host, read_port(agent))
            context = client_context() if self.tls else None
            nodes.add_node(NodeAddress(name, host, proxy.port, secret, "0", context))

        threading.Thread(target=join).start()

    def start_agent(self, orders):
        return local_nodes.start_agent(orders)

    def throttle(self, way, rate):
        for proxy in self.proxies.values():
            proxy.rates[way] = rate

    def _stop(self, agents):
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
        super()._stop(agents)


class ChangedNodes(SlowNodes):
    """Local nodes whose agents run a line of code before they begin.

    Args:
        code: The line.
        count: How many there are.
    """

    def __init__(self, code, count=2):
        super().__init__(count)
        self.code = code

    def start_agent(self, orders):
        command = python_command("envactors.remote.agent", "main", {}, None)
        line = command.index("-c") + 1
        command[line] = command[line].replace("from envactors", f"{self.code}; from envactors")
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        agent.stdin.write(json.dumps(orders._asdict()) + "\n")
        agent.stdin.flush()
        return agent
