"""``envactors check``: run the checks in an actor, and print the findings."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from envactors.cli.arguments import STDOUT, add_env, add_json, at_least, fail, printable, seconds, write_json
from envactors.cli.units import count, duration, size

if TYPE_CHECKING:
    from envactors.actor.future import ActorFuture
    from envactors.cli.check.examiner import Trajectory
    from envactors.cli.check.findings import Finding
    from envactors.cli.source import EnvSource

_CLEAN, _FOUND, _NOT_RUN = 0, 1, 2
_SEED = 0
# The shares of the time for the first trajectory, and for the search for leaks.
_PLAYING, _LOOKING = 0.2, 0.5
# The interval at which the memory of the env is checked, in seconds.
_MEMORY_CHECK = 0.1
# By default, an env may grow by its first size and this number of bytes.
_MOST_GROWTH = 10**9
# Parts of paths that are not the env's own code.
_LIBRARY_PATHS = ("envactors/", "threading.py", "<frozen", "importlib/")

_DESCRIPTION = """\
Checks one env before it is trained on: whether the factory, the env, and its infos
can be pickled; whether equal actions after reset(seed=) give equal results, in the
same process and in a new one; whether observations are in their space; how long
resets and steps take; and whether memory, file descriptors, threads, or child
processes leak from episode to episode. Then it suggests settings. The env runs in an
actor, so that a crash is a finding, too. So is a hang, or too much memory: the env is
then killed, and the checks end.

ENV is an id of Gymnasium, or MODULE:FACTORY, a callable without arguments that makes
an env with the methods of a gymnasium.Env.
"""
_EPILOG = f"""\
exit status:
  {_CLEAN}    nothing was found
  {_FOUND}    something was found
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="find defects of an env, and suggest settings",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_env(parser)
    parser.add_argument(
        "--seconds", type=seconds, default=10.0, metavar="S", help="about how long it may take (default: 10)"
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long making the env may take, and how much longer than planned each check; "
        "then the env counts as hanging and is killed (default: 30)",
    )
    parser.add_argument(
        "--max-rss",
        type=at_least(1),
        metavar="BYTES",
        help="the resident memory above which the env is killed, children included "
        f"(default: twice that of the process with the new env, plus {size(_MOST_GROWTH)})",
    )
    add_json(parser, "findings, times, and settings")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    from envactors.cli.source import EnvInputError, find_source

    try:
        source = find_source(arguments.env)
    except EnvInputError as error:
        return fail("check", str(error), _NOT_RUN)
    examination = Examination(source, arguments.seconds, arguments.deadline, arguments.max_rss)
    examination.run()
    if arguments.json is not None:
        write_json(arguments.json, examination.record())
    if arguments.json != STDOUT:
        print(printable("\n".join(examination.lines())))
    return _FOUND if examination.findings else _CLEAN


