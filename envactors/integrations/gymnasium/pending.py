"""Keep track of the call between Gymnasium's ``*_async`` and ``*_wait`` methods, and of calls that timed out.

`envactors.vector_env.VectorEnv` runs the calls; this module only remembers which one is pending.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Literal, TypeAlias

from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from envactors.actor.future import ActorFuture
from envactors.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorStartError,
    ActorTimeoutError,
    NothingPendingError,
    RemoteTraceback,
    RestartsExhaustedError,
    VectorStepError,
    VectorTimeoutError,
    cause_of,
)
from envactors.integrations.access import VectorAccess, warn_of_interrupted
from envactors.integrations.gymnasium.batches import Observations
from envactors.mailbox.pickling import safe_repr, safe_traceback
from envactors.options import as_timeout
from envactors.vector_env import VectorEnv

What: TypeAlias = Literal["reset", "step", "call"]
# Waits for results and returns them; takes a timeout in seconds.
Finish: TypeAlias = Callable[[float | None], Any]
# What Gymnasium puts after each error that it logs. Its own tests look for it behind their words.
_END_OF_COLOR = "\x1b[0m"


class Pending:
    """The pending call, and calls that timed out but are still running; results of the latter are discarded.

    Args:
        envs: Vector env that runs the calls.
        observations: Stores the observations of late results.

    Attributes:
        what: Kind of the pending call; None if no call is pending.
    """

    def __init__(self, envs: VectorEnv, observations: Observations) -> None:
        self.what: What | None = None
        self._envs = envs
        self._access = VectorAccess(envs)
        self._observations = observations
        # `_begin` starts the pending call if it has to wait for late results first, else it is None. `_finish` waits
        # for the results of the pending call.
        self._begin: Callable[[], object] | None = None
        self._finish: Finish | None = None
        self._has_timed_out = False

    def check_free(self, caller: str) -> None:
        """Raise if a call is pending.

        Args:
            caller: Name of the called method.

        Raises:
            AlreadyPendingCallError: A call is pending.
        """
        if self.what is not None:
            raise AlreadyPendingCallError(
                f"Calling `{caller}` while waiting for a pending call to `{self.what}` to complete", self.what
            )

    def start(self, what: Literal["reset", "step"], begin: Callable[[], object], finish: Finish) -> None:
        """Start a call now, or in `finish` if late results have to be discarded first."""
        if self.has_late_results():
            self._begin = begin
        else:
            begin()
        self.what, self._finish = what, finish

    def add_calls(self, calls: Sequence[ActorFuture]) -> None:
        """Record running calls, one per env, as the pending call."""
        self.what, self._finish = "call", lambda timeout: results_of(calls, timeout)

    def finish(self, what: What, timeout: float | None) -> Any:
        """Return the result of the pending call.

        Args:
            what: Expected kind of the call.
            timeout: How long to wait, in seconds; None for no limit.

        Raises:
            multiprocessing.TimeoutError: The results did not arrive in time.
            NoAsyncCallError: No call is pending, or one of another kind.
            Exception: The exception of the last env that failed.
        """
        if self.what != what:
            raise NoAsyncCallError(f"Calling `{what}_wait` without any prior call to `{what}_async`.", what)
        timeout = as_timeout(timeout, f"{what}_wait(timeout=...)")
        begin, finish = self._begin, self._finish
        assert finish is not None, "it was started"
        self.forget()
        return self._complete(what, begin, finish, timeout)

    def run(self, what: What, begin: Callable[[], object] | None, finish: Finish) -> Any:
        """Start a call and return its result. It is never pending, so that any call may follow an exception.

        Raises:
            Exception: The exception of the last env that failed.
        """
        return self._complete(what, begin, finish, None)

    def _complete(self, what: What, begin: Callable[[], object] | None, finish: Finish, timeout: float | None) -> Any:
        try:
            if begin is None:
                return finish(timeout)
            deadline = None if timeout is None else time.monotonic() + timeout
            self.discard_late_results(deadline, what)
            begin()
            return finish(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except VectorTimeoutError as error:
            self._has_timed_out = True
            raise multiprocessing.TimeoutError(
                f"The call to `{what}_wait` has timed out after {timeout} second(s)."
            ) from error
        except VectorStepError as error:
            failure = error
        raise self.own_error(failure)

    def forget(self) -> None:
        """Forget the pending call. The envs finish it if it is already running."""
        self.what = self._begin = self._finish = None

    def has_late_results(self) -> bool:
        """Return whether an env is still running a call that timed out."""
        return bool(self._access.busy())

    def discard_late_results(self, deadline: float | None, what: What) -> None:
        """Wait for the results of calls that timed out or were interrupted, and discard them before the next call.

        Raises:
            VectorTimeoutError: Some results did not arrive in time.
        """
        if what == "step" and not self._has_timed_out and self.has_late_results():
            warn_of_interrupted()
        while True:
            try:
                batch = self._envs.recv(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except NothingPendingError:
                self._has_timed_out = False
                self._access.discard()  # envs that were interrupted in-process have no results
                return
            except VectorStepError as error:
                batch = error.batch
                for index, failure in error.failures.items():
                    logger.warn("Worker-%s failed in a call that had timed out: %s", index, safe_repr(failure))
            self._observations.replace_some(batch.env_ids, batch.obs)
            if deadline is not None and time.monotonic() >= deadline and self.has_late_results():
                raise VectorTimeoutError("an earlier call that timed out is still running")

    def own_error(self, error: VectorStepError) -> BaseException:
        """Store the observations of the other envs, and return the exception to raise for a failed step."""
        self._observations.replace_some(error.batch.env_ids, error.batch.obs)
        return _logged(error.failures)


def results_of(calls: Sequence[ActorFuture], timeout: float | None) -> tuple[Any, ...]:
    """Return the results of calls, one per env, or raise the exception of the last one that failed."""
    if timeout is not None and wait(calls, timeout).not_done:
        raise VectorTimeoutError("some envs have not answered")
    failures = {i: failure for i, call in enumerate(calls) if (failure := call.exception()) is not None}
    if failures:
        raise _logged(failures)
    return tuple(call.result() for call in calls)


def _logged(failures: Mapping[int, BaseException]) -> BaseException:
    """Log exceptions from envs, with the words that Gymnasium's tests expect; return the last one, to be raised."""
    for index, failure in failures.items():
        remote = cause_of(failure)
        text = remote.text if isinstance(remote, RemoteTraceback) else "".join(safe_traceback(failure))
        logger.error(
            "Received the following error from Worker-%s - Shutting it down%s is what AsyncVectorEnv does then: here "
            "its process %s",
            *(index, _END_OF_COLOR, _fate_of_process(failure)),
        )
        logger.error("%s", text)
    logger.error("Raising the last exception back to the main process.")
    return list(failures.values())[-1]


def _fate_of_process(failure: BaseException) -> str:
    if isinstance(failure, (ActorClosedError, RestartsExhaustedError)):
        return "has ended and is not started again"
    has_ended = isinstance(failure, (ActorDiedError, ActorStartError, ActorTimeoutError))
    return "has ended: the env needs a reset" if has_ended else "continues"
