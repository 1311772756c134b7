"""``envactors demo``: learn to balance CartPole on actors while real faults are injected."""

from __future__ import annotations

import argparse
import time

import envactors as ea
from envactors.cli.arguments import at_least, fail, refuse_without
from envactors.cli.units import count

_MET, _MISSED, _NOT_RUN = 0, 1, 2
_GOAL = 475.0
_EPISODES = 20  # of the evaluation
_STEP_DEADLINE = 1.0

_DESCRIPTION = """\
Learns to balance Gymnasium's CartPole with one env per actor. The policy is linear
and is learned by the cross-entropy method with NumPy. Each of the first generations
meets a real fault: a worker is killed by SIGKILL, hangs in C, segfaults, or raises.
A new process replays the interrupted episode, so the results are the same as without
faults. The demo needs less than 10 seconds on two cores.
"""
_EPILOG = f"""\
exit status:
  {_MET}    the mean return over {_EPISODES} evaluation episodes is at least {_GOAL:.0f},
       and no fault changed an episode
  {_MISSED}    it is less, or an episode was lost
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="learn to balance CartPole while real faults are injected",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs, one actor each (default: 8)"
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed; decides the results for any number of envs up to 24 (default: 0)",
    )
    parser.add_argument(
        "--generations",
        type=at_least(1),
        default=30,
        metavar="N",
        help="largest number of generations (default: 30); most seeds need about eight",
    )
    parser.add_argument(
        "--no-faults", dest="faults", action="store_false", help="inject no faults; the results are the same"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status: 0 only if the goal was met and no episode was lost.
    """
    if refuse_without("demo", "gymnasium", extra="demo"):
        return _NOT_RUN
    try:
        return _demonstrate(arguments)
    except ea.EnvActorsError as error:
        return fail("demo", str(error), _MISSED)


def _demonstrate(arguments: argparse.Namespace) -> int:
    from envactors.cli.demo.faults import ENV_ID, FaultyCartPole
    from envactors.cli.demo.learning import Learner, LinearPolicies

    started = time.monotonic()
    print(f"{ENV_ID} on {count(arguments.num_envs, 'actor')}, seed {arguments.seed}", flush=True)
    with ea.VectorEnv(
        [FaultyCartPole] * arguments.num_envs,
        autoreset="disabled",
        on_failure="replay",
        deadlines=ea.Deadlines(step=_STEP_DEADLINE),
    ) as envs:
        envs.set_policy(LinearPolicies, seed=arguments.seed)
        learner = Learner(envs, arguments.seed)
        weights = learner.learn(arguments.generations, with_faults=arguments.faults)
        evaluation = envs.evaluate(_EPISODES, weights)
        restarts = sum(actor.restarts for actor in envs.stats().actors)
    mean_return = float(evaluation.returns.mean())
    steps = learner.steps + int(evaluation.lengths.sum())
    lost = learner.lost + len(evaluation.failures)
    goal_met = mean_return >= _GOAL
    print(
        f"Goal {'met' if goal_met else 'missed'}: mean return {mean_return:.1f} over {_EPISODES} evaluation episodes "
        f"(wanted: at least {_GOAL:.0f}).\n"
        f"Faults: {learner.faults}, survived: {learner.survived}. Restarts: {restarts}. Episodes lost: {lost}. "
        f"{steps:,} steps in {time.monotonic() - started:.1f} s."
    )
    return _MET if goal_met and learner.survived == learner.faults and lost == 0 else _MISSED
