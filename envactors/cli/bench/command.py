"""``envactors bench``: measure an env on actors, in a loop, and with other libraries, side by side."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envactors.cli.arguments import (
    STDOUT,
    add_env,
    add_json,
    at_least,
    fail,
    new_file,
    refuse_without,
    seconds,
    write_json,
)
from envactors.cli.units import count

if TYPE_CHECKING:
    from envactors.cli.bench.contestant import Contestant
    from envactors.cli.bench.figures import Comparison
    from envactors.cli.bench.registry import Entry
    from envactors.cli.bench.scoreboard import Scoreboard
    from envactors.tuning.measuring import Workload

_RAN, _FAILED, _NOT_RUN = 0, 1, 2
# Default packing to measure, if there are enough envs for it.
_PACKED, _LEAST_ENVS_TO_PACK = 4, 8

_DESCRIPTION = """\
Measures env-steps per second of one env with envactors, with Gymnasium's loop in
one process, with loops apart (one process per core, sharing nothing: as much as
the cores give), and with every other library that is installed: gymnasium
(AsyncVectorEnv), stable-baselines3 (SubprocVecEnv), tianshou (ShmemVectorEnv), ray
and dask (one actor per env), loky (one executor per env), and pipe (one bare
multiprocessing.Pipe per env). All sides start from the same seeds and execute the
same actions, each in a separate process; for rollouts, a policy in the workers
plays them back. They are started once and then take turns, round by round; ratios
are formed within a round, and the table shows medians. Resets between episodes take
time, but do not count as steps.

