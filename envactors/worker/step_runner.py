"""Run steps and resets in the worker: find the rows that the parent has posted, and run them in order.

Calls do not come through rows: they are frames, which `envactors.worker.main` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.mailbox import bundle
from envactors.mailbox.control_page import OVERFLOWS, STREAM, ControlPage
from envactors.mailbox.info_codec import InfoWriter
from envactors.mailbox.messages import Kind
from envactors.mailbox.slab import PAYLOAD, Slab
from envactors.worker.env_rows import EnvRow, WriteGuard, run_all
from envactors.worker.host import Host


class StepRunner:
    """Runs the steps and resets of one worker.

    Args:
        host: The host of the envs.
        page: The control page, on which progress is recorded.
        send: Sends a frame of the current request, given its kind and payload.
        guard: The guard of a worker that cannot be killed; None for others.

    Attributes:
        rows: The rows of the worker's envs.
    """

    def __init__(
        self, host: Host, page: ControlPage, send: Callable[[Kind, Any], None], guard: WriteGuard | None
    ) -> None:
        self._host = host
        self._page = page
        self._send = send
        self._guard = guard
        self.rows: list[EnvRow] = []

    def attach(self, slab: Slab, infos: InfoWriter, autoreset: bool) -> None:
        """Use these rows from now on; with ``autoreset`` an episode that ends is reset within the step."""
        self.rows = [
            EnvRow(hosted, slab, infos, autoreset, self._page, self._send_overflow, self._guard)
            for hosted in self._host.hosted_envs
        ]
        self._posted = slab.posted.data
        self._completed = slab.completed.data
        self._ops = slab.ops.data

    def take_payloads(self, call_id: int, payload: Any) -> None:
        """Keep the payloads of a `Kind.PAYLOADS` frame for the rows that are posted with this call id."""
        for position, content in payload if isinstance(payload, list) else bundle.unpack(payload):
            self.rows[position].payload = call_id, content

    def run_rows(self, call_id: int) -> None:
        """Run every row that is posted and not completed, for the step of this call id."""
        page = self._page
        page.is_streaming = page.counters[STREAM] != 0
        due: list[tuple[EnvRow, int, int]] = []
        posted, completed, ops = self._posted, self._completed, self._ops
        for row in self.rows:
            index = row.index
            posted_id = posted[index]
            if posted_id != completed[index]:
                op = ops[index]
                # A payload that has not come yet belongs to a later post, which brings the next scan.
                if not op & PAYLOAD or row.payload[0] == posted_id:
                    due.append((row, op, posted_id))
        if due:
            run_all(due)
            page.is_timing = False
        page.finish_step(call_id)

    def _send_overflow(self, index: int, payload: bytes | bytearray) -> None:
        self._send(Kind.OVERFLOW, bundle.pack([(index, payload)]))
        self._page.counters[OVERFLOWS] += 1
