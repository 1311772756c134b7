"""Checks of the crash bundles of a chaos run: each one is run again, and has to end as its fault did."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

from chaos.faults import ArmedFault, FaultKind, FaultTable, FiredFault
from chaos.report import ReportBuilder
from envactors.crashes import writer
from envactors.mailbox.messages import Failure
from envactors.reruns.bundle import Bundle, load_bundle

# Seconds by which a sleep in a rerun is longer than the deadline: in the run, it may have ended just in time.
_OVERRUN = 2.0


class _EveryCrashDirectory(writer.CrashDirectory):
    """A directory that gets a bundle of each exception, not only of the first one of its type and line."""

    def reserve(self, actor: str, kind: str, failure: Failure | None, submit: writer.Submit) -> tuple[str | None, bool]:
        return super().reserve(actor, kind, None, submit)


class BundleCheck:
    """Runs the bundles of a run again, and counts those that end in the same way.

    Args:
        path: The ``crash_dir`` of the run.
        fault_table: Its faults.
        report_builder: Counts the bundles.
        deadline: Deadline of a step or reset, in seconds.
    """

    def __init__(self, path: str, fault_table: FaultTable, report_builder: ReportBuilder, deadline: float) -> None:
        self.path = path
        self._fault_table = fault_table
        self._report = report_builder
        self._deadline = deadline

    @contextlib.contextmanager
    def no_limits(self) -> Iterator[None]:
        """Let each failure of the run leave its own bundle."""
        directories = {self.path: _EveryCrashDirectory(self.path)}
        with (
            unittest.mock.patch.object(writer, "CRASH_LIMIT", 10 * self._report.planned),
            unittest.mock.patch.dict(writer._directories, directories),
        ):
            yield

    def run(self) -> None:
        """Check all bundles, once the envs are closed."""
        for pending in list(writer._pending):
            writer.wait_written(pending)
        fired, reproduced = self._fault_table.fired(), set()
        for bundle in [load_bundle(path) for path in sorted(Path(self.path).iterdir())]:
            reruns = [self._rerun(bundle, fault) for fault in fired if fault.pid == bundle.report["pid"]]
            if any(is_right for is_right, _ in reruns):
                reproduced.add(bundle.report["pid"])
                self._report.reproduced += 1
            else:
                text = ", ".join(text for _, text in reruns) or "there was no fault in its process"
                self._report.count_wrong_bundle(f"{bundle.path}, {bundle.ending}: {text}")
        for fault in fired:  # of several faults of one process, the first may hide the others
            if fault.pid not in reproduced and fault.kind is not FaultKind.SLEEP:  # which may end just in time
                self._report.count_wrong_bundle(f"{fault} has left no bundle that leads to it")

    def _rerun(self, bundle: Bundle, fault: FiredFault) -> tuple[bool, str]:
        """Run a bundle again, with the fault at the same point if env code was at fault.

        Returns:
            Whether it ends as it should if this is the fault that it is of, and a description.
        """
        is_own = fault.place is not None
        kind, expected = fault.kind, {bundle.ending}
        if fault.kind is FaultKind.KILL_WRITING:
            # A thread kills the process. If it was late, another request was running, or none.
            kind = FaultKind.KILL_STEP
            expected.add("SIGKILL in the requests before")
            running = bundle.report["env"], bundle.report["method"]
            is_own = fault.place is not None and running == (fault.env_id, fault.place.name.lower())
        if is_own and fault.place is not None:
            self._fault_table.arm(fault.env_id, fault.place, ArmedFault(kind, self._deadline + _OVERRUN, fault.visit))
        try:
            rerun = bundle.replay()
        except ValueError as error:
            return False, str(error)
        finally:
            self._fault_table.disarm(fault.env_id)
        return expected.issuperset(rerun.endings) == is_own, f"{fault}: {rerun}"
