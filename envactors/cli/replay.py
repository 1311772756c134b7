"""``envactors replay``: run the inputs of a crash bundle again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from envactors.cli.arguments import at_least, fail, printable
from envactors.cli.source import EnvInputError, find_source
from envactors.reruns.bundle import load_bundle
from envactors.reruns.debugger import debug

_SAME, _DIFFERENT, _NOT_RUN = 0, 1, 2

_DESCRIPTION = """\
Runs the inputs of a crash bundle, as crash_dir= leaves them, in a fresh worker with the
same environment variables, and says whether they end in the same way. Bundles contain
pickles, which can run any code: replay only your own.
"""
_EPILOG = f"""\
exit status:
  {_SAME}    ends in the same way, or --pdb has ended
  {_DIFFERENT}    ends in another way
  {_NOT_RUN}    wrong arguments, no bundle, or inputs that are not all there
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="the bundle: a directory with report.json and inputs.pkl")
    parser.add_argument("--pdb", action="store_true", help="run in this process, and stop before the last request")
    parser.add_argument("--times", type=at_least(1), default=1, metavar="N", help="how often to run (default: 1)")
    parser.add_argument("--env", metavar="ENV", help="an env to run instead, to try a fix: MODULE:FACTORY, or an id")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    try:
        bundle = load_bundle(arguments.path)
        bundle.check_complete()
        env = None if arguments.env is None else find_source(arguments.env)
    except (OSError, ValueError, EnvInputError) as error:
        return fail("replay", str(error), _NOT_RUN)
    # Factories are pickled by name where workers can import them, from the places that the program had.
    sys.path += [place for place in (str(Path.cwd()), *bundle.inputs.sys_path) if place not in sys.path]
    report = bundle.report
    print(printable(f"{report['actor']} (env {report['env']}), {report['kind']}: {bundle.ending}"))
    if arguments.pdb:
        debug(bundle, env)
        return _SAME
    rerun = bundle.replay(arguments.times, env)
    print(printable(str(rerun)))
    return _SAME if rerun.is_same else _DIFFERENT
