"""Requests of envs in workers, and results out of their rows."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from envactors.actor.future import ActorFuture, Outcome
from envactors.mailbox.info_codec import join


class RowResult(NamedTuple):
    """A result that was copied out of its row. Its pickled parts are read later, since that runs code of users.

    Attributes:
        leaves: The leaves of the observation; None for each one that is an object, which is in ``content``.
        reward: The reward; None if it is an object, which is in ``content``, too.
        content: The info and the objects, pickled; None if the info is empty and there are no objects.
        error: The error of an earlier attempt, which the info will have as ``info["failure"]``; None for none.
        before: The last result of the episode that the failure has ended, for ``final_obs`` and ``final_info`` of the
            info; None for none.
    """

    env_id: int
    leaves: list[Any]
    reward: Any
    terminated: bool
    truncated: bool
    content: bytes | memoryview | None
    incarnation: int
    error: Outcome | None = None
    before: RowResult | None = None


class ResetAnswer(NamedTuple):
    """The known part of the answer to a request whose env the next process resets. The reset completes the answer.

    The observation of the answer is always that of the reset. The rest depends on the request:

    request                             reward              terminated, truncated   ``final_obs``, ``final_info``
    a call of ``reset`` that failed     of the reset        of the reset            none
    a step that failed                  of the reset        False, True             of the last result before
    a step that ended its episode       of the step         of the step             of the step
    in a process to be recycled

    If an attempt has failed, ``info["failure"]`` is its error. That is always so for the first two.

    Attributes:
        ended_step: The step that has ended its episode; None if the request has failed.
        truncates: Whether the request is a step that has failed.
        before: The last result before a step that has failed; None if it has none.
        error: The error of the last attempt; None if none has failed.
    """

    ended_step: RowResult | None = None
    truncates: bool = False
    before: RowResult | None = None
    error: Outcome | None = None

    def complete(self, reset: RowResult) -> RowResult:
        """Return the answer, given the result of the reset. Runs no code of users."""
        step = self.ended_step
        if step is None:
            return reset._replace(truncated=self.truncates, error=self.error, before=self.before)
        content = reset.content
        if step.content is not None:  # env code may have overwritten the marker of its info
            content = join(content, step.content, takes_reward=step.reward is None)
        return step._replace(leaves=reset.leaves, content=content, incarnation=reset.incarnation, error=self.error)


@dataclasses.dataclass(slots=True, eq=False)
class EnvRequest:
    """The request of an env.

    A bare step needs no `EnvRequest`: its action is in the row, and the vector delivers its result.

    Attributes:
        method: The method that the user called.
        future: The future of the outcome; None if the vector delivers it.
        seed: The user's seed for a reset.
        payload: The pickled action, or the pickled options of a reset; None if the row contains all of the request.
        partial_answer: The part of the answer that is known, if a reset in the next process answers the request; None
            if the request runs as it is.
    """

    method: Literal["step", "reset"]
    future: ActorFuture | None = None
    seed: int | None = None
    payload: bytes | None = None
    partial_answer: ResetAnswer | None = None

    @property
    def runs_reset(self) -> bool:
        """Whether the worker runs a reset for it. That of a step by autoreset does not count."""
        return self.method == "reset" or self.partial_answer is not None
