"""verifiers: tasks whose rewards and metrics are computed in leased processes.

Import `on_actors` from here. It needs ``verifiers>=0.4``, which this module imports.
"""

from envactors.integrations.verifiers.taskset import on_actors

__all__ = ["on_actors"]
