"""The node agent: hosts the workers of one caller on this machine, and relays their frames over one link.

It is started with one line of JSON on its standard input, a pipe (`AgentOrders`), and answers with one line, the port
on which it waits for its caller. It ends with the link, when the caller says so, when its lease is over, or when the
pipe is closed: the process that started it has ended. Its workers end with it, as those of any caller do.

usage: python -m envactors.remote.agent
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from envactors.remote.greeting import PATIENCE, GreetingError, answer_greeting, refuse
from envactors.remote.hosted_worker import MOST_OUTPUT, HostedWorker
from envactors.remote.hosting import Hosting
from envactors.remote.keeper import LEASE_FORMAT
from envactors.remote.lease import WorkerLease
from envactors.remote.link import Link
from envactors.remote.records import LinkCorruptError, Record, RecordKind
from envactors.remote.starting import AgentOrders, module_command
from envactors.remote.tls import make_server_context
from envactors.remote.watches import Watches
from envactors.system.clocks import boot_clock
from envactors.system.memory import SharedFile
from envactors.system.polling import WRITABLE, Doorbell
from envactors.system.processes import open_own_sentinel

# How long to wait for the caller, in seconds.
_PATIENCE = 60.0
# How often to say what busy workers are at, in seconds.
_TICK = 0.05
_STDIN, _CHUNK = 0, 1 << 16


class Agent:
    """Hosts workers until the link ends.

    Args:
        link: The link to the caller.
        orders: What the agent was told.
        stamp: When the caller was admitted, which the lease begins with.
        lease_file: Where the keeper reads until when workers may run.

    Attributes:
        watches: The descriptors that it waits for.
    """

    def __init__(self, link: Link, orders: AgentOrders, stamp: float, lease_file: mmap.mmap) -> None:
        self.watches = Watches()
        self._link = link
        self._heartbeat = orders.heartbeat
        self._lease = WorkerLease(orders.lease, stamp)
        self._lease_file = lease_file
        self._hosting = Hosting(link, self.watches, orders.options, self._lease.until)
        self._ending = False
        # Whether the link is watched for room to write.
        self._writing = False
        self.watches.add(link.fileno(), self._on_link)
        self.watches.add(_STDIN, self._on_stdin)

    def run(self) -> None:
        """Serve the caller until the link ends or the lease is over; then end all workers."""
        next_beat = next_tick = 0.0
        try:
            while not self._ending and boot_clock() < self._lease.until:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat()
                    next_beat = now + self._heartbeat
                busy = self._hosting.busy()
                if busy and now >= next_tick:
                    self._report(busy)
                    next_tick = now + _TICK
                self._follow_backlog()
                left = self._lease.until - boot_clock()
                call_handlers = self.watches.handle(min(next_beat - now, left, _TICK if busy else left))
                self._link.cork()  # one write per round, whatever it is made of
                call_handlers()
                self._link.uncork()
        except (OSError, LinkCorruptError) as error:
            print(f"envactors agent: the link is given up: {error}", file=sys.stderr)
        finally:
            self._hosting.end()
            self._link.close()

    def _follow_backlog(self) -> None:
        if self._writing is not (self._link.backlog > 0):
            self._writing = not self._writing
            self.watches.want_write(self._link.fileno(), self._writing)
        if self._link.backlog < MOST_OUTPUT:
            self.watches.resume_all()

    def _beat(self) -> None:
        self._link.send(Record(RecordKind.BEAT, call_id=int(boot_clock() * 1e9)))
        self._report(self._hosting.workers.values())
        for worker in self._hosting.workers.values():
            worker.send_measured()

    def _report(self, workers: Iterable[HostedWorker]) -> None:
        reports = [tuple(worker.progress()) for worker in workers]
        if reports:
            self._link.send(Record(RecordKind.PROGRESS, payload=pickle.dumps(reports)))

    def _on_link(self, mask: int) -> None:
        if mask & WRITABLE:
            self._link.flush()
        records = self._link.receive()
        if records is None:
            self._ending = True
            return
        for record in records:
            if record.kind == RecordKind.ECHO:
                self._lease.renew(record.call_id / 1e9)
                LEASE_FORMAT.pack_into(self._lease_file, 0, self._lease.until)
                self._hosting.set_lease(self._lease.until)
            elif record.kind == RecordKind.END:
                self._ending = True
            elif boot_clock() < self._lease.until:  # after a freeze this may be long over
                self._hosting.on_record(record)

    def _on_stdin(self, _mask: int) -> None:
        self._ending = not os.read(_STDIN, _CHUNK)


def main() -> None:
    """Run an agent: see the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    orders = AgentOrders.from_json(sys.stdin.readline())
    sys.path.extend(entry for entry in orders.path if entry not in sys.path)
    tls = None if orders.certificates is None else make_server_context(orders.certificates)
    listener = socket.create_server((orders.host, 0), family=socket.AF_INET6 if ":" in orders.host else socket.AF_INET)
    print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
    with open(os.devnull, "wb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 1)  # what reads the line above may be gone
    link, stamp = _wait_for_caller(listener, orders, tls)
    lease_file = SharedFile("envactors-lease")
    lease = lease_file.map(mmap.PAGESIZE)
    LEASE_FORMAT.pack_into(lease, 0, stamp + orders.lease)
    fds = open_own_sentinel(), lease_file.fileno()
    command = module_command("envactors.remote.keeper", orders.path, str(os.getpid()), *map(str, fds))
    keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)  # noqa: S603 # its own module
    agent = Agent(link, orders, stamp, lease)
    agent.watches.add(listener.fileno(), lambda _mask: _refuse_second(listener, tls))
    agent.run()
    keeper.kill()
    keeper.wait()


