"""`eval_policy_all`: LeRobot's evaluation of many tasks, in which a task that fails costs that task only."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from envactors.integrations.lerobot.lazy import LazyActorVectorEnv

# LeRobot's results of a task, by name: a list with a value per episode, or per video.
_Metrics: TypeAlias = Mapping[str, Any]


class _Outcome(NamedTuple):
    """The outcome of a task: its metrics, or the exception from its envs."""

    group: str
    task_id: int
    metrics: _Metrics | None
    failure: Exception | None


def eval_policy_all(
    envs: Mapping[str, Mapping[int, LazyActorVectorEnv]],
    policy: Any,
    env_preprocessor: Any,
    env_postprocessor: Any,
    preprocessor: Any,
    postprocessor: Any,
    n_episodes: int,
    *,
    max_episodes_rendered: int = 0,
    videos_dir: Path | None = None,
    return_episode_data: bool = False,
    start_seed: int | None = None,
    max_parallel_tasks: int = 1,
    **recording: Any,
) -> dict[str, Any]:
    """Evaluate a policy on many tasks, like LeRobot's function of this name.

    LeRobot ends the evaluation at the first env that fails, and its results are lost. Here the task of that env is
    listed under ``"failed"``, and the others continue. Each task's envs are closed before the next task starts, so
    that at most ``max_parallel_tasks`` times the envs of a task are alive.

    Args:
        envs: The vector env of each task, by group and task id.
        policy: The policy.
        env_preprocessor: As in LeRobot, like the next three.
        env_postprocessor: See above.
        preprocessor: See above.
        postprocessor: See above.
        n_episodes: Number of episodes per task.
        max_episodes_rendered: Number of episodes per task to make videos of.
        videos_dir: Directory of the videos.
        return_episode_data: As in LeRobot.
        start_seed: Seed of the first episode of each task.
        max_parallel_tasks: Number of tasks that run at once, in threads.
        **recording: LeRobot's arguments whose names begin with ``recording_``, and ``env_features``.

    Returns:
        LeRobot's ``"per_task"``, ``"per_group"``, and ``"overall"``, and ``"failed"``: a dict for each failed task with
        ``"task_group"``, ``"task_id"``, and ``"error"``.

    Raises:
        Exception: Whatever anything but an env raises, such as the policy.
    """
    from lerobot.scripts import lerobot_eval

    start = time.monotonic()
    run = functools.partial(
        lerobot_eval.run_one,
        policy=policy,
        env_preprocessor=env_preprocessor,
        env_postprocessor=env_postprocessor,
        preprocessor=preprocessor,
        postprocessor=postprocessor,
        n_episodes=n_episodes,
        max_episodes_rendered=max_episodes_rendered,
        videos_dir=videos_dir,
        return_episode_data=return_episode_data,
        start_seed=start_seed,
        **recording,
    )

    def evaluate(task: tuple[str, int, LazyActorVectorEnv]) -> _Outcome:
        group, task_id, env = task
        try:
            return _Outcome(group, task_id, run(group, task_id, env)[2], None)
        except Exception as error:
            if error is not env.failure:
                raise
            return _Outcome(group, task_id, None, error)
        finally:
            env.close()

    tasks = [(group, task_id, env) for group, of_group in envs.items() for task_id, env in of_group.items()]
    was_training = policy.training
    policy.eval()
    try:
        with ThreadPoolExecutor(max(1, max_parallel_tasks)) as executor:
            outcomes = list(executor.map(evaluate, tasks))
    finally:
        policy.train(was_training)
    return _as_lerobot(outcomes, time.monotonic() - start)


def _as_lerobot(outcomes: list[_Outcome], seconds: float) -> dict[str, Any]:
    """Return the outcomes of all tasks in LeRobot's form."""
    done = [(outcome, outcome.metrics) for outcome in outcomes if outcome.metrics is not None]
    groups = dict.fromkeys(outcome.group for outcome, _ in done)
    overall = _aggregated(metrics for _, metrics in done)
    return {
        "per_task": [
            {"task_group": outcome.group, "task_id": outcome.task_id, "metrics": metrics} for outcome, metrics in done
        ],
        "per_group": {
            group: _aggregated(metrics for outcome, metrics in done if outcome.group == group) for group in groups
        },
        "overall": {**overall, "eval_s": seconds, "eval_ep_s": seconds / max(1, overall["n_episodes"])},
        "failed": [
            {"task_group": outcome.group, "task_id": outcome.task_id, "error": repr(outcome.failure)}
            for outcome in outcomes
            if outcome.failure is not None
        ],
    }


def _aggregated(metrics: Iterable[_Metrics]) -> dict[str, Any]:
    each = list(metrics)

    def joined(name: str) -> list[Any]:
        return [value for of_task in each for value in of_task.get(name) or ()]

    return {
        "avg_sum_reward": _mean(joined("sum_rewards")),
        "avg_max_reward": _mean(joined("max_rewards")),
        "pc_success": 100 * _mean(joined("successes")),
        "n_episodes": len(joined("sum_rewards")),
        "video_paths": joined("video_paths"),
        "predicted_video_paths": joined("predicted_video_paths"),
    }


def _mean(values: list[Any]) -> float:
    return float(np.nanmean(np.array(values, dtype=float))) if values else float("nan")
