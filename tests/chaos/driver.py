"""Driver of one actor in a chaos run: arms the faults of its envs when they are due."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from chaos.faults import ArmedFault, FaultTable, Place
from chaos.history import EnvHistory
from chaos.plan import PlannedFault
from chaos.process_watch import ProcessWatch
from chaos.report import ReportBuilder
from envactors.actor.handle import ActorHandle

# Results without a fault after which an env whose reset is to be hit is reset explicitly.
_UNFIRED_RESULTS = 30


class ActorDriver:
    """Arms the planned faults of one actor's envs and records those that have happened.

    Args:
        actor: Handle of the actor.
        histories: Histories of its envs.
        plan: All planned faults; those of other actors are ignored.
        fault_table: Table through which faults reach the envs.
        process_watch: Watches the worker processes.
        report_builder: Counts the faults.
        deadline: Deadline of a step or reset, in seconds.

    Attributes:
        histories: Histories of its envs.
        process_ends: Upper bound of the number of processes that faults have ended.
    """

    def __init__(
        self,
        actor: ActorHandle,
        histories: list[EnvHistory],
        plan: Iterable[PlannedFault],
        fault_table: FaultTable,
        process_watch: ProcessWatch,
        report_builder: ReportBuilder,
        deadline: float,
    ) -> None:
        self.histories = histories
        self.process_ends = 0
        self._actor = actor
        self._fault_table = fault_table
        self._process_watch = process_watch
        self._report = report_builder
        self._deadline = deadline
        self._ids = {history.env_id for history in histories}
        self._queue = collections.deque(fault for fault in plan if fault.env_id in self._ids)
        # Faults that are armed and have not happened yet.
        self._armed: list[PlannedFault] = []
        # Results to be delivered before the next fault, and results delivered since the last fault was armed.
        self._gap = self._queue[0].gap if self._queue else 0
        self._unfired = 0
        # Envs without a result since the last fault; results count from incarnation `_successor` on.
        self._unsettled: set[int] = set()
        self._successor = 0

    @property
    def faults(self) -> list[PlannedFault]:
        """Faults that have not happened yet."""
        return [*self._armed, *self._queue]

    @property
    def is_held(self) -> bool:
        """True if no request may be made, since the next fault kills the idle process."""
        fault = self._next()
        return fault is not None and fault.place in (None, Place.FACTORY)

    def inject_due_faults(self) -> None:
        """Arm the faults that are due."""
        self.record_fired_faults()
        while (fault := self._next()) is not None:
            if self._report.replays:
                # The next fault waits for results of the replacement process.
                self._successor = self._actor.incarnation + (2 if fault.place is Place.FACTORY else 1)
            if fault.place in (None, Place.FACTORY) and not self._kill_idle(fault):
                return
            self._queue.popleft()
            self._unfired = 0
            if self._queue:
                self._gap = self._queue[0].gap
            if fault.place is None:
                self._record_fault(fault)
            else:
                self._armed.append(fault)
                if fault.place is not Place.FACTORY:
                    self._fault_table.arm(
                        fault.env_id, fault.place, ArmedFault(fault.kind, self._deadline + fault.overrun)
                    )

    def record_fired_faults(self) -> None:
        """Record the armed faults that have happened."""
        for fault in list(self._armed):
            assert fault.place is not None, "kills of an idle process are never armed"
            if not self._fault_table.is_armed(fault.env_id, fault.place):
                self._armed.remove(fault)
                self._record_fault(fault)

    def record_result(self, env_id: int, incarnation: int | None) -> None:
        """Record that an env has delivered a result.

        Args:
            env_id: Index of the env.
            incarnation: Incarnation that made the result; None: the current one.
        """
        self._gap -= 1
        self._unfired += 1
        # A process that is being killed may still deliver a result or two.
        where = self._actor.incarnation if incarnation is None else incarnation
        if where >= self._successor or self._unfired > _UNFIRED_RESULTS:
            self._unsettled.discard(env_id)

    @property
    def node(self) -> str | None:
        """Name of the node that the actor's process runs on; None for this machine, and while there is none."""
        return self._actor.node

    @property
    def is_settled(self) -> bool:
        """True if all envs have delivered a result since the last fault, and none is armed."""
        return not self._armed and not self._unsettled

    def record_node_fault(self, node: str) -> None:
        """Record that a node is about to be lost."""
        # Until it is, a process of any actor may come to be placed there.
        self.process_ends += 1
        if self.node != node:
            return
        if self._report.replays:
            self._successor = self._actor.incarnation + 1
        self._unfired = 0
        self._unsettled = set(self._ids)

    def envs_due_for_reset(self) -> set[int]:
        """Return the envs to reset explicitly, since an armed fault waits for their reset."""
        return {
            fault.env_id
            for fault in self._armed
            if fault.place is Place.RESET and (fault.by_hand or self._unfired > _UNFIRED_RESULTS)
        }

    def _next(self) -> PlannedFault | None:
        """Return the next fault if it is due, else None."""
        if not self._queue:
            return None
        fault = self._queue[0]
        if self._armed or self._unsettled:
            if self._report.replays or not fault.joined:
                return None
            if fault.place is not None and self._fault_table.is_armed(fault.env_id, fault.place):
                return None
        elif self._gap > 0:
            return None
        return fault

    def _kill_idle(self, fault: PlannedFault) -> bool:
        """Kill the process and return True, or return False if it is not idle."""
        pid = self._actor.pid
        if pid is None or any(history.requested_at is not None for history in self.histories):
            return False
        if fault.place is Place.FACTORY:
            self._fault_table.arm(fault.env_id, fault.place, ArmedFault(fault.kind))
            self.process_ends += 1
        self._process_watch.add_worker(pid)
        self._fault_table.kill(fault.env_id, pid)
        return True

    def _record_fault(self, fault: PlannedFault) -> None:
        self._report.count_fault(fault.kind)
        self.process_ends += 1
        self._unfired = 0
        self._unsettled = set(self._ids)
