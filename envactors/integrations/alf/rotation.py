"""Step fewer envs than there are: while an env resets, a spare env that is already reset takes its place.

    an episode ends ──▶ its env begins to reset, and joins the end of the queue ──▶ ... ──▶ the front
    the next step   ──▶ the env at the front takes the place, and its reset is the result

Slow resets therefore do not delay steps, as long as there are enough spare envs. Without spare envs, each place gets
its own env back, which has reset between the two steps. `envactors.vector` runs the envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.errors import VectorInputError
from envactors.integrations.access import VectorAccess
from envactors.mailbox.specs import split_batch
from envactors.options import is_int
from envactors.vector.inputs import seeds_for
from envactors.vector_env import VectorEnv


class Rotation:
    """Steps some envs of a vector while the others reset.

    Only the lengths of episodes determine which env has which place, so a run is reproducible. With
    ``on_failure="renew"``, an env whose process crashed also joins the end of the queue, so that restarting it delays
    no step.

    Args:
        envs: All envs, with ``autoreset="next_step"``. Only the rotation may step or reset them; other calls and
            attributes are allowed.
        places: How many envs step at a time. The first ``places`` envs begin.

    Attributes:
        env_ids: The env at each place. An env whose episode has ended keeps its place until the next step.

    Raises:
        VectorInputError: ``autoreset`` is not ``"next_step"``, or ``places`` is out of range.
    """

    def __init__(self, envs: VectorEnv, places: int) -> None:
        self._envs = envs
        self._access = VectorAccess(envs)
        if self._access.autoreset != "next_step":
            raise VectorInputError(
                f"autoreset is {self._access.autoreset!r}: expected 'next_step', with which the step after the end of "
                "an episode resets the env"
            )
        self.env_ids: list[int] = list(range(_check_places(places, envs.num_envs)))
        # The envs without a place, in the order in which they began to reset.
        self._queue: list[int] = []
        # The places whose episodes ended in the last step.
        self._ended: list[int] = []

    def reset(self, seed: int | Sequence[int | None] | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all envs and wait for the first ones, which take the places. The others join the queue in order.

        If steps or resets are pending, wait for them first.

        Args:
            seed: As for `VectorEnv.reset`, for all envs including those in the queue.

        Returns:
            ``(obs, infos)``, with one row per place.

        Raises:
            VectorStepError: An env with a place failed. The failure of an env in the queue is raised when that env
                takes a place.
        """
        access, everyone = self._access, list(range(self._envs.num_envs))
        seeds = seeds_for(seed, everyone)
        access.discard()
        places = len(self.env_ids)
        access.start_reset(everyone, seeds, [None] * len(everyone))
        self.env_ids = everyone[:places]
        self._queue = everyone[places:]
        self._ended = []
        batch = access.gather(self.env_ids, None, "reset")
        return batch.obs, batch.infos

    def step(self, actions: Any) -> Any:
        """Step the envs at all places and wait for them; the action of a place whose episode has ended is ignored.

        Args:
            actions: As for `VectorEnv.step`, with one row per place.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``, with one row per place. If an env from the queue took a
            place, its row is the result of the reset, with reward 0.

        Raises:
            VectorStepError: An env failed. After a crash, `reset` must be called; after an exception this is optional.
            VectorInputError: The actions are invalid, or an env needs a reset first.
        """
        involved = [*self.env_ids, *self._queue[: len(self._ended)]]
        result = self._access.retry_interrupted(lambda: self._step(actions), list(dict.fromkeys(involved)))
        if True in result[2].tolist() or True in result[3].tolist():
            ended: list[int] = np.flatnonzero(result[2] | result[3]).tolist()
            # One statement, so that no interrupt comes between.
            self._ended, self._queue = ended, self._queue + [self.env_ids[place] for place in ended]
            self._start(actions, ended, self.env_ids)
        return result

    def _step(self, actions: Any) -> Any:
        return self._rotate(actions) if self._ended or self._queue else self._envs.step(actions)

    def _rotate(self, actions: Any) -> Any:
        ended, env_ids = self._ended, self.env_ids.copy()
        for place, env_id in zip(ended, self._queue, strict=False):
            env_ids[place] = env_id
        # An interrupt may have left an env of the queue without its reset.
        reset = self._access.receivable() if ended else []
        due = [place for place, env_id in enumerate(env_ids) if place not in ended or env_id not in reset]
        self._start(actions, due, env_ids)
        # All checks have passed, so the places can change.
        self.env_ids, self._ended, self._queue = env_ids, [], self._queue[len(ended) :]
        return self._access.gather_results(env_ids, None, "step")

    def _start(self, actions: Any, places: list[int], env_ids: list[int]) -> None:
        values = split_batch(self._envs.action_spec, actions, len(env_ids), "actions")
        self._access.start_steps([env_ids[place] for place in places], [values[place] for place in places])


def _check_places(places: object, count: int) -> int:
    """Return a valid number of places.

    Raises:
        VectorInputError: ``places`` is not an int from 1 to the number of envs.
    """
    if not is_int(places) or places > count:
        raise VectorInputError(f"places is {places!r} for {count} envs: expected an int from 1 to {count}")
    return places
