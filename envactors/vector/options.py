"""The options of a vector: their names, types, and defaults.

`envactors.vector.inputs` checks their values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypedDict

from envactors.backends.base import Backend
from envactors.crashes.writer import CrashDir
from envactors.options import Deadlines, EnvVars, RecyclePolicy, RestartPolicy, SnapshotPolicy

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "renew", "replay"]
VectorEnvVars = EnvVars | Sequence[Mapping[str, str] | None]


class AutoresetRules(NamedTuple):
    """What follows from the end of an episode, for one value of the option ``autoreset``.

    Attributes:
        name: The value of the option.
        resets_within_step: Whether the step that ends the episode also resets the env.
        resets_next_step: Whether the next step resets the env.
        needs_reset_after_end: Whether the user has to reset the env.
    """

    name: Autoreset
    resets_within_step: bool = False
    resets_next_step: bool = False
    needs_reset_after_end: bool = False


AUTORESETS: Final[Mapping[Autoreset, AutoresetRules]] = {
    "next_step": AutoresetRules("next_step", resets_next_step=True),
    "same_step": AutoresetRules("same_step", resets_within_step=True),
    "disabled": AutoresetRules("disabled", needs_reset_after_end=True),
}


class CommonOptions(TypedDict, total=False):
    """`VectorOptions` without ``copy``, which some libraries have as their own argument."""

    envs_per_actor: int | Literal["auto"]
    autoreset: Autoreset
    on_failure: OnFailure
    max_journal: int
    deadlines: Deadlines | float
    restart: RestartPolicy
    recycle: RecyclePolicy | None
    standbys: int
    env_vars: VectorEnvVars
    backend: str | Backend
    max_running: int | None
    seed_episodes: bool
    snapshot: SnapshotPolicy | None
    name: str | None
    crash_dir: CrashDir


class VectorOptions(CommonOptions, total=False):
    """The keyword arguments of `VectorEnv`, which every drop-in takes too.

    If an option does not fit a library, its drop-in raises an error with the reason.

    Attributes:
        envs_per_actor: Number of envs that share a process; 1 by default. They step one after the other, and a crash
            ends all of them. Several light envs per process save most of the IPC cost. ``"auto"`` starts as many
            processes as there are cores, by affinity and the quotas of containers, and spreads the envs evenly.
        autoreset: Controls what happens at the end of an episode, like Gymnasium's ``AutoresetMode``.
            ``"next_step"`` (default): the next step resets the env, ignores its action, and has reward 0.
            ``"same_step"``: the step that ends the episode also resets; the last observation and info are in
            ``info["final_obs"]`` and ``info["final_info"]``. ``"disabled"``: the caller resets the env.
        on_failure: Controls how the vector responds to a crash, a missed deadline, or an exception. ``"raise"``
            (default): `VectorStepError`. ``"renew"``: the process is replaced, and the result of the env is its last
            complete observation, reward 0, ``truncated``, and the exception as ``info["failure"]``. Under
            ``"next_step"`` that result comes at once, and the next step resets in the new process; under
            ``"same_step"`` it comes after that reset, with the last observation in ``info["final_obs"]``. If a call of
            ``reset`` fails, the new process repeats it, once with the same seed and then with derived ones.
            ``"replay"``: the new process repeats everything since the env's last seeded reset (actions, autoresets,
            attributes, calls), and returns the true result of the lost step. If the observations differ (by checksum),
            the env was never seeded, the action log is full, or the same inputs fail twice, it acts like ``"renew"``.
        max_journal: Number of steps since the last seeded reset that are kept per env for a replay; 100,000 by default.
            Beyond that the env is not replayed until its next seeded reset. Calls and attributes count as steps, and so
            does each further KiB of either.
        deadlines: Time limits in seconds; a number means ``Deadlines(call=number)``.
        restart: Limits of restarts; ``RestartPolicy(max_restarts=10, backoff_max=5.0)`` by default.
        recycle: Limits of a process's steps and memory, after which it is replaced between two episodes. Not counted
            as a restart. Needs ``envs_per_actor=1``.
        standbys: Number of started processes that wait to replace failed ones; 0 by default. All factories must be the
            same object. An actor that takes a standby does not wait for ``restart.backoff``. In a standby that waits,
            `current_actor` has a name such as ``"standby-0"`` and a negative index.
        env_vars: Environment variables of all workers, a sequence with one mapping per actor, or a function of the
            actor's index that returns its mapping, as for the placement on GPUs with ``envs_per_actor="auto"``.
        backend: Where the actors run: ``"process"`` (default), ``"thread"``, ``"inline"``, or a backend.
        max_running: Largest number of envs that step or reset at once; None (default) for all. The other requests wait
            in the caller, in order, and their deadlines count from their start.
        seed_episodes: True to give each reset without a seed an individual seed, so that an episode depends on nothing
            before it: ``int(SeedSequence(s, spawn_key=(0, e)).generate_state(1)[0])`` for episode ``e`` since the
            reset with the seed ``s`` (a random ``s`` if there was none). Episode 0 has ``s`` itself.
            ``info["episode_seed"]`` of each reset is the seed, and a replay never reaches back beyond the current
            episode.
        snapshot: Functions that read and write the state of an env, for ``snapshot()`` and ``restore()``. With
            ``on_failure="replay"`` the state is saved every ``snapshot.every`` steps, and a replay starts there.
        copy: True (default) to return copies of observations; False to return views of the shared memory, valid until
            that env's next step.
        name: Prefix of the actors' names, by which logs and ``envactors top`` tell vectors apart: ``"eval"`` gives
            ``"eval-env-0"``.
        crash_dir: Directory for crash bundles: each crash and missed deadline, and the first exception of each type and
            line, leaves the inputs of its env, which ``envactors replay`` runs again. ``max_journal`` limits them. None
            (default) for none.
    """

    copy: bool


class VectorSettings(NamedTuple):
    """A value for each of `VectorOptions`."""

    envs_per_actor: int | Literal["auto"] = 1
    autoreset: Autoreset = "next_step"
    on_failure: OnFailure = "raise"
    max_journal: int = 100_000
    deadlines: Deadlines | float = Deadlines()
    restart: RestartPolicy = RestartPolicy(max_restarts=10, backoff_max=5.0)
    recycle: RecyclePolicy | None = None
    standbys: int = 0
    env_vars: VectorEnvVars = None
    backend: str | Backend = "process"
    max_running: int | None = None
    seed_episodes: bool = False
    snapshot: SnapshotPolicy | None = None
    name: str | None = None
    crash_dir: CrashDir = None
    copy: bool = True

    def actor_name(self, name: str) -> str:
        """Return the name of an actor, with the prefix of the vector."""
        return f"{self.name}-{name}" if self.name else name


OPTIONS = VectorSettings._fields


def check_names(whose: str, given: Iterable[str], own: Iterable[str] = ()) -> None:
    """Refuse an option that does not exist.

    Args:
        whose: The class that takes the options, for the error.
        given: Names of the given options.
        own: Names of further arguments of the class, which the error may suggest.

    Raises:
        TypeError: Naming the option that is spelled most like it.
    """
    for name in given:
        if name not in OPTIONS:
            nearest = difflib.get_close_matches(name, [*OPTIONS, *own], n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected some of {', '.join(OPTIONS)}"
            raise TypeError(f"{whose} got the unknown option {name!r}: {hint}")
