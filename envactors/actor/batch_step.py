"""The batch step: one request of one actor for any of its envs, and the two ways to carry it.

    FrameBatchStep         one frame there, one back, or one per env if its results stream
    SharedMemoryBatchStep  rows of shared memory there and back, one ring each way

Both keep the worker's order and stand in the actor's request table like a call. The envs of a batch step may fare
differently: when its process ends, `split` says which env was running and which had not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from envactors.actor.requests import Answer, Request, next_look
from envactors.options import Deadlines
from envactors.wire.control_page import METHOD_RESET, ControlPage
from envactors.wire.messages import Frame, Kind, Reset, Step, Steps
from envactors.wire.steps import copy_item, pack_item, unpack_outcomes

if TYPE_CHECKING:
    from envactors.actor.future import ActorFuture


class StepRequest(Request):
    """One env's step or reset.

    Args:
        message: What the worker is asked.
        index: The env's index.
        on_end: Called with the outcome: (request, value, error, incarnation).
        bound: The only incarnation that may run it; None for any.
        pickled: Whether the message travels pickled; otherwise the worker reads this very object.

    Attributes:
        kind: `Kind.RESET` or `Kind.STEP`.
        position: The env's position within its actor.
        message: What the worker is asked.
        item: The message as it travels.
    """

    __slots__ = ("_on_end", "item", "kind", "message", "position")

    def __init__(
        self,
        message: Reset | Step,
        index: int,
        on_end: Callable[[Any, Any, BaseException | None, int], None],
        bound: int | None,
        *,
        pickled: bool,
    ) -> None:
        resets = isinstance(message, Reset)
        super().__init__("reset" if resets else "step", index, bound=bound)
        self.kind = Kind.RESET if resets else Kind.STEP
        self.message = message
        self.position = message.env
        self.item = pack_item(message) if pickled else copy_item(message)
        self._on_end = on_end

    @property
    def is_seeded_reset(self) -> bool:
        """Whether it is a reset with a seed, which needs nothing of what came before."""
        return isinstance(self.message, Reset) and self.message.seed is not None

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        self._on_end(self, value, error, incarnation)


class FrameBatchStep:
    """A batch step that travels in frames.

    Args:
        requests: What each env is asked, in the order in which they run.
        stream: Whether each result is sent as soon as it is there.
    """

    pipelines = False
    needs_permit = True
    timeout: float | None = None
    number = 0

    def __init__(self, requests: Sequence[StepRequest], *, stream: bool) -> None:
        self.call_id = 0
        self.started = 0.0
        self.stream = stream
        self._left = {request.position: request for request in requests}

    @property
    def parts(self) -> Sequence[StepRequest]:
        return tuple(self._left.values())

    @property
    def message(self) -> Steps:
        """What the worker is sent."""
        return Steps([request.item for request in self._left.values()], self.stream)

    def answers(self, frame: Frame) -> tuple[list[Answer], bool]:
        answers = []
        for position, outcome in unpack_outcomes(frame.payload):
            request = self._left[position]
            request.started = self.started
            answers.append(Answer(request, outcome.failed, outcome.content, outcome.check, outcome.reset_within))
        return answers, len(answers) == len(self._left)

    def discard(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if isinstance(answer.request, StepRequest):
                self._left.pop(answer.request.position, None)

    def next_look(self, page: ControlPage | None, deadlines: Deadlines, now: float) -> float | None:
        return next_look(self, page, deadlines, now)[0]

    def split(self, page: ControlPage | None, *, blame: bool) -> tuple[Request | None, list[Request]]:
        progress = None if page is None else page.progress()
        left, self._left = self._left, {}
        current: StepRequest | None = None
        if progress is not None and progress.call_id == self.call_id:
            current = left.pop(progress.position, None)
            if current is not None:
                current.started = progress.since
                if progress.method == METHOD_RESET:
                    current.method = "reset"  # also of a step that resets
        elif blame and left:
            current = left.pop(next(iter(left)))
            current.started = self.started
        for request in left.values():
            request.started = 0.0
        return current, list(left.values())

    def withdraw(self, future: ActorFuture) -> Request | None:
        found = next((position for position, request in self._left.items() if request.future is future), None)
        return None if found is None else self._left.pop(found)
