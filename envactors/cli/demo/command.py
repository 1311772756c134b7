"""``envactors demo``: learn to balance CartPole on actors, with a live view."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envactors.cli.arguments import at_least, fail, refuse_without, seconds
from envactors.errors import EnvActorsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from envactors.backends.base import Backend
    from envactors.cli.demo.reports import Reporter, Summary
    from envactors.vector.facade import VectorEnv

ENV_ID = "CartPole-v1"
GOAL = 475.0
EVALUATION_EPISODES = 20

_MET, _MISSED, _NOT_RUN = 0, 1, 2
_LONGEST_EPISODE = 500
# Per actor; far more than the planned faults need.
_MAX_RESTARTS = 50
# Of the nodes, in seconds: how long the actors of a lost one wait for another process.
_LEASE = 2.0
_WEIGHTS = 4  # one per number of an observation

_DESCRIPTION = f"""\
Learns to balance Gymnasium's {ENV_ID}, with one env per actor, and shows the
actors and the learning curve. The policy is linear and is learnt from scratch, by
the cross-entropy method with NumPy. In the first generations real faults are
injected: workers are killed, hang in C, raise, and take seconds for a reset. The
actors restart, the interrupted episodes are replayed, and the curve is the same as
without faults. If the output is not a terminal, the demo prints one line per
generation.
"""
_EPILOG = f"""\
exit status:
  {_MET}    the mean return over {EVALUATION_EPISODES} evaluation episodes is at least {GOAL:.0f},
       and no episode was lost
  {_MISSED}    it is less, or an episode was lost
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="learn to balance CartPole on actors, with a live view",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs, one actor each (default: 8)"
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed; decides the learning curve for any number of envs up to 24 (default: 0)",
    )
    parser.add_argument(
        "--generations",
        type=at_least(1),
        default=60,
        metavar="N",
        help="largest number of generations (default: 60); most seeds need about ten",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=50.0,
        metavar="SECONDS",
        help="stop learning in time to finish the evaluation by then (default: 50)",
    )
    parser.add_argument(
        "--nodes",
        type=at_least(0),
        default=0,
        metavar="N",
        help="spread the actors over N nodes, agents as processes of this machine, and lose one of them (default: 0)",
    )
    parser.add_argument(
        "--no-faults", dest="faults", action="store_false", help="inject no faults; the result is the same"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record what the actors and the learner do, and write it to FILE, which https://ui.perfetto.dev opens",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status: 0 only if the goal was met and no episode was lost.
    """
    if refuse_without("demo", "gymnasium", "psutil", "rich", extra="demo"):
        return _NOT_RUN
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_trace(arguments.trace))
        except OSError as error:
            return fail("demo", f"the trace cannot be written: {error}", _NOT_RUN)
        try:
            with _reporter() as reporter:
                summary = _learn_and_evaluate(arguments, reporter)
            reporter.finished(summary)
        except EnvActorsError as error:
            return fail("demo", str(error), _MISSED)
    return _MET if summary.goal_met and summary.lost == 0 else _MISSED


def make_env() -> Any:
    """Return a new env; runs in the worker."""
    import gymnasium

    from envactors.cli.demo.faults import FragileEnv

    return FragileEnv(gymnasium.make(ENV_ID))


def _trace(path: Path | None) -> AbstractContextManager[object]:
    import envactors as ea

    return contextlib.nullcontext() if path is None else ea.trace(path)


def _reporter() -> Reporter:
    from envactors.cli.demo.live import LiveReporter
    from envactors.cli.demo.reports import Reporter
    from envactors.cli.views import terminal

    console = terminal()
    if console is None or not console.encoding.startswith("utf"):
        return Reporter(sys.stdout)
    return LiveReporter(console, GOAL, _LONGEST_EPISODE)


def _learn_and_evaluate(arguments: argparse.Namespace, reporter: Reporter) -> Summary:
    from envactors.cli.demo.faults import Injector
    from envactors.cli.demo.learning import Budget, Streams, evaluate, learn
    from envactors.cli.demo.reports import Summary
    from envactors.cli.demo.rollouts import Rollouts
    from envactors.cli.units import count

    started = time.monotonic()
    backend, lose_node = _nodes(arguments.nodes)
    streams = Streams.of(arguments.seed)
    reporter.opened(f"{ENV_ID} on {count(arguments.num_envs, 'actor')}, seed {arguments.seed}")
    reporter.phase("starting the actors")
    with _make_vector(arguments.num_envs, backend) as envs:
        envs.stats()  # begins to take times
        ready = time.monotonic()
        injector = Injector(envs, lose_node if arguments.nodes > 1 else None)
        rollouts = Rollouts(envs, injector, lambda done, total: reporter.tick(injector.injected, done, total))
        budget = Budget(arguments.time_limit, EVALUATION_EPISODES * _LONGEST_EPISODE, started)
        learnt = learn(
            rollouts, _WEIGHTS, streams, arguments.generations, budget, reporter, with_faults=arguments.faults
        )
        reporter.phase("evaluating the learnt policy")
        mean_return = evaluate(rollouts, learnt.policy, EVALUATION_EPISODES, streams.evaluation, budget)
        over = time.monotonic()
        stats = envs.stats()
    return Summary(
        mean_return=mean_return,
        episodes=EVALUATION_EPISODES,
        goal=GOAL,
        generations=learnt.generations,
        stopped_by=learnt.stopped_by,
        actors=arguments.num_envs,
        steps=rollouts.steps,
        start_seconds=ready - started,
        seconds=over - ready,
        faults=injector.injected,
        where=str(stats),
        restarts=sum(actor.restarts for actor in stats.actors),
        lost=rollouts.lost,
        nodes_lost=injector.nodes_lost if arguments.nodes else None,
    )


def _make_vector(num_envs: int, backend: str | Backend) -> VectorEnv:
    import envactors as ea
    from envactors.cli.demo.faults import CALL_DEADLINE, RESET_DEADLINE, STEP_DEADLINE

    # Every episode begins with an explicit seeded reset, so its outcome does not depend on the env that plays it.
    return ea.VectorEnv(
        [make_env] * num_envs,
        autoreset="disabled",
        on_failure="replay",
        deadlines=ea.Deadlines(call=CALL_DEADLINE, reset=RESET_DEADLINE, step=STEP_DEADLINE, close=2.0),
        restart=ea.RestartPolicy(max_restarts=_MAX_RESTARTS, backoff=0.02, backoff_max=0.1),
        backend=backend,
    )


def _nodes(count: int) -> tuple[str | Backend, Callable[[], None]]:
    """Return a backend with this number of nodes, and a function that kills the agent of the first one."""
    if count == 0:
        return "process", lambda: None
    import envactors as ea
    from envactors.remote import LocalNodes

    launcher = LocalNodes(count)

    def lose_first() -> None:
        launcher.agents["local-0"].kill()

    return ea.RemoteBackend(launcher, lease=_LEASE, heartbeat=_LEASE / 5), lose_first