class Examination:
    """Runs all checks of an env, up to the first that its worker does not survive.

    Args:
        source: The env.
        seconds: About how long it may take.
        deadline: How long making the env may take, and how much longer than planned each check, in seconds.
        max_rss: The resident memory above which the env is killed, in bytes; None for twice the first size plus 1 GB.

    Attributes:
        findings: What was found.
        times: Durations in seconds: ``start``, the longest ``reset`` and ``step``, and their medians.
        settings: The settings that are suggested; None if the checks were broken off.
        line: The line to paste; empty if the checks were broken off.
    """

    def __init__(self, source: EnvSource, seconds: float, deadline: float, max_rss: int | None) -> None:
        self.findings: list[Finding] = []
        self.times: dict[str, float] = {}
        self.settings: dict[str, Any] | None = None
        self.line: str = ""
        self._source = source
        self._seconds = seconds
        self._deadline = deadline
        self._max_rss = max_rss

    def run(self) -> None:
        """Run the checks."""
        import envactors as ea
        from envactors.cli.check.examiner import Examiner

        deadlines = ea.Deadlines(start=self._deadline, call=self._deadline, close=5.0)
        actor = ea.spawn(functools.partial(Examiner, self._source), name=self._source.name, deadlines=deadlines)
        with actor, contextlib.suppress(_BrokenOffError):
            self._examine(actor)

    def _examine(self, actor: Any) -> None:
        from envactors.cli.check import findings as judge
        from envactors.cli.check.examiner import median

        self.times["start"] = self._wait(actor, actor.made_in())
        if self._max_rss is None:
            self._max_rss = 2 * _memory_of(actor) + _MOST_GROWTH
        self.findings += judge.judge_pickles(self._wait(actor, actor.refused_pickles()))
        if (refused := self._wait(actor, actor.refused_actions())) is not None:
            self.findings.append(judge.Finding("no actions", f"{refused}.", "Without it no step can be checked."))
            return
        first = self._play(actor, None)
        self.findings += judge.judge_results(first)
        self.findings += self._repeat(actor, first, judge.judge_repeat)
        memory = actor.stats().rss
        planned = _LOOKING * self._seconds
        looks = self._wait(actor, actor.options(deadline=planned + self._deadline).look(planned))
        resets = first.reset_seconds + looks.reset_seconds
        self.findings += judge.judge_resets(resets, first.step_seconds)
        leaks, lost = judge.judge_looks(looks)
        self.findings += leaks
        self.times |= {"reset": max(resets), "reset_median": median(resets)}
        self.times |= {"step": max(first.step_seconds, default=0.0), "step_median": median(first.step_seconds)}
        self.settings, self.line = judge.suggest(self.times, self.findings, lost, memory)
        self._wait(actor, actor.call("close"))

    def _play(self, actor: Any, steps: int | None) -> Trajectory:
        planned = _PLAYING * self._seconds
        played = actor.options(deadline=planned + self._deadline).play(_SEED, steps, planned)
        trajectory: Trajectory = self._wait(actor, played)
        return trajectory

    def _repeat(self, actor: Any, first: Trajectory, judge: Callable[..., list[Finding]]) -> list[Finding]:
        """Repeat a trajectory in the same process, and if that gives the same, in a new one."""
        steps = len(first.events) - 1
        found = judge(first, self._play(actor, steps), is_fresh=False)
        if found:
            return found
        self._wait(actor, actor.renew())
        return judge(first, self._play(actor, steps), is_fresh=True)

    def _wait(self, actor: Any, future: ActorFuture[Any]) -> Any:
        """Return the result of a call; kill the actor if its memory grows above the limit meanwhile.

        Raises:
            _BrokenOffError: The actor was killed, or the call failed; the reason is among the findings.
        """
        import envactors as ea
        from envactors.cli.check.findings import judge_size

        while not ea.wait([future], _MEMORY_CHECK).done:
            memory = _memory_of(actor)
            if self._max_rss is not None and memory > self._max_rss:
                actor.kill()
                self.findings.append(judge_size(memory, self._max_rss))
                raise _BrokenOffError
        # An env's KeyboardInterrupt would end the command if it was raised here.
        if (error := future.exception()) is not None:
            self.findings.append(_finding_of(error))
            raise _BrokenOffError
        return future.result()

    def record(self) -> dict[str, Any]:
        """Return what was found, as it is written to a file."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        seconds = {name: round(value, 9) for name, value in self.times.items()}
        return {
            "env": self._source.name,
            "findings": findings,
            "seconds": seconds,
            "settings": self.settings,
            "line": self.line,
        }

    def lines(self) -> list[str]:
        """Return what was found, in words."""
        found = count(len(self.findings), "finding") if self.findings else "nothing was found"
        lines = [f"{self._source.name}: {found}"]
        for finding in self.findings:
            lines += ["", f"{finding.kind}: {finding.message}", f"  {finding.remedy}"]
        if self.settings is None:
            return [*lines, "", "The checks after this were not run."]
        times = ", ".join(
            f"{name} {duration(self.times[key])}"
            for name, key in (("start", "start"), ("reset", "reset_median"), ("step", "step_median"))
        )
        return [*lines, "", f"times: {times}", "", "suggested settings:", f"  {self.line}"]


def _memory_of(actor: Any) -> int:
    """Return how much memory the process of an actor and its children hold, in bytes."""
    from envactors.cli.check.examiner import measure_children

    stats = actor.stats()
    memory: int = stats.rss if stats.pid is None else stats.rss + measure_children(stats.pid)[1]
    return memory


class _BrokenOffError(Exception):
    """The checks after a failed one cannot be run."""


def _finding_of(error: BaseException) -> Finding:
    """Return the finding for a failed call, whether its worker ended or the env raised."""
    import envactors as ea
    from envactors.cli.check.findings import Finding
    from envactors.errors import cause_of
    from envactors.mailbox.pickling import safe_str

    cause = error.__cause__ if isinstance(error, ea.ActorStartError) else None
    if isinstance(hung := cause or error, ea.ActorTimeoutError):
        frames = _frames_of_env(hung.stacks.splitlines())
        where = f"; it was at {frames[0]}" if frames else ""
        message = f"The env did not return within {hung.timeout:g} s{where}."
        return Finding("hang", message, "Find what it waits for, and set deadlines, so that training continues.")
    if isinstance(error, ea.ActorStartError):
        message = f"The env could not be made: {error if cause is None else safe_str(cause)}"
        return Finding("start", message, "Call the factory in a Python shell to see its traceback.")
    if isinstance(error, ea.ActorError):
        return Finding("crash", f"{error}", "Run the env in an interpreter with -X faulthandler to find the cause.")
    remote = str(cause_of(error) or "").strip().splitlines()
    frames = _frames_of_env(reversed(remote))
    message = f"The env raised {safe_str(error)}" + (f" ({frames[0]})" if frames else "")
    return Finding("exception", message, "Envs must have the methods of gymnasium.Env, and accept their own actions.")


def _frames_of_env(lines: Iterable[str]) -> list[str]:
    """Return the frames in the lines of a stack that are not of a library."""
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    return [frame for frame in frames if not any(part in frame for part in _LIBRARY_PATHS)]
