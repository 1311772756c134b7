"""Building a vector: make its actors, compare the specs of its envs, and share memory with its workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from envactors.actor.change import ChangeLock
from envactors.actor.future import results_of
from envactors.actor.handle import ActorHandle, ActorView, send_request
from envactors.actor.spawn import make_actor
from envactors.backends.base import MEMORY_ERRORS, Backend, RowMemory
from envactors.errors import SpaceMismatchError, VectorEnvError, VectorInputError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Describe, Description, Kind
from envactors.mailbox.slab import Layout
from envactors.mailbox.specs import OBJECT, ArraySpec, batches_alike, leaves
from envactors.vector.engine import RowEngine
from envactors.vector.env_group import EnvGroup
from envactors.vector.episodes import Episodes
from envactors.vector.inputs import limit_running
from envactors.vector.journals import Journals
from envactors.vector.options import VectorSettings
from envactors.vector.recycling import Recycler
from envactors.vector.row_reader import RowReader
from envactors.vector.rows import Rows
from envactors.vector.table import EnvTable

# Any number: a worker that crashes before it has the rows gets them with its first message.
_ATTACH_RETRIES = 1 << 31


class EnvHandle(ActorView):
    """Handle of an env of a vector whose envs share processes: its methods and attributes, but not the process."""

    __slots__ = ()

    def renew(self) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse("renew")

    def kill(self, **_: object) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse("kill")

    def close(self, *_: object, **__: object) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse("close")

    def _refuse(self, method: str) -> NoReturn:
        raise VectorInputError(
            f"cannot {method} env {self._actor.config.first_index + self._position} alone: the envs of this vector "
            f"share processes; use envs.actors[i].{method}() of actor {self.name!r}, which concerns all its envs"
        )


def launch_actors(
    settings: VectorSettings,
    backend: Backend,
    factories_by_actor: Sequence[list[Factory]],
    env_vars: Sequence[Mapping[str, str] | None],
    memory: RowMemory | None,
) -> tuple[list[ActorHandle], list[ActorView], list[ActorHandle]]:
    """Launch one actor per list of factories, and the standbys.

    Returns:
        The handles of the actors, of the envs, and of the standbys.
    """
    standbys: list[Any] = []  # methods of `Actor`; filled below, and shared by the configs of all actors
    launch_alike: Callable[..., ActorHandle] = functools.partial(
        make_actor,
        backend=backend,
        deadlines=settings.deadlines,
        restart=settings.restart,
        memory=memory,
        lock=ChangeLock(),
        standbys=standbys,
        permits=limit_running(settings.max_running, len(factories_by_actor), backend),
        crash_dir=settings.crash_dir,
        has_journal=settings.on_failure == "replay",
        seed_episodes=settings.seed_episodes,
        snapshot=settings.snapshot,
    )
    actors: list[ActorHandle] = []
    handles: list[ActorView] = []
    standby_handles: list[ActorHandle] = []
    widest = max(factories_by_actor, key=len)
    # One rule for all handles, also for those of an env that is alone in the last process.
    is_shared = len(factories_by_actor[0]) > 1
    try:
        for factories, variables in zip(factories_by_actor, env_vars, strict=True):
            first = len(handles)
            name = f"envs-{first}-{first + len(factories) - 1}" if is_shared else f"env-{first}"
            actor = launch_alike(factories, name=settings.actor_name(name), first=first, env_vars=variables)
            actors.append(actor)
            actor._is_shared = is_shared
            if is_shared:
                parts = actor._actor, actor._lifeline
                handles += [EnvHandle(*parts, position, _is_shared=True) for position in range(len(factories))]
            else:
                handles.append(actor)
        for number in range(settings.standbys):
            name = settings.actor_name(f"standby-{number}")
            standby: Any = launch_alike(
                widest, name=name, first=-len(widest), env_vars=env_vars[0], standbys=(), permits=None, is_standby=True
            )
            standby_handles.append(standby)
            standbys.append(standby._actor.give_process)
    except BaseException:
        for actor in [*actors, *standby_handles]:
            actor.kill()
        raise
    return actors, handles, standby_handles


def describe_envs(handles: Sequence[ActorView]) -> Description:
    """Return the specs and the metadata of the envs.

    Raises:
        ActorStartError: An env could not be made.
        SpaceMismatchError: The specs differ, so that values of different envs cannot be batched.
    """
    futures = [handle._submit(Kind.DESCRIBE, Describe(handle._position), "describe") for handle in handles]
    expected, *others = [Description(*value) for value in results_of(futures)]
    for index, other in enumerate(others, 1):
        for name in ("observation", "action", "reward"):
            ours, theirs = getattr(expected, name), getattr(other, name)
            if not batches_alike(ours, theirs):
                raise SpaceMismatchError(
                    f"the {name} spec of env {index} is {theirs}: expected that of env 0, {ours}; envs of one "
                    "vector have values of one shape and dtype"
                )
    return expected


def build_row_engine(
    settings: VectorSettings, handles: Sequence[ActorHandle], count: int, described: Description, memory: RowMemory
) -> RowEngine:
    """Build the engine that steps the envs in workers.

    1. Create the memory of the rows.
    2. Make the records of the envs, each of which needs those before it: episodes, rows, journals, and the table.
    3. Make a group for each actor, which needs the table. Threads that wait for results look at the actors.
    4. Make each group the tenant of its actor, and have the worker use the rows. A process that starts from now on gets
       the rows with its first message.

    Raises:
        VectorEnvError: There is not enough memory.
    """
    observation, action, reward, _, _ = described
    is_plain_reward = isinstance(reward, ArraySpec) and reward.batchable
    has_actions = action is not None and all(leaf.batchable for leaf in leaves(action))
    values = OBJECT if observation is None else observation, action if has_actions else None
    layout = Layout(*values, reward if is_plain_reward else None, count)
    try:
        slab, infos = memory.create(layout)
    except MEMORY_ERRORS as error:
        raise VectorEnvError(
            f"cannot allocate {layout.size} bytes of shared memory for {layout.envs} envs ({error}): use fewer "
            "envs, or give the process more memory"
        ) from error
    # Only `InlineEngine` has actors of another class.
    actors: list[Any] = [handle._actor for handle in handles]
    config = actors[0].config
    recyclers = [Recycler(actor, settings.recycle) for actor in actors]
    recycler_by_env = [one for one in recyclers for _ in one.envs] if recyclers[0].can_recycle else []
    episodes = Episodes(count, settings, recycler_by_env)
    rows = Rows(slab, infos)
    journals = Journals(rows, [one.envs for one in recyclers], settings)
    table = EnvTable(config.lock, rows, episodes, journals, config.deadlines)
    reader = RowReader(table, described, copies=settings.copy)
    groups = [EnvGroup(table, reader, actor, one) for actor, one in zip(actors, recyclers, strict=True)]
    table.waiters.actors = actors
    futures = []
    for group in groups:
        actor = group.actor
        with actor.lock, actor.lock.change(actor):
            actor.tenant = group
            table.begin_process(group.indices, actor.process.incarnation)
        futures.append(send_request(actor, Kind.ATTACH, group.attach, "attach", retries=_ATTACH_RETRIES))
    results_of(futures)
    return RowEngine(described, table, reader, groups, may_spin=config.backend.traits.may_spin)
