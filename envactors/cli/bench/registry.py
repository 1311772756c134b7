"""The sides that a bench can compare, and which of them take part."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence

from envactors.cli.bench import libraries
from envactors.cli.bench.sides import BarePipe, LoopsApart, PlainLoop, count_loops
from envactors.cli.source import EnvInputError
from envactors.system.cpus import usable_cores
from envactors.tuning.candidates import Candidate
from envactors.tuning.measuring import CandidateSide, Side, Workload

LOOP, APART, DEFAULT = "loop", "apart", "envactors"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A side that can take part.

    Attributes:
        name: Name in arguments and files.
        make: Makes the side.
        package: Name of the package for pip; None if nothing needs to be installed.
        label: Title in the table; None for the name and the version of the package.
        module: Module of the package, if its name is another one.
        only_gymnasium: True if the envs must be Gymnasium envs.
        is_ours: True for the sides that use envactors.
    """

    name: str
    make: Callable[[Workload], Side]
    package: str | None = None
    label: str | None = None
    module: str | None = None
    only_gymnasium: bool = False
    is_ours: bool = False

    @property
    def is_installed(self) -> bool:
        """True if the package is installed."""
        module = self.module or self.package
        return module is None or importlib.util.find_spec(module) is not None

    @property
    def version(self) -> str | None:
        """Version of the package; None if it is unknown."""
        try:
            return None if self.package is None else importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def title(self) -> str:
        """Title in the table."""
        return self.label or " ".join(filter(None, [self.name, self.version]))


BASELINES = (
    Entry("gymnasium", libraries.GymnasiumProcesses, "gymnasium", only_gymnasium=True),
    Entry(
        "stable-baselines3",
        libraries.StableBaselines,
        "stable-baselines3",
        module="stable_baselines3",
        only_gymnasium=True,
    ),
    Entry("tianshou", libraries.Tianshou, "tianshou", only_gymnasium=True),
    Entry("ray", libraries.Ray, "ray"),
    Entry("dask", libraries.Dask, "distributed"),
    Entry("loky", libraries.Loky, "loky"),
    Entry("pipe", BarePipe),
)


def our_entries(num_envs: int, envs_per_actor: int) -> list[Entry]:
    """Return the sides that use envactors: the default, packed, `recv` of half the envs, and rollouts.

    Args:
        num_envs: Number of envs.
        envs_per_actor: Envs per process of the packed side; 1 for no such side.
    """
    per_core = -(-num_envs // min(usable_cores(), num_envs))

    def entry(name: str, label: str | None, candidate: Candidate) -> Entry:
        return Entry(name, functools.partial(CandidateSide, candidate), DEFAULT, label, is_ours=True)

    packed = entry("envactors-packed", f"envactors, {envs_per_actor} per process", Candidate("process", envs_per_actor))
    return [
        entry(DEFAULT, None, Candidate("process", 1)),
        *([packed] if envs_per_actor > 1 else []),
        entry("envactors-recv", "envactors, recv", Candidate("process", 1, min_envs=max(1, num_envs // 2))),
        entry("envactors-rollout", "envactors, rollout", Candidate("process", per_core, in_workers=True)),
    ]


def choose_entries(
    against: Sequence[str] | None, workload: Workload, name: str, envs_per_actor: int
) -> tuple[list[Entry], dict[str, str]]:
    """Return the sides that take part, and the reason for each that does not.

    Args:
        against: Names of the wanted baselines; None for all that can take part.
        workload: Envs and actions.
        name: Name of the env.
        envs_per_actor: Envs per process of the packed side.

    Raises:
        EnvInputError: A wanted baseline cannot take part.
    """
    loop = Entry(LOOP, PlainLoop, label="loop (Python)")
    if workload.is_gymnasium:
        loop = Entry(LOOP, libraries.GymnasiumLoop, "gymnasium", "loop (SyncVectorEnv)")
    apart = Entry(APART, LoopsApart, label=f"{count_loops(workload.num_envs)} loops apart")
    entries = [*our_entries(workload.num_envs, envs_per_actor), loop, apart]
    skipped = {}
    for baseline in BASELINES:
        if against is not None and baseline.name not in against:
            continue
        if not baseline.is_installed:
            skipped[baseline.name] = f"not installed: pip install {baseline.package}"
        elif baseline.only_gymnasium and not workload.is_gymnasium:
            skipped[baseline.name] = f"{name} is not a gymnasium.Env"
        else:
            entries.append(baseline)
    if against is not None and skipped:
        raise EnvInputError("; ".join(f"--against {name}: {why}" for name, why in skipped.items()))
    return entries, skipped
