"""
Language-model agents with asyncio
==================================

Agents that use tools take turns of different lengths: a search, a download, an answer of the model. Each episode is a
coroutine with a session: an env in its own process. One inference server answers all episodes in batches. A tool
that hangs costs its own episode a deadline and a retry, and the others nothing.
"""

# %%
# The env is any class: its methods are the tools. They sleep as tools do, and ``open_page`` hangs at times. The env
# needs no spaces, no ``step``, and no base class.

from __future__ import annotations

import asyncio
import random
import time

import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

NUM_AGENTS, EPISODES = 16, 48


class Library:
    """Knows a fact, on one of its pages."""

    def begin(self, seed):
        self.rng = random.Random(seed)
        self.page = self.rng.randrange(5)
        return "which page has the fact?"

    def search(self, query):
        time.sleep(self.rng.uniform(0.02, 0.06))
        return f"try page {self.rng.choice([self.page, self.rng.randrange(5)])}"

    def open_page(self, page):
        time.sleep(60 if self.rng.random() < 0.08 else self.rng.uniform(0.01, 0.03))
        return "the fact" if page == self.page else "nothing"


# %%
# The server plays the language model: it takes all waiting prompts, and a batch of many takes little
# longer than a batch of one. A real server (vLLM, SGLang, an API) is awaited in the same place.


class Server:
    def __init__(self):
        self.prompts, self.batches = asyncio.Queue(), []

    async def ask(self, prompt):
        answer = asyncio.get_running_loop().create_future()
        await self.prompts.put((prompt, answer))
        return await answer

    async def run(self):
        while True:
            batch = [await self.prompts.get()]
            while not self.prompts.empty():
                batch.append(self.prompts.get_nowait())
            await asyncio.sleep(0.02 + 0.001 * len(batch))
            self.batches.append(len(batch))
            for prompt, answer in batch:
                answer.set_result(int(prompt[-1]) if prompt.startswith("try page") else "search")


# %%
# An episode: ask the model, call the tool that it names, until the fact is found. The episode returns a reward. If a
# tool misses its deadline, the session fails with ``kind="timeout"``, and ``retries`` begins the episode again in a new
# process, here with another seed.

spans = []
tries = [0] * EPISODES
rows = list(range(NUM_AGENTS))


async def timed(row, what, awaitable):
    begun = time.perf_counter()
    try:
        return await awaitable
    except ea.ActorTimeoutError:
        what = "deadline"
        raise
    finally:
        spans.append((row, what, begun, time.perf_counter() - begun))


async def play(env, server, seed, row):
    seen = await env.begin(seed)
    turns = 0
    while seen != "the fact":
        turns += 1
        answer = await timed(row, "model", server.ask(seen))
        call = env.search(seen) if answer == "search" else env.open_page(answer)
        seen = await timed(row, "tool", call)
    return 1 / turns


async def main(pool):
    server = Server()
    serving = asyncio.create_task(server.run())

    async def episode(env, task):
        tries[task] += 1
        row = rows.pop()
        try:
            return await play(env, server, task + 1000 * tries[task], row)
        finally:
            rows.append(row)

    outcomes = [outcome async for outcome in pool.arun(episode, range(EPISODES), retries=10)]
    serving.cancel()
    return server.batches, outcomes


with ea.SessionPool(Library, NUM_AGENTS, standbys=4, deadlines=0.5) as pool:
    batches, outcomes = asyncio.run(main(pool))
    stats = pool.stats()

# %%
# Each task has one outcome. A failure has no value, so that it is never taken for a reward of 0.

rewards = [outcome.value for outcome in outcomes if isinstance(outcome, ea.Completed)]
hung = stats.outcomes["timeout"]
print(f"{len(rewards)} episodes with a mean reward of {np.mean(rewards):.2f}, {hung} tools hung")
assert len(outcomes) == len({outcome.task for outcome in outcomes}) == EPISODES
assert hung == sum(what == "deadline" for _, what, _, _ in spans) > 0
assert np.mean(batches) > 2

# %%
# Each row shows one session after another. If a tool hangs, its deadline ends the session; the others continue.

begun = min(span[2] for span in spans)
fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
for what, color in (("model", "C0"), ("tool", "C2"), ("deadline", "C3")):
    for row in range(NUM_AGENTS):
        bars = [(start - begun, length) for number, kind, start, length in spans if (number, kind) == (row, what)]
        ax.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    ax.barh(
        0, 0, color=color, label={"deadline": "tool that hangs, until its deadline"}.get(what, f"waits for the {what}")
    )
ax.set(xlabel="time (s)", ylabel="session", yticks=range(0, NUM_AGENTS, 5), xlim=(0, None))
ax.set_title(f"{EPISODES} episodes, answered in batches of {np.mean(batches):.1f}; {hung} tools hung")
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
