"""Many envs as one: `VectorEnv` composes the futures of its actors into batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from envactors import backends
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, close_all, launch
from envactors.actor.interrupts import SHIELD
from envactors.actor.standbys import Standbys
from envactors.actor.states import ActorStats
from envactors.actor.turn import Turn
from envactors.arrays.slab import Layout
from envactors.arrays.specs import (
    ArraySpec,
    Spec,
    batches_alike,
    conform,
    leaves,
    spec_of_value,
    split_batch,
    stack,
)
from envactors.backends.base import Backend
from envactors.errors import (
    ActorClosedError,
    ActorError,
    AlreadyPendingError,
    NothingPendingError,
    SpaceMismatchError,
    VectorEnvError,
    VectorInputError,
    VectorStepError,
    VectorTimeoutError,
)
from envactors.options import Deadlines, RecyclePolicy, RestartPolicy, check_timeout
from envactors.system import SharedFile
from envactors.vector.batch import Batch, EnvStep
from envactors.vector.handle import EnvHandle
from envactors.vector.plane import Landed, Plane
from envactors.vector.slot import Autoreset, EnvFuture, Ledger, OnFailure, Slot
from envactors.wire.messages import Describe, Description, Kind


@dataclasses.dataclass(frozen=True)
class VectorStats:
    """Counts over a vector env's life.

    Attributes:
        steps: Steps of each env.
        episodes: Episodes that ended, of each env.
        actors: The counts of each actor.
    """

    steps: list[int]
    episodes: list[int]
    actors: list[ActorStats]


class VectorEnv:
    """Steps many envs as one, each in an actor of its own.

    The constructor waits until every env is made and says what its values look like. One thread at a time uses
    a vector env.

    Args:
        factories: One callable an env, without arguments; run in the workers. The envs have Gymnasium's
            ``reset(seed=, options=) -> (obs, info)`` and
            ``step(action) -> (obs, reward, terminated, truncated, info)``.
        envs_per_actor: How many envs share a process. Their steps run one after the other there, and a death takes
            all of them; for envs whose steps cost next to nothing it saves most of the way to another process.
        autoreset: What happens at the end of an episode. ``"next_step"``: the next step resets, ignores its
            action, and has reward 0. ``"same_step"``: the ending step resets, and carries the last observation,
            as the env gave it, and info as ``info["final_obs"]`` and ``info["final_info"]``. ``"disabled"``: nothing,
            the env must be reset by hand. (Gymnasium's ``AutoresetMode``.)
        on_failure: ``"raise"``: an env's failure is raised as `VectorStepError`. ``"renew"``: its process is
            replaced, and its result says so: the last complete observation, reward 0, ``truncated``, and the
            exception as ``info["failure"]``. Under ``"next_step"`` that comes at once and the next step waits for the
            new process and resets; under ``"same_step"`` it comes after the new reset, the last observation in
            ``info["final_obs"]``. A reset that fails is done again on the new process, with its seed (once) and its
            options, and has the exception in its info. Only an actor whose ``restart`` allowance is spent raises.
            ``"replay"``: the new process is asked again everything since the env's last seeded reset (actions,
            autoresets, attributes, calls) and then what was lost, whose true result comes as if nothing had happened.
            Where the observations (by checksum) are not the same, the env was never seeded, there were more than
            ``max_journal`` steps, or the same inputs fail twice, it is as with ``"renew"``.
        max_journal: How many steps since the last seeded reset are kept of each env to be replayed; beyond that they
            are given up until the next one. Each takes the bytes of an action and one more in the caller; calls and
            attributes count as steps, and so does each further KiB of either. Of use with
            ``on_failure="replay"`` alone.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        recycle: When the process of an env that leaks is replaced between two episodes; not counted as a restart. The
            next episode's seed follows from the env's own, as after a loss. Only with one env an actor.
        standbys: How many processes are kept started, with envs made, for actors that lose theirs: by a crash, a
            deadline, a renewal. Who takes one does not wait for ``restart.backoff``; the standby does, before it starts
            another in the background. The factories must be one and the same object. While it runs for a standby,
            `current_actor` has the name ``"standby-0"`` (and so on) and a negative index; once the standby is taken,
            the name, index and incarnation of its new place, and seeds follow from these as ever. A standby that
            cannot be made as often as ``restart`` allows is given up, with a warning in the log.
        env_vars: Environment variables of all workers, or a sequence of such mappings, one an actor.
        backend: Where the actors live.
        shared_memory: Whether observations, actions, rewards and flags travel through memory that is shared with the
            workers, where these are processes and the specs are fixed arrays; otherwise they are sent.
        copy: Whether batches of observations are copies. False hands out views of the shared memory where that is
            possible, valid until that env's next step.

    Raises:
        ActorStartError: An env could not be made.
        SpaceMismatchError: The envs' values do not go into one batch.
        VectorEnvError: There is not enough memory to share.
    """

    def __init__(
        self,
        factories: Iterable[Callable[[], Any]],
        *,
        envs_per_actor: int = 1,
        autoreset: Autoreset = "next_step",
        on_failure: OnFailure = "raise",
        max_journal: int = 100_000,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 # frozen
        restart: RestartPolicy = RestartPolicy(max_restarts=3),  # noqa: B008 # frozen
        recycle: RecyclePolicy | None = None,
        standbys: int = 0,
        env_vars: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        backend: str | Backend = "process",
        shared_memory: bool = True,
        copy: bool = True,
    ) -> None:
        factories = list(factories)
        if not factories:
            raise VectorInputError("no factories: expected one callable an env, and at least one")
        if autoreset not in get_args(Autoreset):
            raise VectorInputError(f"autoreset is {autoreset!r}: expected one of {get_args(Autoreset)}")
        if on_failure not in get_args(OnFailure):
            raise VectorInputError(f"on_failure is {on_failure!r}: expected one of {get_args(OnFailure)}")
        if isinstance(envs_per_actor, bool) or not isinstance(envs_per_actor, int) or envs_per_actor < 1:
            raise VectorInputError(f"envs_per_actor is {envs_per_actor!r}: expected an int >= 1")
        if not _is_count(max_journal):
            raise VectorInputError(f"max_journal is {max_journal!r}: expected an int >= 0")
        for name, flag in (("shared_memory", shared_memory), ("copy", copy)):
            if not isinstance(flag, bool):
                raise VectorInputError(f"{name} is {flag!r}: expected True or False")
        backend = backends.resolve(backend)
        if recycle is not None and (envs_per_actor > 1 or not backend.kills):
            raise VectorInputError(
                f"recycle with envs_per_actor={envs_per_actor} and {backend!r}: expected one env an actor, "
                "so that no other's episode is cut off, and processes"
            )
        groups = [factories[i : i + envs_per_actor] for i in range(0, len(factories), envs_per_actor)]
        variables = _one_each(env_vars, len(groups))
        _check_standbys(standbys, factories, variables, backend)
        self._file = SharedFile("envactors-slab") if shared_memory and backend.kills else None
        self._arrived: dict[int, EnvFuture | Landed] = {}
        self._plane: Plane | None = None
        self._ledger = Ledger(len(factories))
        # What those wake that have something for whoever waits; not the facade itself, which they must not keep.
        self._waiter = object()
        self._is_closed = False
        # Whether a step of all envs is under way and they are not marked as owing it yet.
        self._is_unmarked = False
        self._slots: list[Slot] = []
        self.actors: list[ActorHandle] = []
        self._standbys: list[ActorHandle] = []
        pool = Standbys()
        alike = functools.partial(
            launch,
            backend=backend,
            deadlines=deadlines,
            restart=restart,
            shared=self._file,
            max_journal=max_journal if on_failure == "replay" else None,
        )
        try:
            for group, own_variables in zip(groups, variables, strict=True):
                first = len(self._slots)
                last = first + len(group) - 1
                actor = alike(
                    group,
                    name=f"env-{first}" if envs_per_actor == 1 else f"envs-{first}-{last}",
                    first=first,
                    env_vars=own_variables,
                    take_standby=pool.take if standbys else None,
                )
                self.actors.append(actor)
                for position in range(len(group)):
                    handle = actor
                    if envs_per_actor > 1:
                        handle = EnvHandle(actor._supervisor, actor._lifeline, position)
                    self._slots.append(Slot(first + position, handle, self._ledger, autoreset, on_failure, recycle))
            largest = groups[0]
            for number in range(standbys):
                name = f"standby-{number}"
                standby = alike(largest, name=name, first=-len(largest), env_vars=variables[0], make=pool.make)
                self._standbys.append(standby)
            inline = self.actors[0]._supervisor.plan.backend.inline
            # In line the steps run where they are started, and Ctrl-C shall reach them.
            self._shield = contextlib.nullcontext() if inline else SHIELD
            self._learn_specs()
            if self._file is not None:
                self._share(self._file, autoreset, on_failure != "raise", recycle is not None, copy)
        except BaseException:
            self.close(0)
            raise

    def _learn_specs(self) -> None:
        futures = []
        for slot in self._slots:
            future = ActorFuture(slot.handle._supervisor, slot.handle._lifeline)
            slot.handle._supervisor.ask(Kind.DESCRIBE, Describe(slot.handle._env), future, "describe", slot.handle._env)
            futures.append(future)
        descriptions = [Description(*value) for value in _results(futures)]
        first = descriptions[0]
        for i, other in enumerate(descriptions):
            for what in ("observation", "action", "reward"):
                ours, theirs = getattr(first, what), getattr(other, what)
                if not batches_alike(ours, theirs):
                    raise SpaceMismatchError(
                        f"the {what} spec of env {i} is {theirs}: expected that of env 0, {ours}; envs of one vector "
                        "have values of one shape and dtype"
                    )
        self._observation_spec: Spec | None = first.observation
        self._learnt_from_values = first.observation is None
        self._action_spec: Spec | None = first.action
        self._reward_spec: Spec = first.reward
        self.metadata = first.metadata
        self.render_mode = first.render_mode

    def _share(self, file: SharedFile, autoreset: Autoreset, keeps_last: bool, recycles: bool, copy: bool) -> None:
        """Has steps go through shared memory, where their values are arrays that are known beforehand."""
        observation, action, reward = self._observation_spec, self._action_spec, self._reward_spec
        if observation is None or action is None or not isinstance(reward, ArraySpec):
            return
        if not all(leaf.batchable for leaf in leaves(action)) or not any(
            leaf.batchable for leaf in leaves(observation)
        ):
            return
        layout = Layout(observation, action, reward, self.num_envs)
        try:
            self._plane = Plane(
                layout,
                file,
                self._slots,
                self._ledger,
                autoreset,
                keeps_last,
                recycles,
                copy,
                self._weakly(),
                self._waiter,
            )
        except (OSError, ValueError, OverflowError) as error:
            raise VectorEnvError(
                f"{layout.size} bytes of shared memory for {self.num_envs} envs could not be had ({error}): use fewer "
                "envs, give the process more memory, or shared_memory=False"
            ) from error
        _results(self._plane.attached)

    def _weakly(self) -> Callable[[EnvFuture], None]:
        """`_collect` without keeping this vector, which holds the plane that calls it."""
        method = weakref.WeakMethod(self._collect)

        def collect(future: EnvFuture) -> None:
            bound = method()
            if bound is not None:
                bound(future)

        return collect

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """How many envs there are."""
        return len(self._slots)

    @property
    def observation_spec(self) -> Spec | None:
        """One env's observation: its space's, or learnt from the first reset where it has none (None before)."""
        return self._observation_spec

    @property
    def action_spec(self) -> Spec | None:
        """One env's action; None where the envs have no action space, and then actions are not checked."""
        return self._action_spec

    @property
    def reward_spec(self) -> Spec:
        """One env's reward: float64, a scalar unless the env has a ``reward_space``."""
        return self._reward_spec

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, env_id: int) -> ActorHandle:
        """The handle of an env."""
        return self._slots[operator.index(env_id)].handle

    def stats(self) -> VectorStats:
        """Counts over the vector env's life."""
        return VectorStats(
            (self._ledger.steps + self._ledger.rounds).tolist(),
            self._ledger.episodes.tolist(),
            [actor.stats() for actor in self.actors],
        )

    # Stepping --------------------------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        env_ids: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Resets envs side by side.

        Args:
            seed: An int gives env ``i`` the seed ``seed + i``; a sequence has one (or None) for each env given.
            options: Passed to each env's ``reset``; a list or tuple has one (or None) for each env given.
            env_ids: Which envs, in this order; None for all.
            timeout: How long to wait, in seconds.

        Returns:
            ``(obs, infos)``: the observations batched per leaf with the envs along axis 0, each env's own dict.

        Raises:
            VectorTimeoutError: The waiting ended; ``recv`` hands the results out, with reward 0.
            VectorStepError: Some envs failed.
            AlreadyPendingError: An env still owes a result.
            VectorInputError: Wrong ids or seeds, or another number of options.
        """
        slots = self._select(env_ids)
        check_timeout(timeout, "reset(timeout=...)")
        seeds = seeds_for(seed, [slot.env_id for slot in slots])
        each: list[Any] = list(options) if isinstance(options, (list, tuple)) else [options] * len(slots)
        if len(each) != len(slots):
            raise VectorInputError(f"{len(each)} options for {len(slots)} envs: expected one an env")
        deadline = None if timeout is None else time.monotonic() + timeout
        self._begin_reset(slots, seeds, each)
        batch = self._gather(slots, timeout, deadline, "reset")
        return batch.obs, batch.infos

    def step(self, actions: Any, env_ids: Iterable[int] | None = None, timeout: float | None = None) -> Any:
        """Steps envs side by side and waits for all of them.

        Args:
            actions: Per leaf of the action spec an array with the envs along axis 0, or a list of one action an
                env; without an action spec any sequence.
            env_ids: Which envs, in the order of the actions; None for all.
            timeout: How long to wait, in seconds; killing is what ``deadlines`` are for.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)`` in the order of ``env_ids``: observations batched per
            leaf, rewards float64, flags bool, each env's own dict.

        Raises:
            VectorTimeoutError: The waiting ended; nothing is lost, ``recv`` hands the results out.
            VectorStepError: Some envs failed; the other results are in ``.batch``.
            AlreadyPendingError: An env still owes a result.
            NothingPendingError: A signal handler or another thread took the results meanwhile.
            VectorInputError: Wrong ids or actions, or an env that needs a reset first.
        """
        slots = self._select(env_ids)
        if timeout is not None:
            check_timeout(timeout, "step(timeout=...)")
        deadline = None if timeout is None else time.monotonic() + timeout
        plane = self._plane
        if plane is None or slots is not self._slots:
            self._begin(slots, actions, one_by_one=False)
            return self._gather(slots, timeout, deadline, "step")[1:6]
        with SHIELD:  # once for both: it takes a system call for each signal, there and back
            self._order_all(plane, actions)
            result = self._finish_at_once(plane)
        return self._await_all(timeout, deadline) if result is None else result

    def _begin_all(self, actions: Any) -> None:
        """Starts a step of all envs, for `_finish_all`; for who has checked that the vector is open."""
        plane = self._plane
        if plane is None:
            self._begin(self._slots, actions, one_by_one=False)
        else:
            with SHIELD:
                self._order_all(plane, actions)
                plane.ring()  # what the caller does until then may take long

    def _finish_all(self, timeout: float | None, deadline: float | None) -> tuple[Any, ...]:
        """Waits for what `_begin_all` has started, and gives it as `step` does."""
        plane, result = self._plane, None
        if plane is not None:
            with SHIELD:
                result = self._finish_at_once(plane)
        return self._await_all(timeout, deadline) if result is None else result

    def _order_all(self, plane: Plane, actions: Any) -> None:
        """Starts a step of all envs in shared memory, a batch at once; called under `SHIELD`."""
        if not plane.clear:
            self._check_slots(self._slots)
        values = split_batch(self._action_spec, actions, len(self._slots), "actions")
        self._is_unmarked = True
        left = plane.begin_all(values)
        if left:
            self._owe_all()
            self._ask(self._slots, values, left)

    def _finish_at_once(self, plane: Plane) -> tuple[Any, ...] | None:
        """Finishes what was started if that takes but a moment; called under `SHIELD`."""
        if not self._is_unmarked:
            return None
        result = plane.finish()
        self._is_unmarked = result is None
        return result

    def _await_all(self, timeout: float | None, deadline: float | None) -> tuple[Any, ...]:
        plane, result = self._plane, None
        if plane is not None and self._is_unmarked:
            try:
                reactor = self.actors[0]._supervisor.reactor
                reactor.listen(plane.last_rung, self._waiter, deadline, plane.last_bell)
                if reactor.listen(plane.settled, self._waiter, deadline, plane.bells):
                    with SHIELD:
                        if self._is_unmarked:  # else a signal handler has asked the envs for something
                            result = plane.gather()
                            self._is_unmarked = result is None
            finally:
                if result is None:
                    self._owe_all()
            if result is not None:
                return result
        return self._gather(self._slots, timeout, deadline, "step")[1:6]

    def _owe_all(self) -> None:
        """Marks the envs of a step of all; until it is finished, or somebody asks, nobody needs to know."""
        with SHIELD:
            if self._is_unmarked and self._plane is not None:
                self._plane.owe()
            self._is_unmarked = False

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Starts steps and returns at once; `recv` hands the results out. Arguments and errors as for `step`."""
        self._begin(self._select(env_ids), actions, one_by_one=True)

    def submit(self, actions: Any, env_ids: Iterable[int] | None = None) -> list[EnvFuture]:
        """Starts steps and gives a future for each; they never appear in `recv`.

        Arguments and errors as for `step`.

        Returns:
            Futures of `EnvStep`, in the order of ``env_ids``, made for `envactors.as_completed`.
        """
        slots = self._select(env_ids)
        values = self._check(slots, actions)
        with self._shield:
            return [slot.step(action, None) for slot, action in zip(slots, values, strict=True)]

    def recv(self, min_envs: int | None = None, max_envs: int | None = None, timeout: float | None = None) -> Batch:
        """Takes results of `send` (and of timed-out `step` and `reset`) in the order of their completion.

        Args:
            min_envs: How many to wait for; None (and any number beyond it): all that are under way.
            max_envs: How many to take at most.
            timeout: How long to wait, in seconds; then what is ready is returned, and nothing is lost.

        Raises:
            NothingPendingError: Nothing is under way.
            VectorStepError: An env failed; raised at once, with what is ready in ``.batch``.
            VectorInputError: ``min_envs`` or ``max_envs`` make no sense.
        """
        self._check_open()
        check_timeout(timeout, "recv(timeout=...)")
        for name, value in (("min_envs", min_envs), ("max_envs", max_envs)):
            if value is not None and not _is_count(value):
                raise VectorInputError(f"recv({name}={value!r}): expected an int >= 0, or None")
        if max_envs is not None and min_envs is not None and max_envs < min_envs:
            raise VectorInputError(f"recv(min_envs={min_envs}, max_envs={max_envs}): expected min_envs <= max_envs")
        if not self._count_owed():
            raise NothingPendingError("recv with nothing under way: send actions first")
        arrived = self._arrived
        deadline = None if timeout is None else time.monotonic() + timeout

        def enough() -> bool:
            there = len(arrived)
            if min_envs is not None and there >= min_envs:
                return True
            # Counted anew: a signal handler or another thread may take results meanwhile.
            return there >= self._count_owed() or any(future.failed for future in tuple(arrived.values()))

        self._wait(enough, deadline)
        if not self._count_owed():
            raise NothingPendingError(
                "recv with nothing under way any more: a signal handler or another thread took it"
            )
        ready = sorted(arrived.values(), key=lambda future: future.when)
        failed = [future for future in ready if future.failed]
        fine = [future for future in ready if not future.failed][:max_envs]
        return self._hand_out([*fine, *failed], "recv")

    def _count_owed(self) -> int:
        """How many results `recv` may wait for."""
        return sum(1 for slot in self._slots if slot.owed is not None and _is_collected(slot.owed))

    def _begin_reset(
        self,
        slots: list[Slot],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        *,
        collected: bool = True,
    ) -> list[EnvFuture]:
        """Starts resets; a seed and options for each env. Those that are not collected have their futures alone."""
        self._check_free(slots)
        arrived = self._collect if collected else None
        with self._shield:
            return [slot.reset(seed, own, arrived) for slot, seed, own in zip(slots, seeds, options, strict=True)]

    def _begin_as_given(self, actions: Sequence[Any], slots: list[Slot] | None = None) -> None:
        """Starts steps whose actions, one an env, are neither checked nor converted; for drop-ins."""
        slots = self._slots if slots is None else slots
        self._check_slots(slots)
        if len(actions) != len(slots):
            raise SpaceMismatchError(f"{len(actions)} actions for {len(slots)} envs: expected one an env")
        with self._shield:
            self._ask(slots, actions, range(len(slots)))

    def _begin(self, slots: list[Slot], actions: Any, *, one_by_one: bool) -> None:
        """Starts steps whose results are collected, in turns where that is possible."""
        values = self._check(slots, actions)
        with self._shield:
            everyone = range(len(slots))
            self._ask(slots, values, self._plane.begin(slots, values, one_by_one) if self._plane else everyone)

    def _ask(self, slots: list[Slot], values: Sequence[Any] | npt.NDArray[Any], positions: Iterable[int]) -> None:
        for position in positions:
            slots[position].step(values[position], self._collect)

    def _check(self, slots: list[Slot], actions: Any) -> Sequence[Any] | npt.NDArray[Any]:
        """Refuses steps that cannot be made; gives one action an env."""
        self._check_slots(slots)
        return split_batch(self._action_spec, actions, len(slots), "actions")

    def _check_slots(self, slots: list[Slot]) -> None:
        self._check_free(slots)
        for slot in slots:
            if slot.needs_reset:
                raise VectorInputError(f"env {slot.env_id} was asked to step: it needs a reset first")

    # Collecting ------------------------------------------------------------------------------------------

    def _collect(self, future: EnvFuture) -> None:
        """Takes in a result; runs in whichever thread reads replies."""
        self._arrived[future.env_id] = future
        self.actors[0]._supervisor.reactor.wake(self._waiter)

    def _look(self) -> None:
        if self._plane is not None:
            with self._shield:
                self._plane.look(self._arrived)

    def _wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        supervisors = [actor._supervisor for actor in self.actors]

        def there() -> bool:
            ended = self._is_closed and all(supervisor.has_ended for supervisor in supervisors)
            self._look()
            if done():
                return True
            if ended:
                self._check_open()  # nothing comes any more: the rest went with the shared memory
            return False

        bells = None if self._plane is None else self._plane.bells
        return supervisors[0].reactor.wait(there, self._waiter, deadline, bells)

    def _gather(self, slots: list[Slot], timeout: float | None, deadline: float | None, what: str) -> Batch:
        arrived = self._arrived

        def all_there() -> bool:
            return all(slot.env_id in arrived or slot.owed is None for slot in slots)

        there = self._wait(all_there, deadline)
        late = [slot.env_id for slot in slots if slot.env_id not in arrived]
        if there and late:
            self._check_open()
            raise NothingPendingError(
                f"{what} waited for the results of the envs {late}, which were handed out to a signal handler or "
                "another thread meanwhile: let one of the two take them"
            )
        if not there:
            raise VectorTimeoutError(
                f"{what} waited {timeout} s and the results of the envs {late} have not come; nothing is lost, recv "
                f"hands all of them out. Env {late[0]} is in {self._whereabouts(late[0])}",
                env_ids=late,
                timeout=timeout,
            )
        return self._hand_out([arrived[slot.env_id] for slot in slots], what)

    def _hand_out(self, futures: Sequence[EnvFuture | Landed], what: str) -> Batch:
        steps: list[EnvStep] = []
        failures: dict[int, BaseException] = {}
        with SHIELD:  # what is handed out is also taken into account
            for future in futures:
                del self._arrived[future.env_id]
                self._slots[future.env_id].owed = None
                error = future.exception()
                if error is None:
                    try:
                        steps.append(self._conform(future.result()))
                    except SpaceMismatchError as mismatch:
                        error = mismatch
                if error is not None:
                    failures[future.env_id] = error
            batch = self._batch(steps)
        self.actors[0]._supervisor.reactor.wake(self._waiter)  # whoever waits for the same ones
        if failures:
            first_id, first = next(iter(failures.items()))
            # An error of an actor says itself where it happened.
            where = "" if isinstance(first, ActorError) else f" ({self._whereabouts(first_id)})"
            raise VectorStepError(
                f"{len(failures)} of {len(futures)} envs failed in {what}; env {first_id}{where}: "
                f"{type(first).__name__}: {first}",
                failures=failures,
                batch=batch,
            ) from first
        return batch

    def _whereabouts(self, env_id: int) -> str:
        """Which actor an env is in, for errors."""
        handle = self._slots[env_id].handle
        return f"actor {handle.name!r}, pid {handle.pid}, incarnation {handle.incarnation}"

    def _conform(self, step: EnvStep) -> EnvStep:
        """Checks an observation against what others have shown; workers know no more than their own env."""
        if not self._learnt_from_values:
            return step
        if self._observation_spec is None:
            self._observation_spec = spec_of_value(step.obs)
        return step._replace(obs=conform(self._observation_spec, step.obs, f"the observation of env {step.env_id}"))

    def _batch(self, steps: list[EnvStep]) -> Batch:
        observations = [step.obs for step in steps]
        obs = observations if self._observation_spec is None else stack(self._observation_spec, observations)
        return Batch(
            np.array([step.env_id for step in steps], np.int64),
            obs,
            stack(self._reward_spec, [step.reward for step in steps]),
            np.array([step.terminated for step in steps], np.bool_),
            np.array([step.truncated for step in steps], np.bool_),
            [step.info for step in steps],
            np.array([step.incarnation for step in steps], np.int64),
        )

    def _let_envs_judge(self) -> None:
        """Lets envs step that were never reset, or whose episode is over, and decide themselves what that means.

        For drop-ins of vector envs that ask nothing else. An env that was lost needs a reset as ever.
        """
        for slot in self._slots:
            slot.needs_reset = slot.strict = False

    # Calling ---------------------------------------------------------------------------------------------

    def call(self, method: str, /, *args: Any, env_ids: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Calls a method of envs side by side.

        Args:
            method: The method's name.
            *args: Its arguments.
            env_ids: Which envs, in this order; None for all.
            **kwargs: Its keyword arguments.

        Returns:
            One value an env.

        Raises:
            Exception: What the first env that failed raised, after all have answered.
        """
        return _results([slot.handle.call(method, *args, **kwargs) for slot in self._select(env_ids)])

    def get_attr(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Reads an attribute of envs; one value an env."""
        return _results([slot.handle.get(name) for slot in self._select(env_ids)])

    def set_attr(self, name: str, values: Any, env_ids: Iterable[int] | None = None) -> None:
        """Writes an attribute of envs.

        Args:
            name: The attribute's name.
            values: A list or tuple has one value an env; anything else goes to all.
            env_ids: Which envs, in this order; None for all.

        Raises:
            VectorInputError: A list or tuple of another length.
        """
        slots = self._select(env_ids)
        each = list(values) if isinstance(values, (list, tuple)) else [values] * len(slots)
        if len(each) != len(slots):
            raise VectorInputError(f"set_attr({name!r}): {len(each)} values for {len(slots)} envs: expected one an env")
        _results([slot.handle.set(name, value) for slot, value in zip(slots, each, strict=True)])

    def render(self) -> list[Any]:
        """The frames of all envs, as their ``render`` gives them."""
        return self.call("render")

    # Closing ---------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Closes the envs and ends their processes, side by side; may be called again.

        Args:
            timeout: How long that may take before what is left is killed, in seconds; None: the close deadline.
        """
        check_timeout(timeout, "close(timeout=...)")
        self._is_closed = True
        supervisors = [actor._supervisor for actor in (*self.actors, *self._standbys)]
        close_all(supervisors, timeout)
        if all(supervisor.has_ended for supervisor in supervisors):
            self._plane = None  # whoever still waits holds it
            if self._file is not None:
                self._file.close()  # until now another process may have been on its way that was to have it

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<VectorEnv of {self.num_envs} envs{', closed' if self._is_closed else ''}>"

    # Checking --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ActorClosedError("this vector env is closed: make another")
        self.actors[0]._supervisor.check_owner()
        if self._is_unmarked:
            self._owe_all()

    def _select(self, env_ids: Iterable[int] | None) -> list[Slot]:
        self._check_open()
        if env_ids is None:
            return self._slots
        if isinstance(env_ids, (str, bytes)) or not isinstance(env_ids, Iterable):
            raise VectorInputError(f"env_ids is {env_ids!r}: expected an iterable of ints, or None for all")
        ids = []
        for one in env_ids:
            if isinstance(one, (bool, np.bool_)) or not isinstance(one, (int, np.integer)):
                raise VectorInputError(f"env_ids has {one!r}: expected ints from 0 to {self.num_envs - 1}")
            if not 0 <= one < self.num_envs:
                raise VectorInputError(f"env_ids has {one}: expected ids from 0 to {self.num_envs - 1}")
            ids.append(int(one))
        if len(set(ids)) != len(ids):
            raise VectorInputError(f"env_ids is {ids}: expected each id once")
        return [self._slots[i] for i in ids]

    def _check_free(self, slots: list[Slot]) -> None:
        owing = [slot.env_id for slot in slots if slot.owed is not None]
        if owing:
            raise AlreadyPendingError(
                f"the envs {owing} still owe a result: take it with recv (or from its future) before the next request"
            )


def _is_collected(owed: EnvFuture | Turn) -> bool:
    """Whether a result is handed out by `VectorEnv.recv` rather than by its future."""
    return isinstance(owed, Turn) or owed.collected


def _results(futures: list[ActorFuture]) -> list[Any]:
    """The results of all; where some failed, all are waited for and the first failure is raised."""
    failures = [future.exception() for future in futures]
    for failure in failures:
        if failure is not None:
            raise failure
    return [future.result() for future in futures]


def seeds_for(seed: int | Sequence[int | None] | None, env_ids: list[int]) -> list[int | None]:
    """One seed (or None) for each env, out of what `VectorEnv.reset` takes; see there."""
    if seed is None:
        return [None] * len(env_ids)
    if _is_count(seed):
        return [operator.index(seed) + env_id for env_id in env_ids]  # type: ignore[arg-type]
    if isinstance(seed, (str, bytes)) or not isinstance(seed, (Sequence, np.ndarray)):
        raise VectorInputError(f"seed is {seed!r}: expected an int >= 0, a sequence of them, or None")
    if len(seed) != len(env_ids):
        raise VectorInputError(f"{len(seed)} seeds for {len(env_ids)} envs: expected one an env")
    for one in seed:
        if one is not None and not _is_count(one):
            raise VectorInputError(f"seed has {one!r}: expected ints >= 0, or None")
    return [None if one is None else operator.index(one) for one in seed]


def _is_count(value: Any) -> bool:
    """Whether a value is an int, or NumPy's like of one, and not negative."""
    try:
        return not isinstance(value, (bool, np.bool_)) and operator.index(value) >= 0
    except TypeError:
        return False


def _check_standbys(
    standbys: int,
    factories: list[Callable[[], Any]],
    env_vars: Sequence[Mapping[str, str] | None],
    backend: Backend,
) -> None:
    """Refuses standbys that could not stand in for every actor."""
    if isinstance(standbys, bool) or not isinstance(standbys, int) or standbys < 0:
        raise VectorInputError(f"standbys is {standbys!r}: expected an int >= 0")
    if not standbys:
        return
    if not backend.kills:
        raise VectorInputError(
            f"standbys={standbys} with {backend!r}, where no process can be lost: expected 0, or backend='process'"
        )
    for env_id, factory in enumerate(factories):
        if factory is not factories[0]:
            raise VectorInputError(
                f"standbys={standbys}, and the factory of env {env_id} is {factory!r}, that of env 0 {factories[0]!r}: "
                "expected one and the same object for all, since a standby is made before it is known which env it "
                "will be; [make] * n, say"
            )
    for number, variables in enumerate(env_vars):
        if variables != env_vars[0]:
            raise VectorInputError(
                f"standbys={standbys}, and the env_vars of actor {number} are {variables!r}, those of actor 0 "
                f"{env_vars[0]!r}: expected the same for all, since a standby is started before it is known whose "
                "place it takes"
            )


def _one_each(
    env_vars: Mapping[str, str] | Sequence[Mapping[str, str]] | None, count: int
) -> Sequence[Mapping[str, str] | None]:
    if env_vars is None or isinstance(env_vars, Mapping):
        return [env_vars] * count
    if len(env_vars) != count:
        raise VectorInputError(f"env_vars has {len(env_vars)} mappings for {count} actors: expected one an actor")
    return env_vars
