"""Registry of the subjects of a bench."""

from __future__ import annotations

from collections.abc import Sequence

from envactors.cli.bench.baselines import BarePipe, PlainLoop
from envactors.cli.bench.envactors_subject import EnvactorsPacked, EnvactorsRecv, EnvactorsRollout, EnvactorsSubject
from envactors.cli.bench.jobs import Job
from envactors.cli.bench.libraries import Dask, GymnasiumLoop, GymnasiumProcesses, Loky, Ray, StableBaselines, Tianshou
from envactors.cli.bench.loops_apart import LoopsApart
from envactors.cli.bench.subject_base import Subject
from envactors.cli.source import EnvInputError

BASELINES: tuple[type[Subject], ...] = (
    GymnasiumProcesses,
    StableBaselines,
    Tianshou,
    Ray,
    Dask,
    Loky,
    BarePipe,
)


def choose_subjects(against: Sequence[str] | None, job: Job) -> tuple[list[type[Subject]], dict[str, str]]:
    """Return the subjects that take part, and the reason for each that does not.

    Args:
        against: Names of the wanted baselines; None: all that can take part.
        job: Env, number of envs and actions.

    Raises:
        EnvInputError: A wanted baseline cannot take part.
    """
    subjects: list[type[Subject]] = [EnvactorsSubject, EnvactorsRecv, EnvactorsRollout]
    if job.envs_per_actor > 1:
        subjects.insert(1, EnvactorsPacked)
    subjects += [GymnasiumLoop if job.is_gymnasium else PlainLoop, LoopsApart]
    skipped = {}
    for baseline in BASELINES:
        if against is not None and baseline.name not in against:
            continue
        if not baseline.is_installed():
            skipped[baseline.name] = f"not installed: pip install {baseline.package}"
        elif baseline.only_gymnasium and not job.is_gymnasium:
            skipped[baseline.name] = f"{job.source.name} is not a gymnasium.Env"
        else:
            subjects.append(baseline)
    if against is not None and skipped:
        raise EnvInputError("; ".join(f"--against {name}: {why}" for name, why in skipped.items()))
    return subjects, skipped
