"""Fewer places than envs: who resets waits in a queue, and its place goes to whoever has been ready longest.

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

from envactors.arrays.specs import split_batch
from envactors.errors import VectorInputError, VectorStepError
from envactors.vector.facade import VectorEnv, seeds_for


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
        autoreset = envs._slots[0]._autoreset
        if autoreset != "next_step":
            raise VectorInputError(f"autoreset is {autoreset!r}: expected 'next_step', whose resets are steps")
        if isinstance(places, bool) or not isinstance(places, int) or not 1 <= places <= envs.num_envs:
            raise VectorInputError(f"places is {places!r} for {envs.num_envs} envs: expected an int from 1 to that")
        self.env_ids = list(range(places))
        self._envs = envs
        self._queue: deque[int] = deque()
        self._ended: list[int] = []

    def reset(self, seed: int | Sequence[int | None] | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Resets all envs and waits for the first ones, which take the places; the others follow in order.

        Resets that are under way are waited for.

        Args:
            seed: As for `VectorEnv.reset` of all envs, those in the queue too.

        Returns:
            ``(obs, infos)``, a row a place.

        Raises:
            VectorStepError: An env that has a place failed; of one in the queue it is raised when its turn comes.
        """
        envs = self._envs
        everyone = envs._select(None)
        seeds = seeds_for(seed, [slot.env_id for slot in everyone])
        busy = [slot for slot in everyone if slot.owed is not None]
        if busy:
            with contextlib.suppress(VectorStepError):  # it is reset again, whatever became of it
                envs._gather(busy, None, None, "reset")
        places = len(self.env_ids)
        envs._begin_reset(everyone, seeds, [None] * len(everyone))
        self.env_ids = list(range(places))
        self._queue = deque(range(places, len(everyone)))
        self._ended = []
        batch = envs._gather(everyone[:places], None, None, "reset")
        return batch.obs, batch.infos

    def step(self, actions: Any) -> Any:
        """Steps the envs at all places and waits for them; the action of a place whose episode has ended is ignored.

        Args:
            actions: As for `VectorEnv.step`, a row a place.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``, a row a place. The row of a place that has taken an env
            from the queue is that env's reset, with reward 0.

        Raises:
            VectorStepError: An env failed. A death is followed by `reset`; an exception need not be.
            VectorInputError: Wrong actions, or an env that needs a reset first.
        """
        result = self._rotate(actions) if self._ended or self._queue else self._envs.step(actions)
        self._ended = []
        if True in result[2].tolist() or True in result[3].tolist():
            self._ended = np.flatnonzero(result[2] | result[3]).tolist()
            self._begin(actions, self._ended, self.env_ids)
            self._queue.extend(self.env_ids[place] for place in self._ended)
        return result

    def _rotate(self, actions: Any) -> Any:
        ended, env_ids = self._ended, self.env_ids.copy()
        for place, env_id in zip(ended, self._queue, strict=False):
            env_ids[place] = env_id
        self._begin(actions, [place for place in range(len(env_ids)) if place not in ended], env_ids)
        # Only now is nothing refused any more.
        self.env_ids, self._ended = env_ids, []
        for _ in ended:
            self._queue.popleft()
        slots = self._envs._select(env_ids)
        return self._envs._gather(slots, None, None, "step")[1:6]

    def _begin(self, actions: Any, places: list[int], env_ids: list[int]) -> None:
        values = split_batch(self._envs.action_spec, actions, len(env_ids), "actions")
        slots = self._envs._select([env_ids[place] for place in places])
        self._envs._begin(slots, [values[place] for place in places], one_by_one=False)
