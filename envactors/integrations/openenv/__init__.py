"""OpenEnv: an environment server that runs each session in a separate process.

Import `on_actors` from here. It needs ``openenv-core>=0.3``, which this module imports.
"""

from envactors.integrations.openenv.environment import on_actors

__all__ = ["on_actors"]
