"""How the results of single envs become a batch, and how the spec of their observations is learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envactors.errors import SpaceMismatchError
from envactors.mailbox.messages import Description
from envactors.mailbox.specs import Spec, conform_to_first, spec_of_value, stack
from envactors.vector.results import Batch, EnvStep


class Batcher:
    """Batches results of single envs.

    Args:
        described: The specs of one env.

    Attributes:
        observation_spec: Spec of one env's observation; None until the first observation, if envs have no space.
        infers_spec: Whether that spec follows from the first observation. Workers do not know it.
    """

    def __init__(self, described: Description) -> None:
        self.observation_spec: Spec | None = described.observation
        self.infers_spec: bool = described.observation is None
        self._reward_spec = described.reward
        # The env with the first observation, which fixed the spec if it is not declared.
        self._first_env: int = 0

    def batch_steps(self, steps: Sequence[EnvStep]) -> tuple[Batch, dict[int, BaseException]]:
        """Batch results, and return the errors of those that do not conform to the others."""
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            obs = step.obs
            if self.observation_spec is None:
                self.observation_spec, self._first_env = spec_of_value(obs), step.env_id
            try:
                if self.infers_spec:
                    what = f"the observation of env {step.env_id}"
                    obs = conform_to_first(self.observation_spec, obs, what, self._first_env)
                conforming.append(step._replace(obs=obs))
            except SpaceMismatchError as error:
                errors[step.env_id] = error
        columns = zip(*conforming, strict=True) if conforming else ((),) * len(EnvStep._fields)
        ids, observations, rewards, terminated, truncated, infos, incarnations = columns
        obs = [] if self.observation_spec is None else stack(self.observation_spec, observations)
        flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        env_ids, processes = np.array(ids, np.int64), np.array(incarnations, np.int64)
        return Batch(env_ids, obs, stack(self._reward_spec, rewards), *flags, list(infos), processes), errors
