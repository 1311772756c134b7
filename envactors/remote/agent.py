"""The node agent: hosts the workers of one caller on this machine, and relays their frames over one link.

It reads one line of JSON from its standard input, a pipe (`AgentOrders`), and prints one line with the port on which it
waits for its caller. It ends with the link, on the caller's request, when its lease is over, or when the pipe is
closed, because the process that started it has ended. Its workers end with it, like those of any caller.

usage: python -m envactors.remote.agent
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence

from envactors.process.helper import HELPERS
from envactors.process.helper_program import LEASE
from envactors.remote.door import Door
from envactors.remote.hosted_worker import MOST_OUTPUT, HostedWorker
from envactors.remote.hosting import Hosting
from envactors.remote.lease import WorkerLease
from envactors.remote.link import Link, LinkLostError
from envactors.remote.records import LinkCorruptError, Record, RecordKind
from envactors.remote.starting import NOT_NEEDED, AgentOrders
from envactors.remote.tls import make_server_context
from envactors.remote.watches import Watches
from envactors.system.clocks import boot_clock
from envactors.system.memory import SharedFile
from envactors.system.polling import WRITABLE

# How long to wait for the caller, in seconds.
_PATIENCE = 60.0
# The interval between progress reports of busy workers, in seconds.
_TICK = 0.05
_STDIN, _CHUNK = 0, 1 << 16
# How many connections the system queues until the agent accepts them; the system may have a lower limit.
_WAITING = 1024


class Agent:
    """Hosts workers until the link ends.

    Args:
        link: The link to the caller.
        orders: The agent's orders.
        stamp: When the caller was admitted, which is the beginning of the lease.
        lease_file: The memory from which helper processes read the end of the lease.
        watches: Watches all descriptors.
        door: Refuses other connections.

    Attributes:
        watches: Watches all descriptors.
    """

    def __init__(
        self, link: Link, orders: AgentOrders, stamp: float, lease_file: memoryview, watches: Watches, door: Door
    ) -> None:
        self.watches = watches
        self._link = link
        self._door = door
        self._heartbeat = orders.heartbeat
        self._lease = WorkerLease(orders.lease, stamp)
        self._lease_file = lease_file
        self._hosting = Hosting(link, self.watches, orders.options, self._lease.until)
        self._ending = False
        self._is_needed = True
        # Whether the link is watched for being writable.
        self._writing = False
        self.watches.add(link.fileno(), self._on_link)
        self.watches.add(_STDIN, self._on_stdin)

    def run(self) -> bool:
        """Serve the caller until the link ends or the lease is over; then end all workers.

        Returns:
            Whether the caller may need another agent; False if it has told this one to end.
        """
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
                self._door.on_timer(now)
                left = min(self._lease.until - boot_clock(), self._door.next_timer() - now)
                call_handlers = self.watches.handle(min(next_beat - now, left, _TICK if busy else left))
                self._link.cork()  # one write per round
                call_handlers()
                self._link.uncork()
        except (LinkLostError, LinkCorruptError) as error:
            print(f"envactors agent: the link is given up: {error}", file=sys.stderr)
        finally:
            self._hosting.end()
            self._link.close()
        return self._is_needed

    def _follow_backlog(self) -> None:
        if self._writing is not (self._link.backlog > 0):
            self._writing = not self._writing
            self.watches.want_write(self._link.fileno(), self._writing)
        if self._link.backlog < MOST_OUTPUT:
            self.watches.resume_all()

    def _beat(self) -> None:
        self._link.send(Record(RecordKind.BEAT, call_id=int(boot_clock() * 1e9)))
        workers = tuple(self._hosting.workers.values())
        self._report(workers)
        if self._link.backlog <= MOST_OUTPUT:
            for worker in workers:
                worker.send_measured()

    def _report(self, workers: Sequence[HostedWorker]) -> None:
        if self._link.backlog > MOST_OUTPUT:
            return  # the link is slow: reports would pile up, and be outdated when they arrive
        reports = []
        for worker in workers:
            with worker.serving():
                reports.append(tuple(worker.progress()))
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
                LEASE.pack_into(self._lease_file, 0, self._lease.until)
                self._hosting.set_lease(self._lease.until)
            elif record.kind == RecordKind.END:
                self._ending = True
                self._is_needed = False
            elif boot_clock() < self._lease.until:  # after a freeze the lease may be long over
                self._hosting.on_record(record)

    def _on_stdin(self, _mask: int) -> None:
        self._ending = not os.read(_STDIN, _CHUNK)


def main() -> None:
    """Run an agent; see the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    orders = AgentOrders.from_json(sys.stdin.readline())
    orders.check_encryption()
    tls = None if orders.certificates is None else make_server_context(orders.certificates)
    family = socket.AF_INET6 if ":" in orders.host else socket.AF_INET
    with socket.create_server((orders.host, 0), family=family, backlog=_WAITING) as listener:
        print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
        with open(os.devnull, "wb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 1)  # nothing may be reading the pipe any more
        watches = Watches()
        door = Door(listener, orders, tls, watches)
        link, stamp = _wait_for_caller(door, watches)
        lease_file = SharedFile("envactors-lease")
        _, lease = lease_file.extend(LEASE.size)
        LEASE.pack_into(lease, 0, stamp + orders.lease)
        HELPERS.lease = lease_file.fileno()
        if not Agent(link, orders, stamp, lease, watches, door).run():
            sys.exit(NOT_NEEDED)


def _wait_for_caller(door: Door, watches: Watches) -> tuple[Link, float]:
    end = time.monotonic() + _PATIENCE
    watches.add(_STDIN, _exit_at_end)
    while door.admitted is None:
        now = time.monotonic()
        if now >= end:
            print(f"envactors agent: no caller came within {_PATIENCE:.0f} s", file=sys.stderr)
            sys.exit(NOT_NEEDED)
        door.on_timer(now)
        watches.handle(min(end, door.next_timer()) - now)()
    watches.remove(_STDIN)
    return door.admitted


def _exit_at_end(_mask: int) -> None:
    if not os.read(_STDIN, _CHUNK):
        sys.exit()  # the process that started the agent has ended, or no longer needs it


if __name__ == "__main__":
    main()
