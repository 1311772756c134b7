"""What was begun with one of Gymnasium's ``*_async`` and awaits its ``*_wait``."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Literal, TypeAlias

from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from envactors.actor.future import ActorFuture
from envactors.errors import (
    NothingPendingError,
    RemoteTraceback,
    VectorStepError,
    VectorTimeoutError,
)
from envactors.integrations.gymnasium_batches import Observations
from envactors.options import check_timeout
from envactors.vector.facade import VectorEnv

What: TypeAlias = Literal["reset", "step", "call"]
# Waits for results, for so many seconds and no longer than to this time (`time.monotonic`), and gives them.
Finish: TypeAlias = Callable[[float | None, float | None], Any]


class Pending:
    """The one call that is pending; and what still runs of those that timed out, whose results are nobody's.

    Args:
        envs: Who runs them.
        observations: Where the observations of late results are kept.

    Attributes:
        what: Which call is pending, None where none is.
    """

    def __init__(self, envs: VectorEnv, observations: Observations) -> None:
        self.what: What | None = None
        self._envs = envs
        self._observations = observations
        # Begins it, where older results have to come before; and what finishes it.
        self._begin: Callable[[], object] | None = None
        self._finish: Finish | None = None

    def check_free(self, caller: str) -> None:
        """Refuses a call while another one is pending.

        Args:
            caller: What is called.

        Raises:
            AlreadyPendingCallError: One is.
        """
        if self.what is not None:
            raise AlreadyPendingCallError(
                f"Calling `{caller}` while waiting for a pending call to `{self.what}` to complete", self.what
            )

    def start(self, what: Literal["reset", "step"], begin: Callable[[], object], finish: Finish) -> None:
        """Begins a call, at once or when older results have come and were dropped."""
        if self.is_owing():
            self._begin = begin
        else:
            begin()
        self.what, self._finish = what, finish

    def add_calls(self, calls: Sequence[ActorFuture]) -> None:
        """Has calls of all envs pend that run already."""
        self.what, self._finish = "call", lambda timeout, _: _results(calls, timeout)

    def finish(self, what: What, timeout: float | None) -> Any:
        """Waits for the call that is pending.

        Args:
            what: Which one it is to be.
            timeout: How long, in seconds; None: for ever.

        Raises:
            multiprocessing.TimeoutError: The time is over.
            NoAsyncCallError: Another one is pending, or none.
            Exception: What the last of the envs raised that failed.
        """
        if self.what != what:
            raise NoAsyncCallError(f"Calling `{what}_wait` without any prior call to `{what}_async`.", what)
        check_timeout(timeout, f"{what}_wait(timeout=...)")
        deadline = None if timeout is None else time.monotonic() + timeout
        begin, finish = self._begin, self._finish
        assert finish is not None, "it was started"
        self.forget()
        try:
            if begin is not None:
                self.drop_late(deadline)
                begin()
            return finish(timeout, deadline)
        except VectorTimeoutError as error:
            raise multiprocessing.TimeoutError(
                f"The call to `{what}_wait` has timed out after {timeout} second(s)."
            ) from error
        except VectorStepError as error:
            failure = error
        raise self.own_error(failure)

    def forget(self) -> None:
        """Has no call pend; what runs of it goes on."""
        self.what = self._begin = self._finish = None

    def is_owing(self) -> bool:
        """Whether an env owes the result of a call that has timed out."""
        self._envs._check_open()
        return any(slot.owed is not None for slot in self._envs._slots)

    def drop_late(self, deadline: float | None) -> None:
        """Takes in the results of what timed out, so that they are nobody's.

        Raises:
            VectorTimeoutError: They have not all come in time.
        """
        while True:
            try:
                batch = self._envs.recv(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except NothingPendingError:
                return
            except VectorStepError as error:
                batch = error.batch
                for index, failure in error.failures.items():
                    logger.warn("Worker-%s failed in a call that had timed out: %s", index, repr(failure))
            self._observations.put(batch.env_ids, batch.obs)
            if deadline is not None and time.monotonic() >= deadline and self.is_owing():
                raise VectorTimeoutError("an earlier call that timed out still runs")

    def own_error(self, error: VectorStepError) -> BaseException:
        """What an env raised, for the error that says so; the other envs' observations are kept."""
        self._observations.put(error.batch.env_ids, error.batch.obs)
        return _logged(error.failures)


def _results(calls: Sequence[ActorFuture], timeout: float | None) -> tuple[Any, ...]:
    if timeout is not None and wait(calls, timeout).not_done:
        raise VectorTimeoutError("some envs have not answered")
    failures = {i: failure for i, call in enumerate(calls) if (failure := call.exception()) is not None}
    if failures:
        raise _logged(failures)
    return tuple(call.result() for call in calls)


def _logged(failures: Mapping[int, BaseException]) -> BaseException:
    """Logs what envs raised, in the words that Gymnasium has for it, and gives the last, which is raised."""
    for index, failure in failures.items():
        remote = failure.__cause__
        text = remote.text if isinstance(remote, RemoteTraceback) else "".join(traceback.format_exception(failure))
        logger.error("Received the following error from Worker-%s - Shutting it down", index)
        logger.error("%s", text)
    logger.error("Raising the last exception back to the main process.")
    return list(failures.values())[-1]
