"""Runs a vector env under real faults and checks every result: ``python -m tests.chaos --faults 100``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from envactors.cli.arguments import at_least, seconds
from envactors.errors import EnvActorsError

if TYPE_CHECKING:
    from chaos.report import ChaosReport
    from chaos.view import ChaosView

_ZEROS, _WRONG, _NOT_RUN, _INTERRUPTED = 0, 1, 2, 130  # the last as shells report Ctrl-C
_PROGRAM = "python -m tests.chaos"
_NEEDED = ("psutil", "rich")
_START_METHODS = ("forkserver", "loky")
_EXTRA = "pip install -e '.[test]'"

_DESCRIPTION = """\
Runs a vector env under real faults: its workers are killed while idle, in steps,
in resets, in the factory and while they write; they are stopped, hang in C,
sleep beyond the deadline, raise, return what cannot be pickled, exit, crash, and
leave children running. Every result is counted and compared with that of the
same envs without faults. The default env echoes its actions, which exposes any
result that is lost, duplicated, mixed up or torn.
"""
_EPILOG = f"""\
The seed decides the plan of faults. Your own env is a Gymnasium id or
MODULE:FACTORY; its results are compared if it is deterministic.

exit status:
  {_ZEROS}    all faults happened, and all counts that must be 0 are 0
  {_WRONG}    some did not, or something was lost, duplicated, mixed up, torn, late or
       left behind
  {_NOT_RUN}    wrong arguments, or something to install first
  {_INTERRUPTED}  interrupted by Ctrl-C
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None: those of the process.

    Returns:
        The exit status: 0 only if nothing was wrong.
    """
    arguments = _parser().parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{_PROGRAM} needs {' and '.join(missing)}: {_EXTRA}", file=sys.stderr)
        return _NOT_RUN
    if arguments.sessions is not None:
        return _run_sessions(arguments)
    if arguments.calls is not None:
        return _run_executor(arguments)
    try:
        report = _run_chaos(arguments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({**dataclasses.asdict(report), "ok": report.ok}, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return _NOT_RUN
    except EnvActorsError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return _WRONG
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return _ZEROS if report.ok else _WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "env", nargs="?", metavar="ENV_ID|MODULE:FACTORY", help="your own env (default: an env that echoes the actions)"
    )
    parser.add_argument("--faults", type=at_least(1), default=100, metavar="N", help="number of faults (default: 100)")
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of the plan of faults (default: 0)"
    )
    parser.add_argument("--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs (default: 8)")
    parser.add_argument(
        "--envs-per-actor", type=at_least(1), default=1, metavar="N", help="envs per process (default: 1)"
    )
    parser.add_argument(
        "--on-failure",
        choices=("renew", "replay"),
        default="renew",
        help="failure policy of the vector env (default: renew)",
    )
    parser.add_argument(
        "--deadline", type=seconds, default=1.0, metavar="SECONDS", help="deadline of each step and reset (default: 1)"
    )
    parser.add_argument(
        "--start-method",
        choices=_START_METHODS,
        help="how processes start (default: forkserver on Linux, which takes milliseconds, and loky elsewhere)",
    )
    parser.add_argument(
        "--nodes",
        type=at_least(0),
        default=0,
        metavar="N",
        help="run the actors on N nodes of this machine, some of which are lost (default: 0)",
    )
    parser.add_argument(
        "--observed",
        action="store_true",
        help="read stats and stacks and ask the monitor all the time, while a trace is recorded",
    )
    parser.add_argument(
        "--rollouts", action="store_true", help="run the policy in the workers, and check every row of the rollouts"
    )
    parser.add_argument(
        "--bundles", action="store_true", help="have each fault leave a crash bundle, and run all of them again"
    )
    parser.add_argument(
        "--sessions",
        type=at_least(1),
        metavar="N",
        help="instead of a vector env, play N sessions of a pool whose users crash, hang, abandon, and cancel them; "
        "with --nodes, one node is killed in the middle",
    )
    parser.add_argument(
        "--calls",
        type=at_least(1),
        metavar="N",
        help="instead of a vector env, run N functions in an executor, some of which raise, hang, crash, or exit",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    return parser


def _run_sessions(arguments: argparse.Namespace) -> int:
    from chaos.sessions import SessionStorm

    report = SessionStorm(arguments.sessions, seed=arguments.seed, nodes=arguments.nodes).run()
    for kind, count in sorted(report.outcomes.items()):
        print(f"{kind:10} {count}")
    for text in report.wrong:
        print(f"wrong: {text}")
    print(f"{report.sessions} sessions, {len(report.wrong)} wrong")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return _WRONG if report.wrong else _ZEROS


def _run_executor(arguments: argparse.Namespace) -> int:
    from chaos.executor import ExecutorStorm

    report = ExecutorStorm(arguments.calls, seed=arguments.seed).run()
    for fate, count in sorted(report.outcomes.items()):
        print(f"{fate:11} {count}")
    for text in report.wrong:
        print(f"wrong: {text}")
    print(f"p99 of healthy calls: {report.p99 * 1000:.2f} ms")
    print(f"{report.calls} calls, {len(report.wrong)} wrong")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return _WRONG if report.wrong else _ZEROS


def _run_chaos(arguments: argparse.Namespace) -> ChaosReport:
    import envactors as ea
    from chaos.run import run_chaos
    from envactors.cli.source import EnvSource
    from envactors.cli.units import count

    factory = None if arguments.env is None else EnvSource(arguments.env)
    if factory is not None and not factory.is_factory and importlib.util.find_spec("gymnasium") is None:
        raise ValueError(f"{arguments.env} is made by gymnasium: {_EXTRA}, or give MODULE:FACTORY")
    title = (
        f"{arguments.env or 'echo'}: {count(arguments.faults, 'fault')} over {count(arguments.num_envs, 'env')}, "
        f"{arguments.envs_per_actor} per actor, on_failure={arguments.on_failure!r}, seed {arguments.seed}"
    )
    method = arguments.start_method
    near = ea.ProcessBackend() if method is None else ea.ProcessBackend(method)
    with _make_view(title) as view:
        report = run_chaos(
            factory,
            faults=arguments.faults,
            seed=arguments.seed,
            num_envs=arguments.num_envs,
            envs_per_actor=arguments.envs_per_actor,
            on_failure=arguments.on_failure,
            deadline=arguments.deadline,
            backend=None if arguments.nodes else near,
            nodes=arguments.nodes,
            observed=arguments.observed,
            rollouts=arguments.rollouts,
            bundles=arguments.bundles,
            watch=view.changed,
        )
        view.over(report)
    return report


def _make_view(title: str) -> ChaosView:
    from rich.console import Console

    from chaos.view import LiveChaosView, PlainChaosView

    console = Console()
    # The environment can make Rich treat a pipe as a terminal, where a live view is of no use.
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveChaosView(console, title) if is_live else PlainChaosView(sys.stdout, title)


if __name__ == "__main__":
    sys.exit(main())
