"""What the page for users of ALF imports: an env with the interface of an ``AlfEnvironment``."""

import numpy as np

from envactors.integrations.alf import StepType, TimeStep


class Spec:  # noqa: PLW1641
    """Replaces alf.TensorSpec."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def __eq__(self, other):
        return (self.shape, self.dtype) == (other.shape, other.dtype)


class Walk:
    """Replaces an AlfEnvironment."""

    is_tensor_based, batched, batch_size, num_tasks, task_names = False, False, 1, 1, ["0"]

    def __init__(self, env_id):
        self.env_id = env_id

    def observation_spec(self):
        return Spec((2,), "float32")

    def action_spec(self):
        return Spec((), "int64")

    def reward_spec(self):
        return Spec((), "float32")

    def env_info_spec(self):
        return {}

    def time_step_spec(self):
        number = Spec((), "float32")
        return TimeStep(
            Spec((), "int32"), number, number, self.observation_spec(), self.action_spec(), Spec((), "int32")
        )

    def seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.place = 0
        return self.show(StepType.FIRST, 0)

    def step(self, action):
        if self.place == 3:
            return self.reset()
        self.place += 1
        return self.show(StepType.LAST if self.place == 3 else StepType.MID, action)

    def show(self, step_type, action):
        observation = np.array([self.env_id, self.place], np.float32)
        return TimeStep(step_type, np.float32(1), np.float32(step_type != StepType.LAST), observation, np.int64(action))

    def close(self):
        pass
