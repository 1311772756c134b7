"""``envactors bench``: steps an env on actors, in a loop, and with other libraries, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envactors.cli.arguments import at_least, seconds
from envactors.cli.reports import count

if TYPE_CHECKING:
    from envactors.cli.contenders import Contender
    from envactors.cli.figures import Comparison, Finding
    from envactors.cli.jobs import Job
    from envactors.cli.scoreboard import Scoreboard
    from envactors.cli.sides import Side

_RAN, _FAILED, _NOT_RUN = 0, 1, 2
_NEEDED = ("psutil", "rich")
_LOOP = "loop"
# What one tries first where a process an env is too much.
_PACKED, _LEAST_ENVS_TO_PACK = 4, 8

_DESCRIPTION = """\
Measures env-steps per second of one env with envactors, with Gymnasium's loop in
one process, and with whatever else is installed: gymnasium (AsyncVectorEnv),
stable-baselines3 (SubprocVecEnv), tianshou (ShmemVectorEnv), ray and dask (an actor
an env), loky (an executor an env), and pipe (a bare multiprocessing.Pipe an env).
All sides begin with the same seeds and execute the same actions, and each has a
process of its own. They are started once and then take turns, round by round;
ratios are those within a round, and the table shows medians. Resets between
episodes take time, but do not count as steps.

