"""Convert between ALF's values, which are nests of tensors, and the records that workers send.

The module uses the classes of ALF and torch if they are installed. Workers do not import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.integrations.alf.adapter import Described, StepType, TimeStep, packer, record_of

__all__ = ["AlfEnvironment", "AlfTimeStep", "Records", "alf", "torch"]

try:
    import torch
except ImportError:
    torch = None
try:
    import alf
    from alf.data_structures import TimeStep as AlfTimeStep
    from alf.environments.alf_environment import AlfEnvironment
except ImportError:  # ALF is not installed, or another package has its name
    alf, AlfTimeStep, AlfEnvironment = None, TimeStep, object


class Records:
    """Converts records to time steps, and actions to arrays.

    Args:
        described: Specs and properties of the envs.
        slots: Number of slots.

    Attributes:
        batch_size: The number of rows of a batch.
    """

    def __init__(self, described: Described, slots: int) -> None:
        self.batch_size: int = slots * described.batch_size
        self._nests_actions = described.nests_actions
        self._action_leaves, self._outer = described.action_leaves(), described.outer
        leaves = described.leaves()
        self._record = record_of(leaves)
        self._names = [str(index) for index in range(len(leaves))]
        self._makers = [packer(nest) for nest in described.fields().values()]
        # The position of ``env_id`` among the arrays of a time step.
        self._env_id_at = sum(not leaf.name.startswith(("untransformed", "env_info")) for leaf in leaves)
        self._env_ids = np.arange(self.batch_size, dtype=np.int32)

    def actions(self, action: Any) -> Any:
        """Convert a nest of actions to arrays with the slots along axis 0.

        Raises:
            SpaceMismatchError: The actions do not have the structure of the spec, or one row per slot.
        """
        if not self._nests_actions:
            return self._action("action", action)
        return tuple(self._action(leaf.name, leaf.of(action)) for leaf in self._action_leaves)

    def time_step(self, records: npt.NDArray[np.uint8], ended: npt.NDArray[np.bool_] | None) -> Any:
        """Convert records to a time step.

        Args:
            records: One record per slot.
            ended: Whether the facade, rather than the env, ended the episode of each slot; None if there is none.
        """
        fields = np.frombuffer(records, self._record)
        arrays = [fields[name].copy() for name in self._names]
        if ended is not None:
            step_type, reward, discount = arrays[:3]
            step_type[ended], reward[ended], discount[ended] = StepType.LAST, 0, 1
        if self._outer:
            arrays = [array.reshape(self.batch_size, *array.shape[2:]) for array in arrays]
        arrays.insert(self._env_id_at, self._env_ids.copy())
        if torch is not None:
            arrays = [torch.from_numpy(array) for array in arrays]
        result = self._packed(arrays)
        if alf is not None and alf.get_default_device() != "cpu":
            there = self._packed([array.to(alf.get_default_device()) for array in arrays])
            vars(there)["_cpu"] = result  # ALF reads this attribute
            return there
        return result

    def _action(self, name: str, value: Any) -> npt.NDArray[Any]:
        to_numpy = getattr(value, "numpy", None)
        array = np.asarray(value if to_numpy is None else to_numpy(force=True))
        if array.shape[:1] != (self.batch_size,):
            raise SpaceMismatchError(f"{name} has shape {array.shape}: expected {self.batch_size} rows, one per slot")
        return array.reshape(-1, *self._outer, *array.shape[1:]) if self._outer else array

    def _packed(self, arrays: list[Any]) -> Any:
        values = iter(arrays)
        return AlfTimeStep(*[make(values) for make in self._makers])
