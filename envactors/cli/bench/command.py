"""``envactors bench``: measure an env on actors, in a loop, and with other libraries, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib.util
import os
import platform
import sys
import tempfile
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
from envactors.system.processes import adopt_orphans

if TYPE_CHECKING:
    from envactors.cli.bench.figures import Comparison, Finding
    from envactors.cli.bench.jobs import Job
    from envactors.cli.bench.scoreboard import Scoreboard
    from envactors.cli.bench.subject_base import Subject
    from envactors.cli.bench.subjects import SubjectProcess

_RAN, _FAILED, _NOT_RUN = 0, 1, 2
_LOOP = "loop"
# What the others are held against, rather than compared with.
_YARDSTICKS = (_LOOP, "apart")
# Default packing to measure, if there are enough envs for it.
_PACKED, _LEAST_ENVS_TO_PACK = 4, 8

_DESCRIPTION = """\
Measures env-steps per second of one env with envactors, with Gymnasium's loop in
one process, with loops apart (one process per core, sharing nothing: as much as
the cores give), and with every other library that is installed: gymnasium
(AsyncVectorEnv), stable-baselines3 (SubprocVecEnv), tianshou (ShmemVectorEnv), ray
and dask (one actor per env), loky (one executor per env), and pipe (one bare
multiprocessing.Pipe per env). All sides start from the same seeds and execute the
same actions, each in a process of its own; for rollouts, a policy in the workers
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
        The exit status: 0 only if all envactors subjects ran.
    """
    if refuse_without("bench", "psutil", "rich"):
        return _NOT_RUN
    if arguments.plot is not None and (refusal := _refuse_plot(arguments.plot)):
        print(f"envactors bench --plot {refusal}", file=sys.stderr)
        return _NOT_RUN
    from envactors.cli.bench.jobs import make_job
    from envactors.cli.bench.registry import choose_subjects
    from envactors.cli.source import EnvInputError

    try:
        job = make_job(arguments.env, arguments.num_envs, _envs_per_actor(arguments))
        subject_types, skipped = choose_subjects(arguments.against, job)
    except EnvInputError as error:
        return fail("bench", str(error), _NOT_RUN)
    return _bench(arguments, job, subject_types, skipped)


def _bench(
    arguments: argparse.Namespace, job: Job, subject_types: Sequence[type[Subject]], skipped: Mapping[str, str]
) -> int:
    import psutil

    from envactors.cli.bench.figures import in_words
    from envactors.cli.bench.scoreboard import Scoreboard
    from envactors.cli.bench.subjects import SubjectProcess, close_all

    load_before = os.getloadavg()
    adopt_orphans()  # so that `close_all` finds them all
    spared = [child.pid for child in psutil.Process().children()]
    with tempfile.TemporaryDirectory(prefix="envactors-", ignore_cleanup_errors=True) as directory:
        subjects = [SubjectProcess(subject, job, Path(directory, subject.name)) for subject in subject_types]
        try:
            total = len(subjects) + (len(subjects) + 1) * arguments.rounds
            with Scoreboard(total, sys.stderr if arguments.json == STDOUT else sys.stdout) as board:
                _measure(subjects, arguments, skipped, board)
        finally:
            close_all(subjects, spared)
    comparisons = _compare(subjects)
    board.table(
        comparisons, {subject.title: str(subject.failure) for subject in subjects if subject.failure is not None}
    )
    finding = _find(comparisons, job, load_before[0])
    words = [] if finding is None else in_words(finding)
    for sentence in words:
        board.line(sentence)
    if arguments.json is not None:
        record = {
            "arguments": {
                name: value for name, value in vars(arguments).items() if name not in ("run", "json", "plot")
            },
            "environment": _environment(subject_types, load_before),
            "sides": [_record(subject, comparisons) for subject in subjects],
            "skipped": skipped,
            "in_words": words,
        }
        write_json(arguments.json, record)
    if arguments.plot is not None:
        from envactors.cli.bench.plot import draw_comparisons

        draw_comparisons(comparisons, f"{arguments.env}, {count(arguments.num_envs, 'env')}", arguments.plot)
    return _FAILED if any(one.failure is not None for one in subjects if one.subject_type.is_envactors) else _RAN


def _measure(
    subjects: Sequence[SubjectProcess], arguments: argparse.Namespace, skipped: Mapping[str, str], board: Scoreboard
) -> None:
    envs, rounds = count(arguments.num_envs, "env"), count(arguments.rounds, "round")
    board.line(f"{arguments.env}, {envs}, {len(subjects)} sides: {rounds} of {arguments.seconds:g} s each", "bold")
    for name, why in skipped.items():
        board.line(f"{name}: skipped, {why}")
    for subject in subjects:
        board.doing(f"starting {subject.title}")
        subject.start(arguments.seconds)
        if subject.failure is None:
            board.done(f"{subject.title}: started in {subject.start_seconds:.1f} s")
        else:
            board.done(f"{subject.title}: failed, {subject.failure}")
    for number in range(1, arguments.rounds + 1):
        # Alternate the order, so that no subject always follows the same one.
        for subject in subjects if number % 2 else reversed(subjects):
            board.doing(f"round {number} of {arguments.rounds}: {subject.title}")
            if subject.failure is None:
                subject.play(arguments.seconds)
            board.done()
        board.done(f"round {number} of {arguments.rounds} done")


def _compare(subjects: Sequence[SubjectProcess]) -> list[Comparison]:
    from envactors.cli.bench.envactors_subject import EnvactorsSubject
    from envactors.cli.bench.figures import Comparison, rates, ratios

    ran = [subject for subject in subjects if subject.failure is None]
    loop = next((subject for subject in ran if subject.name == _LOOP), None)
    default = next((subject for subject in ran if subject.name == EnvactorsSubject.name), None)
    return [
        Comparison(
            subject.name,
            subject.title,
            subject.subject_type.is_envactors,
            rates(subject.rounds),
            None if loop is None else ratios(subject.rounds, loop.rounds),
            None if default is None else ratios(default.rounds, subject.rounds),
        )
        for subject in ran
    ]


def _find(comparisons: Sequence[Comparison], job: Job, load: float) -> Finding | None:
    """Return the medians for the summary, or None if the loop or the default failed."""
    import psutil

    from envactors.cli.bench.envactors_subject import EnvactorsPacked, EnvactorsRecv, EnvactorsRollout, EnvactorsSubject
    from envactors.cli.bench.figures import Finding

    found = {one.name: one for one in comparisons}
    loop, default = found.get(_LOOP), found.get(EnvactorsSubject.name)
    if loop is None or default is None or default.to_loop is None:
        return None
    asynchronous = found.get(EnvactorsRecv.name)
    return Finding(
        step_seconds=1 / loop.rate.median,
        default=default.to_loop.median,
        packed=_to_loop(found.get(EnvactorsPacked.name)),
        envs_per_actor=job.envs_per_actor,
        asynchronous=1 / asynchronous.envactors_to_subject.median
        if asynchronous and asynchronous.envactors_to_subject
        else None,
        rollout=_to_loop(found.get(EnvactorsRollout.name)),
        others={
            one.title: one.envactors_to_subject.median
            for one in comparisons
            if one.envactors_to_subject is not None and not one.is_envactors and one.name not in _YARDSTICKS
        },
        cores=len(psutil.Process().cpu_affinity() or ()),
        load=load,
    )


def _to_loop(comparison: Comparison | None) -> float | None:
    return None if comparison is None or comparison.to_loop is None else comparison.to_loop.median


def _environment(subject_types: Sequence[type[Subject]], load_before: Sequence[float]) -> dict[str, Any]:
    import psutil

    return {
        "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(psutil.Process().cpu_affinity() or ()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": {"before": list(load_before), "after": list(os.getloadavg())},
        "versions": {one.package: one.version() for one in subject_types if one.package is not None},
    }


def _record(subject: SubjectProcess, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    comparison = next((one for one in comparisons if one.name == subject.name), None)
    return {
        "name": subject.name,
        "title": subject.title,
        "ours": subject.subject_type.is_envactors,
        "error": None
        if subject.failure is None
        else {"message": str(subject.failure), "details": subject.failure.details},
        "start_seconds": subject.start_seconds,
        "rounds": [{**dataclasses.asdict(one), "env_steps_per_second": one.rate} for one in subject.rounds],
        **{
            key: None if comparison is None or value is None else dataclasses.asdict(value)
            for key, value in (
                ("env_steps_per_second", comparison and comparison.rate),
                ("side_to_loop", comparison and comparison.to_loop),
                ("envactors_to_side", comparison and comparison.envactors_to_subject),
            )
        },
    }


def _refuse_plot(path: Path) -> str:
    """Return why there can be no chart at a path, empty if there can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install 'envactors[plot]'"
    from envactors.cli.bench.plot import FORMATS

    if path.suffix.removeprefix(".") in FORMATS:
        return ""
    return f"{path}: give it one of the suffixes {', '.join(FORMATS)}"


def _envs_per_actor(arguments: argparse.Namespace) -> int:
    if arguments.envs_per_actor is not None:
        return int(arguments.envs_per_actor)
    return _PACKED if arguments.num_envs >= _LEAST_ENVS_TO_PACK else 1


def _names(text: str) -> list[str]:
    from envactors.cli.bench.registry import BASELINES

    known = [*_YARDSTICKS, *(baseline.name for baseline in BASELINES)]
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return names
