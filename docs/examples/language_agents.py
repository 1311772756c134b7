"""
Language-model agents with asyncio
==================================

Agents that use tools take turns of different lengths: a search, a download, an answer of the model. Each episode is a
coroutine that awaits the futures of one env, and one inference server answers all of them in batches. A tool that
hangs costs its own episode a deadline, and the others nothing.
"""

# %%
# The env is any class: its methods are the tools. They sleep as tools do, and ``open_page`` hangs at times. It needs no
# spaces, no ``step``, and no base class.

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
# longer than a batch of one. A real one (vLLM, SGLang, an API) is awaited in the same place.


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
# An episode: ask the model, call the tool that it names, until the fact is found. Deadlines are per call. After one
# has passed, the actor has a new process, and the episode begins again with another seed.

spans = []


async def timed(agent, what, awaitable):
    begun = time.perf_counter()
    try:
        return await awaitable
    except ea.ActorTimeoutError:
        what = "deadline"
        raise
    finally:
        spans.append((agent, what, begun, time.perf_counter() - begun))


async def episode(agent, actor, server, seed):
    seen = await actor.begin(seed)
    turns = 0
    while seen != "the fact":
        turns += 1
        answer = await timed(agent, "model", server.ask(seen))
        call = actor.search(seen) if answer == "search" else actor.options(deadline=0.25).open_page(answer)
        seen = await timed(agent, "tool", call)
    return turns


async def agent(number, actor, server, seeds, finished):
    for seed in seeds:
        for attempt in range(10):
            try:
                finished.append(await episode(number, actor, server, seed + 1000 * attempt))
                break
            except ea.ActorTimeoutError:
                continue


async def main(actors):
    server, finished = Server(), []
    serving = asyncio.create_task(server.run())
    seeds = [range(number, EPISODES, NUM_AGENTS) for number in range(NUM_AGENTS)]
    await asyncio.gather(*(agent(i, actor, server, seeds[i], finished) for i, actor in enumerate(actors)))
    serving.cancel()
    return server.batches, finished


restart = ea.RestartPolicy(max_restarts=100, backoff=0)
with ea.ActorPool(Library, NUM_AGENTS, restart=restart) as pool:
    batches, finished = asyncio.run(main(pool.actors))
    lost = sum(actor.stats().restarts for actor in pool.actors)

print(f"{len(finished)} episodes, {sum(finished)} turns in {len(batches)} batches, {lost} tools hung")
assert len(finished) == EPISODES
assert lost == sum(what == "deadline" for _, what, _, _ in spans) > 0
assert np.mean(batches) > 2

# %%
# Each row is an agent. If a tool hangs, its deadline ends it, and recording its stacks takes a moment more. The other
# agents continue.

assert max(length for _, what, _, length in spans if what == "tool") < 1

begun = min(span[2] for span in spans)
fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
for what, color in (("model", "C0"), ("tool", "C2"), ("deadline", "C3")):
    for row in range(NUM_AGENTS):
        bars = [(start - begun, length) for number, kind, start, length in spans if (number, kind) == (row, what)]
        ax.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    ax.barh(
        0, 0, color=color, label={"deadline": "tool that hangs, until its deadline"}.get(what, f"waits for the {what}")
    )
ax.set(xlabel="time (s)", ylabel="agent", yticks=range(0, NUM_AGENTS, 5), xlim=(0, None))
ax.set_title(
    f"{EPISODES} episodes, answered in batches of {np.mean(batches):.1f}; {lost} tools hung, and nobody else waited"
)
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
