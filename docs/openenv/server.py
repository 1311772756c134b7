"""Serves an OpenEnv environment that crashes, hangs, and leaks, to clients that keep training."""

import asyncio
import threading
import time

import uvicorn
from bandit import Bandit, Payout, Pull  # your Environment; here some pulls crash, some hang, and resets leak
from openenv.core.env_server.http_server import create_app
from openenv.core.generic_client import GenericEnvClient

from envactors.integrations.openenv import on_actors

# One line changes; a call that takes longer than a second ends its session.
actors = on_actors(Bandit, 8, standbys=2, deadlines=1.0)
app = create_app(actors, Pull, Payout, max_concurrent_envs=8)

# In a thread, so that this is one script; serve yours with `uvicorn.run(app)`.
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.01)
url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

wins, pulls, failures = [1] * 5, [2] * 5, []


async def train(seed):
    """Pull the arm that seems best; begin the episode again after a failure."""
    async with GenericEnvClient(base_url=url, message_timeout_s=120) as env:
        for episode in range(4):
            result = await env.reset(seed=100 * seed + episode)
            assert result.observation["leaked"] <= 4  # of this session: no other one shares its process
            while not result.done:
                arm = max(range(5), key=lambda arm: wins[arm] / pulls[arm])
                try:
                    result = await env.step({"arm": arm})
                except RuntimeError as error:  # the protocol error of this session
                    failures.append(str(error))
                    break
                pulls[arm] += 1
                wins[arm] += result.reward


async def main():
    for first in range(0, 24, 8):
        await asyncio.gather(*map(train, range(first, first + 8)))


asyncio.run(main())
print(f"{len(failures)} failures; the best arm is {max(range(5), key=lambda arm: wins[arm] / pulls[arm])}")
assert any("SIGSEGV" in failure for failure in failures)
assert any("deadline" in failure for failure in failures)
server.should_exit = True
thread.join()
actors.shared.close()
