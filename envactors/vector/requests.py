"""Requests of envs in workers, and results out of their rows."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from envactors.actor.future import ActorFuture, Outcome
from envactors.mailbox.info_codec import join


class RowResult(NamedTuple):
    """A result that was copied out of its row, not unpickled yet.

    Attributes:
        leaves: The leaves of the observation; None for those that are objects.
        reward: The reward; None if it is an object that was not unpickled yet.
        content: The info and the objects, pickled; None if the info is empty and there are no objects.
        failure: The error that the info reports, too; None for none.
        before: The last result of an episode that the failure has ended, which the info then reports; None for none.
    """

    env_id: int
    leaves: list[Any]
    reward: Any
    terminated: bool
    truncated: bool
    content: bytes | memoryview | None
    incarnation: int
    failure: Outcome | None = None
    before: RowResult | None = None


class ResetAnswer(NamedTuple):
    """The part of an answer that is known before a reset in the next process completes it.

    A reset answers three kinds of requests:

        request                          reward, flags           final_obs, final_info     failure
        a reset that has failed          of the reset                                      the error
        a step that has failed           of the reset, but       of the last result        the error
                                         truncated
        a step that ended its episode    of the step             of the step               the error, if an earlier
        in a process to be recycled                                                        reset has failed

    Attributes:
        step: The last result before the reset: for a step that ended its episode, its own. None for a failed reset, or
            if there is none.
        truncates: Whether it is a step that has failed.
        error: The error of the last attempt; None without one.
    """

    step: RowResult | None
    truncates: bool
    error: Outcome | None = None

    def complete(self, reset: RowResult) -> RowResult:
        """Return the answer, given the result of the reset. Runs no code of users."""
        step = self.step
        if step is None or self.truncates:
            return reset._replace(truncated=self.truncates, failure=self.error, before=step)
        content = reset.content
        if step.content is not None:  # env code may have overwritten the marker of its info
            content = join(content, step.content, takes_reward=step.reward is None)
        return step._replace(leaves=reset.leaves, content=content, incarnation=reset.incarnation, failure=self.error)


@dataclasses.dataclass(slots=True, eq=False)
class EnvRequest:
    """The request of an env.

    A bare step needs no `EnvRequest`: its action is in the row, and the vector delivers its result.

    Attributes:
        method: The method that the user called.
        future: The future of the outcome; None if the vector delivers it.
        seed: The user's seed for a reset.
        payload: The pickled action, or the pickled options of a reset; None if the row contains all of the request.
        answer: The part of the answer that is known if the next process answers it with a reset; else None.
    """

    method: Literal["step", "reset"]
    future: ActorFuture | None = None
    seed: int | None = None
    payload: bytes | None = None
    answer: ResetAnswer | None = None

    @property
    def resets(self) -> bool:
        """Whether the worker runs a reset for it. That of a step by autoreset does not count."""
        return self.method == "reset" or self.answer is not None