ENV is an id of Gymnasium, or MODULE:FACTORY, a callable without arguments that makes
an env; envactors.testing.workloads has some, such as
envactors.testing.workloads:nothing.
"""
_EPILOG = f"""\
exit status:
  {_RAN}    the sides of envactors ran
  {_FAILED}    one of them did not
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describes the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure steps per second of an env, side by side with other libraries",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("env", metavar="ENV", help="an id of Gymnasium, or MODULE:FACTORY")
    parser.add_argument(
        "--num-envs", type=at_least(1), default=8, metavar="N", help="how many envs each side has (default: 8)"
    )
    parser.add_argument(
        "--envs-per-actor",
        type=at_least(1),
        metavar="K",
        help=f"also measure envactors with K envs a process (default: {_PACKED}, from {_LEAST_ENVS_TO_PACK} envs on)",
    )
    parser.add_argument(
        "--against",
        type=_names,
        metavar="NAMES",
        help="compare with these only, separated by commas (default: all that are installed); the loop is always there",
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write all that was measured to a file")
    parser.add_argument(
        "--seconds", type=seconds, default=0.5, metavar="S", help="how long a side steps in a round (default: 0.5)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="how many rounds (default: 7)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status: 0 only where all of our own sides ran.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"envactors bench needs {' and '.join(missing)}: pip install 'envactors[demo]'", file=sys.stderr)
        return _NOT_RUN
    from envactors.cli.jobs import BenchInputError, make_job
    from envactors.cli.lineup import choose

    # As for `python -m`: a factory may be in the current directory.
    sys.path.insert(0, str(Path.cwd()))
    try:
        job = make_job(arguments.env, arguments.num_envs, _envs_per_actor(arguments))
        contenders, skipped = choose(arguments.against, job)
    except BenchInputError as error:
        print(f"envactors bench: {error}", file=sys.stderr)
        return _NOT_RUN
    return _bench(arguments, job, contenders, skipped)


def _bench(
    arguments: argparse.Namespace, job: Job, contenders: Sequence[type[Contender]], skipped: Mapping[str, str]
) -> int:
    import psutil

    from envactors.cli.figures import in_words
    from envactors.cli.scoreboard import Scoreboard
    from envactors.cli.sides import Side, close_all
    from envactors.system import adopt_orphans

    load_before = os.getloadavg()
    adopt_orphans()
    spared = [child.pid for child in psutil.Process().children()]
    with tempfile.TemporaryDirectory(prefix="envactors-", ignore_cleanup_errors=True) as directory:
        sides = [Side(contender, job, Path(directory, contender.name)) for contender in contenders]
        try:
            with Scoreboard(len(sides) + (len(sides) + 1) * arguments.rounds) as board:
                _measure(sides, arguments, skipped, board)
        finally:
            close_all(sides, spared)
    comparisons = _compare(sides)
    board.table(comparisons, {side.title: str(side.failure) for side in sides if side.failure is not None})
    finding = _find(comparisons, job, load_before[0])
    words = [] if finding is None else in_words(finding)
    for sentence in words:
        board.line(sentence)
    if arguments.json is not None:
        record = {
            "arguments": {name: value for name, value in vars(arguments).items() if name not in ("run", "json")},
            "environment": _environment(contenders, load_before),
            "sides": [_record(side, comparisons) for side in sides],
            "skipped": skipped,
            "in_words": words,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return _FAILED if any(side.failure is not None for side in sides if side.contender.ours) else _RAN


def _measure(
    sides: Sequence[Side], arguments: argparse.Namespace, skipped: Mapping[str, str], board: Scoreboard
) -> None:
    envs, rounds = count(arguments.num_envs, "env"), count(arguments.rounds, "round")
    board.line(f"{arguments.env}, {envs}, {len(sides)} sides: {rounds} of {arguments.seconds:g} s each", "bold")
    for name, why in skipped.items():
        board.line(f"{name}: skipped, {why}")
    for side in sides:
        board.doing(f"starting {side.title}")
        side.start(arguments.seconds)
        if side.failure is None:
            board.done(f"{side.title}: started in {side.start_seconds:.1f} s")
        else:
            board.done(f"{side.title}: failed, {side.failure}")
    for number in range(1, arguments.rounds + 1):
        # Nobody always comes after the same other.
        for side in sides if number % 2 else reversed(sides):
            board.doing(f"round {number} of {arguments.rounds}: {side.title}")
            if side.failure is None:
                side.play(arguments.seconds)
            board.done()
        board.done(f"round {number} of {arguments.rounds} done")


def _compare(sides: Sequence[Side]) -> list[Comparison]:
    from envactors.cli.figures import Comparison, rates, ratios
    from envactors.cli.ours import Ours

    ran = [side for side in sides if side.failure is None]
    loop = next((side for side in ran if side.name == _LOOP), None)
    ours = next((side for side in ran if side.name == Ours.name), None)
    return [
        Comparison(
            side.name,
            side.title,
            side.contender.ours,
            rates(side.rounds),
            None if loop is None else ratios(side.rounds, loop.rounds),
            None if ours is None else ratios(ours.rounds, side.rounds),
        )
        for side in ran
    ]


def _find(comparisons: Sequence[Comparison], job: Job, load: float) -> Finding | None:
    """What there is to say in words, None where the loop or our default failed."""
    import psutil

    from envactors.cli.figures import Finding
    from envactors.cli.ours import Ours, OursAsynchronous, OursPacked

    found = {one.name: one for one in comparisons}
    loop, default = found.get(_LOOP), found.get(Ours.name)
    if loop is None or default is None or default.to_loop is None:
        return None
    packed, asynchronous = found.get(OursPacked.name), found.get(OursAsynchronous.name)
    return Finding(
        step_seconds=1 / loop.rate.median,
        default=default.to_loop.median,
        packed=packed.to_loop.median if packed is not None and packed.to_loop is not None else None,
        envs_per_actor=job.envs_per_actor,
        asynchronous=1 / asynchronous.ours_to_it.median if asynchronous and asynchronous.ours_to_it else None,
        others={
            one.title: one.ours_to_it.median
            for one in comparisons
            if one.ours_to_it is not None and not one.ours and one.name != _LOOP
        },
        cores=len(psutil.Process().cpu_affinity() or ()),
        load=load,
    )


def _environment(contenders: Sequence[type[Contender]], load_before: Sequence[float]) -> dict[str, Any]:
    import psutil

    return {
        "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(psutil.Process().cpu_affinity() or ()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "versions": {one.package: one.version() for one in contenders if one.package is not None},
    }


def _record(side: Side, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    comparison = next((one for one in comparisons if one.name == side.name), None)
    return {
        "name": side.name,
        "title": side.title,
        "ours": side.contender.ours,
        "error": None if side.failure is None else {"message": str(side.failure), "details": side.failure.details},
        "start_seconds": side.start_seconds,
        "rounds": [{**dataclasses.asdict(one), "env_steps_per_second": one.rate} for one in side.rounds],
        **{
            key: None if comparison is None or value is None else dataclasses.asdict(value)
            for key, value in (
                ("env_steps_per_second", comparison and comparison.rate),
                ("side_to_loop", comparison and comparison.to_loop),
                ("envactors_to_side", comparison and comparison.ours_to_it),
            )
        },
    }


def _envs_per_actor(arguments: argparse.Namespace) -> int:
    if arguments.envs_per_actor is not None:
        return int(arguments.envs_per_actor)
    return _PACKED if arguments.num_envs >= _LEAST_ENVS_TO_PACK else 1


def _names(text: str) -> list[str]:
    from envactors.cli.lineup import OPPONENTS

    known = [_LOOP, *(opponent.name for opponent in OPPONENTS)]
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return names


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path
