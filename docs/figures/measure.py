"""Measures what the docs say of speed: ``python docs/figures/measure.py QUESTION ...``.

Each question writes a file beside this one and its tables into the pages. Sides that are compared take turns, see
`turns`. Needs the extra ``test``; libraries and envs that are not installed are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import costs
import dropins
import executors
import sessions
import spaces
import suites
import vectors
from turns import probe_machine

HERE = Path(__file__).parent
MIGRATE = (
    *("gymnasium", "stable-baselines3", "tianshou", "torchrl", "di-engine", "pettingzoo"),
    *("jax", "lerobot", "rllib"),
)
PAGES = (
    "../README.md",
    "guides/performance.md",
    "guides/many-machines.md",
    "guides/seeing-inside.md",
    "guides/platforms.md",
    *(f"migrate/{name}.md" for name in MIGRATE),
)


def known(question: str) -> dict[str, Any]:
    """Return what was measured before of a question whose sides are not all installed at once."""
    path = HERE / f"{question}.json"
    return json.loads(path.read_text())["measured"] if path.exists() else {}


# What is measured, and the tables that are made of it.
QUESTIONS: dict[str, tuple[Callable[[int], Any], dict[str, Callable[[Any], str]]]] = {
    "readme": (vectors.measure_readme, {"readme": vectors.show_readme, "rollouts": vectors.show_rollouts}),
    "steps": (vectors.measure_steps, {"steps": vectors.show_steps}),
    "counts": (vectors.measure_counts, {"counts": vectors.show_counts}),
    "calls": (costs.measure_calls, {"calls": costs.show_calls}),
    "executor": (executors.measure, {"executor": executors.show}),
    "start": (costs.measure_start, {"start": costs.show_start}),
    "nodes": (costs.measure_nodes, {"nodes": costs.show_nodes}),
    "inside": (costs.measure_inside, {"inside": costs.show_inside}),
    "platforms": (costs.measure_platforms, {"platforms": costs.show_platforms}),
    "seeds": (costs.measure_seeds, {"seeds": costs.show_seeds}),
    "snapshots": (costs.measure_snapshots, {"snapshots": costs.show_snapshots}),
    "sessions": (lambda rounds: sessions.measure(rounds, known("sessions")), {"sessions": sessions.show}),
    "dropins": (
        lambda rounds: dropins.measure(rounds, known("dropins")),
        {f"dropin {name}": functools.partial(dropins.show, name) for name in dropins.LIBRARIES},
    ),
    "spaces": (lambda rounds: spaces.measure(rounds, known("spaces")), {"spaces": spaces.show}),
    "suites": (
        lambda _: suites.measure(known("suites")),
        {f"suite {name}": functools.partial(suites.show, name) for name in suites.SUITES},
    ),
}


def with_tables(page: str) -> str:
    """Return a page whose tables are those of the files beside this script."""
    for question, (_, tables) in QUESTIONS.items():
        for name, show in tables.items():
            begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
            before, found, rest = page.partition(begin)
            if found:
                page = before + begin + show(known(question)) + end + rest.partition(end)[2]
    return page


def main() -> None:
    """Measure, and write the files and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=(*QUESTIONS, "page"), help="page: write the tables of all")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for question, (measure, _) in QUESTIONS.items():
        if question in arguments.questions:
            record = {
                "cores": len(os.sched_getaffinity(0)),
                "two processes / one": probe_machine(),
                "python": platform.python_version(),
                "rounds": arguments.rounds,
                "measured": measure(arguments.rounds),
            }
            (HERE / f"{question}.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in PAGES:
        page = HERE.parent / name
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
