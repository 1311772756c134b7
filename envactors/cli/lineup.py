"""Who takes part in a bench."""

from __future__ import annotations

from collections.abc import Sequence

from envactors.cli.contenders import Contender
from envactors.cli.handmade import BarePipe, PlainLoop
from envactors.cli.jobs import BenchInputError, Job
from envactors.cli.libraries import Dask, GymnasiumLoop, GymnasiumProcesses, Loky, Ray, StableBaselines, Tianshou
from envactors.cli.ours import Ours, OursAsynchronous, OursPacked

OPPONENTS: tuple[type[Contender], ...] = (
    GymnasiumProcesses,
    StableBaselines,
    Tianshou,
    Ray,
    Dask,
    Loky,
    BarePipe,
)


def choose(against: Sequence[str] | None, job: Job) -> tuple[list[type[Contender]], dict[str, str]]:
    """Decides who takes part; also tells who does not, and why.

    Args:
        against: The names of the opponents that are wanted; None: of all that can take part.
        job: What is to be done.

    Raises:
        BenchInputError: One that is wanted cannot take part.
    """
    sides: list[type[Contender]] = [Ours, OursAsynchronous]
    if job.envs_per_actor > 1:
        sides.insert(1, OursPacked)
    sides.append(GymnasiumLoop if job.is_gymnasium else PlainLoop)
    skipped = {}
    for opponent in OPPONENTS:
        if against is not None and opponent.name not in against:
            continue
        if not opponent.is_installed():
            skipped[opponent.name] = f"not installed: pip install {opponent.package}"
        elif opponent.only_gymnasium and not job.is_gymnasium:
            skipped[opponent.name] = f"{job.source.name} is not a gymnasium.Env"
        else:
            sides.append(opponent)
    if against is not None and skipped:
        raise BenchInputError("; ".join(f"--against {name}: {why}" for name, why in skipped.items()))
    return sides, skipped
