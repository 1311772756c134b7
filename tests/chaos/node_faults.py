"""Node faults of a chaos run: agents that are killed or stopped, and nodes that join in their place."""

from __future__ import annotations

import enum
import random
import signal
from collections.abc import Sequence

from chaos.driver import ActorDriver
from chaos.node_keeper import NodeKeeper
from chaos.report import ReportBuilder

# How many other faults there are per node fault.
_FAULTS_PER_NODE_FAULT = 20


class NodeFaultKind(enum.Enum):
    """Kinds of node fault."""

    KILL = "SIGKILL of an agent"
    STOP = "SIGSTOP of an agent"


class NodeFaults:
    """Ends nodes of this machine, one at a time, spread over a run.

    Args:
        keeper: Ends nodes, and has others join in their place.
        planned: Number of all faults, node faults among them.
        seed: Decides which node is hit, and how.
        report_builder: Counts the faults.

    Attributes:
        count: Number of node faults.
        keeper: The keeper.
    """

    def __init__(self, keeper: NodeKeeper, planned: int, seed: int, report_builder: ReportBuilder) -> None:
        self.count = planned // _FAULTS_PER_NODE_FAULT
        self.keeper = keeper
        self._others = planned - self.count
        self._dice = random.Random(seed)  # no secret
        self._report = report_builder
        self._injected = 0

    @property
    def is_done(self) -> bool:
        """True if all have happened."""
        return self._injected == self.count

    def inject_if_due(self, drivers: Sequence[ActorDriver]) -> None:
        """End a node, if that is due and all actors run on some node."""
        happened = sum(self._report.faults.values()) - self._injected
        if self.is_done or happened < (self._injected + 1) * self._others // (self.count + 1):
            return
        if any(driver.node is None for driver in drivers) or (
            self._report.replays and not all(driver.is_settled for driver in drivers)
        ):
            return
        node = self._dice.choice(sorted({driver.node for driver in drivers if driver.node}))
        kind = self._dice.choice(list(NodeFaultKind))
        for driver in drivers:
            driver.record_node_fault(node)
        self.keeper.end(node, signal.SIGKILL if kind is NodeFaultKind.KILL else signal.SIGSTOP)
        self._injected += 1
        self._report.count_fault(kind)
