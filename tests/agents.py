"""Node agents that are forked from an interpreter which has imported what they need.

The forks run the agent's own main function, with what they would get from their caller (see `program_server`).
`quick_agents` puts them in the place of the agents of `LocalNodes`; tests of how agents start have fresh ones.
"""

from __future__ import annotations

import json
import os

from program_server import ProgramServer

_MAIN = """
from envactors.remote.agent import main
main()
"""


class AgentServer(ProgramServer):
    """Forks agents.

    Args:
        modules: The modules that workers may need.
    """

    def __init__(self, modules):
        super().__init__(modules=["envactors.remote.agent", *modules])

    def start_agent(self, orders):
        """Does what `envactors.remote.starting.start_agent` does."""
        agent = self.start(_MAIN)
        agent.stdin.write(json.dumps(orders._asdict(), default=os.fspath) + "\n")
        agent.stdin.flush()
        return agent