ENV is an id of Gymnasium, or MODULE:FACTORY, a callable without arguments that makes
an env, such as envactors.testing.workloads:nothing.
"""
_EPILOG = f"""\
exit status:
  {_RAN}    the sides of envactors ran
  {_FAILED}    one of them did not
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure steps per second of an env, side by side with other libraries",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_env(parser)
    parser.add_argument(
        "--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs of each side (default: 8)"
    )
    parser.add_argument(
        "--envs-per-actor",
        type=at_least(1),
        metavar="K",
        help=f"also measure envactors with K envs per process (default: {_PACKED}, from {_LEAST_ENVS_TO_PACK} envs on)",
    )
    parser.add_argument(
        "--against",
        type=_names,
        metavar="NAMES",
        help="compare only with these, separated by commas (default: all installed ones); the loops always take part",
    )
    add_json(parser, "all measurements")
    parser.add_argument(
        "--plot", type=new_file, metavar="FILE", help="draw the table as a chart: a .svg, .png or .pdf file"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=0.5, metavar="S", help="duration of a side's turn in a round (default: 0.5)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="number of rounds (default: 7)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status: 0 only if all sides of envactors ran.
    """
    if refuse_without("bench", "psutil", "rich"):
        return _NOT_RUN
    if arguments.plot is not None and (refusal := _refuse_plot(arguments.plot)):
        print(f"envactors bench --plot {refusal}", file=sys.stderr)
        return _NOT_RUN
    from envactors.cli.bench.registry import choose_entries
    from envactors.cli.source import EnvInputError, find_source
    from envactors.tuning.measuring import Workload

    name = arguments.env
    num_envs = arguments.num_envs
    if arguments.envs_per_actor is None:
        arguments.envs_per_actor = _PACKED if num_envs >= _LEAST_ENVS_TO_PACK else 1
    try:
        source = find_source(name)
        try:
            workload = Workload.sample(source, name, num_envs)
        except ValueError as error:
            raise EnvInputError(str(error)) from error
        except Exception as error:
            raise EnvInputError(f"{name} could not be made: {type(error).__name__}: {error}") from error
        entries, skipped = choose_entries(arguments.against, workload, name, arguments.envs_per_actor)
    except EnvInputError as error:
        return fail("bench", str(error), _NOT_RUN)
    return _bench(arguments, workload, entries, skipped)


def _bench(
    arguments: argparse.Namespace, workload: Workload, entries: Sequence[Entry], skipped: Mapping[str, str]
) -> int:
    from envactors.cli.bench.contestant import Contestant
    from envactors.cli.bench.figures import in_words
    from envactors.cli.bench.scoreboard import Scoreboard
    from envactors.system.cpus import cores

    load_before = os.getloadavg()
    contestants = [Contestant(entry, workload, arguments.seconds) for entry in entries]
    total = len(contestants) + (len(contestants) + 1) * arguments.rounds
    with contextlib.ExitStack() as closing:
        for contestant in contestants:
            closing.callback(contestant.close)
        with Scoreboard(total, sys.stderr if arguments.json == STDOUT else sys.stdout) as board:
            _measure(contestants, arguments, skipped, board)
    comparisons = _compare(contestants)
    failures = {one.entry.title: one.failure for one in contestants if one.failure is not None}
    board.table(comparisons, failures)
    words = in_words(comparisons, cores(), load_before[0])
    for sentence in words:
        board.line(sentence)
    if arguments.json is not None:
        record = {
            "arguments": {
                name: value for name, value in vars(arguments).items() if name not in ("run", "json", "plot")
            },
            "environment": _environment(entries, load_before),
            "sides": [_record(contestant, comparisons) for contestant in contestants],
            "skipped": skipped,
            "in_words": words,
        }
        write_json(arguments.json, record)
    if arguments.plot is not None:
        from envactors.cli.bench.plot import draw_comparisons

        draw_comparisons(comparisons, f"{arguments.env}, {count(arguments.num_envs, 'env')}", arguments.plot)
    return _FAILED if any(one.failure is not None for one in contestants if one.entry.is_ours) else _RAN


def _measure(
    contestants: Sequence[Contestant], arguments: argparse.Namespace, skipped: Mapping[str, str], board: Scoreboard
) -> None:
    envs = count(arguments.num_envs, "env")
    rounds = count(arguments.rounds, "round")
    board.line(f"{arguments.env}, {envs}, {len(contestants)} sides: {rounds} of {arguments.seconds:g} s each", "bold")
    for name, why in skipped.items():
        board.line(f"{name}: skipped, {why}")
    for contestant in contestants:
        title = contestant.entry.title
        board.doing(f"starting {title}")
        contestant.start()
        if contestant.failure is None:
            board.done(f"{title}: started in {contestant.start_seconds:.1f} s")
        else:
            board.done(f"{title}: failed, {contestant.failure}")
    for number in range(1, arguments.rounds + 1):
        # Alternate the order, so that no side always follows the same one.
        for contestant in contestants if number % 2 else reversed(contestants):
            board.doing(f"round {number} of {arguments.rounds}: {contestant.entry.title}")
            contestant.play()
            board.done()
        board.done(f"round {number} of {arguments.rounds} done")


def _compare(contestants: Sequence[Contestant]) -> list[Comparison]:
    from envactors.cli.bench.figures import Comparison, rates, ratios
    from envactors.cli.bench.registry import DEFAULT, LOOP

    ran = {one.entry.name: one for one in contestants if one.failure is None}
    loop = ran.get(LOOP)
    default = ran.get(DEFAULT)
    return [
        Comparison(
            name,
            one.entry.title,
            one.entry.is_ours,
            rates(one.rounds),
            None if loop is None else ratios(one.rounds, loop.rounds),
            None if default is None else ratios(default.rounds, one.rounds),
        )
        for name, one in ran.items()
    ]


def _environment(entries: Sequence[Entry], load_before: Sequence[float]) -> dict[str, Any]:
    from envactors.system.cpus import cores

    return {
        "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "versions": {one.package: one.version for one in entries if one.package is not None},
    }


def _record(contestant: Contestant, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    entry = contestant.entry
    failure = contestant.failure
    comparison = next((dataclasses.asdict(one) for one in comparisons if one.name == entry.name), {})
    return {
        "name": entry.name,
        "title": entry.title,
        "ours": entry.is_ours,
        "error": None if failure is None else {"message": failure, "details": contestant.details},
        "start_seconds": contestant.start_seconds,
        "rounds": [{**dataclasses.asdict(one), "env_steps_per_second": one.rate} for one in contestant.rounds],
        "env_steps_per_second": comparison.get("rate"),
        "side_to_loop": comparison.get("to_loop"),
        "envactors_to_side": comparison.get("envactors_to_side"),
    }


def _refuse_plot(path: Path) -> str:
    """Return why there can be no chart at a path, empty if there can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install 'envactors[plot]'"
    from envactors.cli.bench.plot import FORMATS

    if path.suffix.removeprefix(".") in FORMATS:
        return ""
    return f"{path}: give it one of the suffixes {', '.join(FORMATS)}"


def _names(text: str) -> list[str]:
    from envactors.cli.bench.registry import APART, BASELINES, LOOP

    known = [LOOP, APART, *(baseline.name for baseline in BASELINES)]
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return names