def _wait_for_caller(listener: socket.socket, orders: AgentOrders, tls: ssl.SSLContext | None) -> tuple[Link, float]:
    end = time.monotonic() + _PATIENCE
    bell, callers = Doorbell(), Callers(orders, tls)
    poll = select.poll()
    for fd in (listener.fileno(), _STDIN, bell.fileno()):
        poll.register(fd, select.POLLIN)
    listener.setblocking(False)
    while events := poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
        if _STDIN in (fd for fd, _ in events) and not os.read(_STDIN, _CHUNK):
            sys.exit()  # the process that started this one has ended, or needs no agent any more
        if callers.admitted is not None:
            return callers.admitted
        with contextlib.suppress(OSError):  # it may have gone again
            sock, _ = listener.accept()
            # In a thread: one that says nothing keeps nobody out.
            threading.Thread(target=callers.greet, args=(sock, bell.ring), daemon=True).start()
    sys.exit(f"envactors agent: no caller came within {_PATIENCE:.0f} s")


class Callers:
    """Those who connect, of whom one is admitted.

    Args:
        orders: What the agent was told.
        tls: Its certificates; None for a link that is not encrypted.

    Attributes:
        admitted: The link to the one that was admitted, and when that was; None before.
    """

    def __init__(self, orders: AgentOrders, tls: ssl.SSLContext | None) -> None:
        self.admitted: tuple[Link, float] | None = None
        self._orders, self._tls = orders, tls
        self._is_claimed = threading.Lock()

    def greet(self, sock: socket.socket, on_admitted: Callable[[], None]) -> None:
        """Greet one that has connected, and admit it or say why not."""
        orders, claimed, stamp = self._orders, False, 0.0

        def claim() -> bool:
            nonlocal claimed, stamp
            claimed = self._is_claimed.acquire(blocking=False)
            stamp = boot_clock()  # before it knows: its own reckoning of the lease begins no sooner
            return claimed

        try:
            sock = _encrypt(sock, self._tls, PATIENCE)
            answer_greeting(sock, orders.secret, orders.epoch, {"pid": os.getpid()}, claim)
            self.admitted = Link(sock), stamp
        except (OSError, GreetingError) as error:
            if claimed:
                self._is_claimed.release()  # it has gone again
            print(f"envactors agent: a caller was refused: {error}", file=sys.stderr)
            sock.close()
        else:
            on_admitted()


def _encrypt(sock: socket.socket, tls: ssl.SSLContext | None, patience: float) -> socket.socket:
    sock.settimeout(patience)
    return sock if tls is None else tls.wrap_socket(sock, server_side=True)


def _refuse_second(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError):
        sock, _ = listener.accept()
        # In a thread: the handshake takes as long as the other side likes.
        threading.Thread(target=_say_taken, args=(sock, tls), daemon=True).start()


def _say_taken(sock: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError, GreetingError), _encrypt(sock, tls, 1.0) as encrypted:
        encrypted.recv(_CHUNK)  # closing before the greeting is read would discard the answer
        refuse(encrypted, "this agent has a caller already")


if __name__ == "__main__":
    main()
