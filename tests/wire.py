"""A wire to a node in a network namespace of its own, whose packets can be lost, delayed, kept and cut off."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from envactors.remote.greeting import new_secret
from envactors.remote.launching import Launcher, NodeAddress
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent

NEAR, FAR = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADERS = 0x1001
_PACKET = 1 << 16


def in_namespace(*command):
    """Returns the command that runs another one in a network namespace of its own, as its root."""
    return ["unshare", "--map-root-user", "--net", *command]


def is_possible():
    try:
        done = subprocess.run(in_namespace("ip", "tuntap", "add", "near", "mode", "tun"), check=False, timeout=100)
    except OSError:
        return False
    return done.returncode == 0


def _enter_namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def _open_device(name, address):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADERS))
    for command in (f"addr add {address}/24 dev {name}", f"link set {name} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return fd


class Wire:
    """Carries packets between this namespace ("there" leads away from it) and another.

    Attributes:
        far: Runs functions in the other namespace.
        cut: The ways whose packets are lost, all of them.
        kept: The ways whose packets are kept until they are not.
        loss: The share of other packets that are lost.
        delay: How long a packet takes, in seconds.
        lost: How many packets were lost.
    """

    def __init__(self):
        self.far = ThreadPoolExecutor(1, initializer=_enter_namespace)
        self.cut, self.kept = frozenset(), frozenset()
        self.loss = self.delay = 0.0
        self.lost = 0
        near, far = _open_device("near", NEAR), self.far.submit(_open_device, "far", FAR).result()
        self._ways = {near: ("there", far), far: ("back", near)}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self):
        under_way = {"there": deque(), "back": deque()}
        draw = random.Random(7).random
        while not self._closed.is_set():
            readable, _, _ = select.select(list(self._ways), [], [], 0.002)
            for fd in readable:
                way, target = self._ways[fd]
                packet = os.read(fd, _PACKET)
                if way in self.cut or draw() < self.loss:
                    self.lost += 1
                else:
                    under_way[way].append((time.monotonic() + self.delay, target, packet))
            for way, packets in under_way.items():
                while packets and way not in self.kept and packets[0][0] <= time.monotonic():
                    _, target, packet = packets.popleft()
                    os.write(target, packet)

    def close(self):
        self._closed.set()
        self._thread.join()
        self.far.shutdown()
        for fd in self._ways:
            os.close(fd)


class WiredNodes(Launcher):
    """A node "far" at the other end of a wire, and a node "near" at this one."""

    def __init__(self, wire):
        self.wire = wire
        self.agents = {}

    def start(self, options, nodes):
        nodes.expect_nodes(2)
        for name, host in (("far", FAR), ("near", "127.0.0.2")):
            orders = AgentOrders(name, host, new_secret(), "epoch", *options, insecure=True)
            agent = self.wire.far.submit(start_agent, orders).result() if name == "far" else start_agent(orders)
            self.agents[name] = agent
            nodes.add_node(NodeAddress(name, host, read_port(agent), orders.secret, orders.epoch))
        return self._stop

    def _stop(self):
        end_agents(self.agents.values())
        self.agents.clear()
