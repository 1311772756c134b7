"""OpenEnv: an environment server whose sessions each have a process of their own.

Import `on_actors` from here. It needs ``openenv-core>=0.3``, which this module imports.
"""

from envactors.integrations.openenv.environment import on_actors

__all__ = ["on_actors"]
