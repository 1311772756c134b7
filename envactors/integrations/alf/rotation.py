"""Fewer places than envs: an env that resets waits in a queue, and the one that is ready longest takes its place.

    an episode ends ──▶ its env resets at once, at the back of the queue ──▶ ... ──▶ the front
    the next step   ──▶ the place takes the env at the front, whose reset is its result

So resets that take far longer than steps hold nobody up, as long as there are enough envs. Without spare envs each
place gets its own env back, whose reset has had the time between two steps.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.errors import VectorInputError, VectorStepError
from envactors.mailbox.specs import split_batch
from envactors.options import is_int
from envactors.vector.access import VectorAccess
from envactors.vector.facade import VectorEnv
from envactors.vector.inputs import seeds_for


class Rotation:
    """Steps some envs of a vector while the others reset.

    Which env has which place depends on nothing but when episodes end: a run can be repeated. An env whose process was
    lost under ``on_failure="renew"`` goes to the back of the queue too, so that its new process holds nobody up.

    Args:
        envs: All envs, with ``autoreset="next_step"``. While a rotation steps them, nobody else does; calls and
            attributes are free.
        places: How many of them step at a time: at first the first ones.

    Attributes:
        env_ids: Which env is at each place; one whose episode has ended stays until the next step.

    Raises:
        VectorInputError: Another autoreset, or a number of places that makes no sense.
    """

    def __init__(self, envs: VectorEnv, places: int) -> None:
        self._envs = envs
        self._access = VectorAccess(envs)
        if self._access.autoreset != "next_step":
            raise VectorInputError(
                f"autoreset is {self._access.autoreset!r}: expected 'next_step', whose resets are steps"
            )
        self.env_ids: list[int] = list(range(_check_places(places, envs.num_envs)))
        # The envs that have no place, the one that is ready longest first.
        self._queue: deque[int] = deque()
        # The places whose episodes have ended.
        self._ended: list[int] = []

    def reset(self, seed: int | Sequence[int | None] | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all envs and wait for the first ones, which take the places; the others follow in order.

        Resets that are under way are waited for.

        Args:
            seed: As for `VectorEnv.reset` of all envs, those in the queue too.

        Returns:
            ``(obs, infos)``, a row per place.

        Raises:
            VectorStepError: An env that has a place failed; of one in the queue it is raised when its turn comes.
        """
        access, everyone = self._access, list(range(self._envs.num_envs))
        busy, seeds = access.busy(), seeds_for(seed, everyone)
        if busy:
            with contextlib.suppress(VectorStepError):  # it is reset again, whatever became of it
                access.gather(busy, None, "reset")
        places = len(self.env_ids)
        access.start_reset(everyone, seeds, [None] * len(everyone))
        self.env_ids = everyone[:places]
        self._queue = deque(everyone[places:])
        self._ended = []
        batch = access.gather(self.env_ids, None, "reset")
        return batch.obs, batch.infos

    def step(self, actions: Any) -> Any:
        """Step the envs at all places and wait for them; the action of a place whose episode has ended is ignored.

        Args:
            actions: As for `VectorEnv.step`, a row per place.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``, a row per place. The row of a place that has taken an
            env from the queue is that env's reset, with reward 0.

        Raises:
            VectorStepError: An env failed. A death is followed by `reset`; an exception need not be.
            VectorInputError: Wrong actions, or an env that needs a reset first.
        """
        result = self._rotate(actions) if self._ended or self._queue else self._envs.step(actions)
        self._ended = []
        if True in result[2].tolist() or True in result[3].tolist():
            self._ended = np.flatnonzero(result[2] | result[3]).tolist()
            self._start(actions, self._ended, self.env_ids)
            self._queue.extend(self.env_ids[place] for place in self._ended)
        return result

    def _rotate(self, actions: Any) -> Any:
        ended, env_ids = self._ended, self.env_ids.copy()
        for place, env_id in zip(ended, self._queue, strict=False):
            env_ids[place] = env_id
        self._start(actions, [place for place in range(len(env_ids)) if place not in ended], env_ids)
        # Only now is nothing refused any more.
        self.env_ids, self._ended = env_ids, []
        for _ in ended:
            self._queue.popleft()
        return self._access.gather(env_ids, None, "step")[1:6]

    def _start(self, actions: Any, places: list[int], env_ids: list[int]) -> None:
        values = split_batch(self._envs.action_spec, actions, len(env_ids), "actions")
        self._access.start_steps([env_ids[place] for place in places], [values[place] for place in places])


def _check_places(places: object, count: int) -> int:
    """Return a number of envs that step at a time.

    Raises:
        VectorInputError: No int from 1 to the number of envs.
    """
    if not is_int(places) or places > count:
        raise VectorInputError(f"places is {places!r} for {count} envs: expected an int from 1 to that")
    return places
