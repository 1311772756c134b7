"""How the results of single envs become a batch, and how the spec of their observations is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.mailbox.messages import Description
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import Spec, conform, leaves, spec_of_value, stack
from envactors.vector.results import Batch, EnvStep


class Batcher:
    """Batches results of single envs.

    Args:
        described: The specs of one env.

    Attributes:
        observation_spec: Spec of one env's observation; None until the first observation, if envs have no space.
        is_plain: Whether that spec is known from the beginning, and has no leaves that are objects.
    """

    def __init__(self, described: Description) -> None:
        self.observation_spec: Spec | None = described.observation
        self._learns = described.observation is None
        self.is_plain: bool = not self._learns and all(leaf.batchable for leaf in leaves(described.observation or ()))
        self._reward_spec = described.reward
        self._has_plain_rewards = described.reward == PLAIN_REWARD

    def batch(
        self, ids: npt.NDArray[np.int64], fields: Sequence[Sequence[Any]], incarnations: npt.NDArray[np.int64]
    ) -> Batch:
        """Batch results.

        Args:
            ids: The envs.
            fields: What their steps have returned: the observation, which conforms to the spec, the reward, whether the
                episode terminated or was truncated, and the info.
            incarnations: The processes of the envs.
        """
        observations, rewards, terminated, truncated, infos = zip(*fields, strict=True) if fields else ((),) * 5
        obs = [] if self.observation_spec is None else stack(self.observation_spec, observations)
        all_rewards = np.array(rewards, np.float64) if self._has_plain_rewards else stack(self._reward_spec, rewards)
        # `np.array` takes twice as long for flags.
        flags = [np.fromiter(each, np.bool_, len(fields)) for each in (terminated, truncated)]
        return Batch(ids, obs, all_rewards, flags[0], flags[1], list(infos), incarnations)

    def batch_steps(self, steps: Sequence[EnvStep]) -> tuple[Batch, dict[int, BaseException]]:
        """Batch results, and return the errors of those that do not conform to the others."""
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            if self.observation_spec is None:
                self.observation_spec = spec_of_value(step.obs)
            try:
                if self._learns:
                    obs = conform(self.observation_spec, step.obs, f"the observation of env {step.env_id}")
                    conforming.append(step._replace(obs=obs))
                else:
                    conforming.append(step)
            except SpaceMismatchError as error:
                errors[step.env_id] = error
        ids = np.array([step.env_id for step in conforming], np.int64)
        incarnations = np.array([step.incarnation for step in conforming], np.int64)
        return self.batch(ids, [step[1:6] for step in conforming], incarnations), errors
