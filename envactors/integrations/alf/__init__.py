"""Drop-in for ALF: `ActorParallelEnvironment` replaces ``FastParallelEnvironment``. ALF need not be installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.alf.adapter import StepType as StepType
    from envactors.integrations.alf.adapter import TimeStep as TimeStep
    from envactors.integrations.alf.envs import ActorEnvironment as ActorEnvironment
    from envactors.integrations.alf.parallel_environment import ActorParallelEnvironment as ActorParallelEnvironment
else:
    __getattr__ = exports(
        __name__,
        {
            "adapter": "StepType TimeStep",
            "envs": "ActorEnvironment",
            "parallel_environment": "ActorParallelEnvironment",
        },
    )

__all__ = ["ActorEnvironment", "ActorParallelEnvironment", "StepType", "TimeStep"]
