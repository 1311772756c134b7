"""`ActorEnvManager`: ML-Agents' ``SubprocessEnvManager`` on actors, one per env.

    get_steps ──▶ policies choose actions, each idle worker starts a step ──▶ all steps done once the first one is

A worker keeps only the future of its pending step. The actor restarts a process that crashed, within the limits of its
`RestartPolicy`; this module then ends the episodes of all envs, as ML-Agents does.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Any

from envactors import backends
from envactors.actor.future import ActorFuture, BoundToProcess
from envactors.actor.handle import ActorHandle, close_all
from envactors.actor.states import ActorState
from envactors.errors import ActorDiedError, ActorTimeoutError, VectorInputError, raised_by_user_code
from envactors.integrations.access import call_on, discard_process
from envactors.integrations.mlagents.adapter import UnityEnvAdapter
from envactors.integrations.options import launch_each
from envactors.mailbox.factory import as_callable
from envactors.mailbox.messages import Frame
from envactors.options import RestartPolicy, as_timeout
from envactors.vector.options import VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

try:
    from mlagents_envs.exception import (
        UnityCommunicationException,
        UnityCommunicatorStoppedException,
        UnityEnvironmentException,
        UnityTimeOutException,
    )
    from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig
    from mlagents_envs.timers import hierarchical_timer
except TypeError as _refusal:  # protobuf 4 and later reject the messages of mlagents_envs with this error
    raise ImportError(f"it does not work with the installed version of protobuf: {_refusal}") from _refusal

try:
    from mlagents.trainers.action_info import ActionInfo
    from mlagents.trainers.env_manager import EnvironmentStep, EnvManager
except ImportError:
    from envactors.integrations.mlagents.training import ActionInfo, EnvironmentStep, EnvManager

__all__ = ["ActionInfo", "ActorEnvManager", "EnvManager", "EnvironmentStep"]

logger: logging.Logger = logging.getLogger(__name__)

# Errors after which a process is gone, and errors of an env after which ML-Agents restarts the worker.
_LOSSES = (ActorDiedError, ActorTimeoutError)
_COMPLAINTS = (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)


_ITSELF = "ML-Agents steps each worker separately"
_REFUSED = {
    "envs_per_actor": f"{_ITSELF}, and continues as soon as the first result arrives",
    "autoreset": "Unity envs begin new episodes automatically",
    "on_failure": "ML-Agents restarts a worker that failed and resets all envs, within the limits of restart",
    "max_journal": "Unity envs are not replayed",
    "recycle": "replacing a worker would end the episodes of all envs",
    "standbys": "a Unity program starts with a worker id, and a standby does not know which worker it replaces",
    "copy": f"{_ITSELF}, and results are copies",
    "seed_episodes": "a Unity env takes a seed when it starts, but not when it resets",
    "snapshot": "the state of a Unity program cannot be read",
}


class Worker:
    """One env and its actor.

    Attributes:
        worker_id: Index of the worker.
        actor: Handle of the actor.
        previous_step: The last step or reset.
        previous_all_action_info: The actions that the policies chose after that step.
        future: A step that is pending or not collected yet; None if there is none.
        incarnation: The incarnation that holds the episodes; None before the first reset.
        replied_in: The incarnation that has sent the last reply.
    """

    def __init__(self, worker_id: int, actor: ActorHandle) -> None:
        self.worker_id = worker_id
        self.actor = actor
        self.previous_step: EnvironmentStep = EnvironmentStep.empty(worker_id)
        self.previous_all_action_info: dict[str, Any] = {}
        self.future: ActorFuture | None = None
        self.incarnation: int | None = None
        self.replied_in: int = 0

    def call(self, method: str, *args: Any, incarnation: int | None = None) -> ActorFuture[Any]:
        """Call a method of the env; with an incarnation, only in that process. If it is lost, so is the call."""
        return call_on(self.actor, method, args, incarnation=incarnation, before_outcome=self._take_reply)

    def _take_reply(self, frame: Frame) -> None:
        self.replied_in = frame.incarnation

    @property
    def waiting(self) -> bool:
        """True if a step is pending."""
        return self.future is not None


class ActorEnvManager(BoundToProcess, EnvManager):  # type: ignore[misc] # mypy skips its module
    """Steps many Unity envs, one per actor, with the interface of ML-Agents' env managers.

    A worker fails if its process crashes or exceeds a deadline, or if its env raises one of Unity's exceptions about
    communication, timeouts, or the start. If the restart limits allow it, the manager then restarts the worker, ends
    all episodes, sends the parameters again, and resets all envs, as ML-Agents does. Any other exception from an env is
    raised in the caller, and the env remains usable.

    Args:
        env_factory: ``f(worker_id, side_channels)`` creates an env, a ``mlagents_envs.base_env.BaseEnv``. It is pickled
            by value and called only in the workers.
        run_options: ML-Agents' ``RunOptions``, of which ``engine_settings`` and ``env_settings`` are used, or only an
            ``EngineConfig``.
        n_env: Number of envs.
        **options: See `envactors.VectorOptions`. Options about batches are rejected. By default ``restart`` follows
            ``run_options.env_settings`` or, without them, the limits of ML-Agents: one restart in any 60 seconds, and
            10 in the lifetime of a worker.

    Attributes:
        env_workers: The workers.
        actors: The handle of each process.
        env_parameters: The current parameters of the envs.

    Raises:
        SerializationError: ``env_factory`` cannot be pickled.
    """

    first_step_infos: list[EnvironmentStep]

    def __init__(
        self,
        env_factory: Callable[[int, list[Any]], Any] | str,
        run_options: Any,
        n_env: int = 1,
        **options: Unpack[VectorOptions],
    ) -> None:
        super().__init__()
        engine, policy = _settings(run_options)
        if "restart" not in options:
            options["restart"] = policy
        is_inline = backends.resolve(options.get("backend", "process")).traits.is_inline
        factories = [
            functools.partial(UnityEnvAdapter, as_callable(env_factory, f"worker {i}"), i, engine, is_inline)
            for i in range(n_env)
        ]
        names = [f"worker-{i}" for i in range(n_env)]
        self.actors: list[ActorHandle[Any]] = launch_each("ActorEnvManager", factories, names, options, _REFUSED)
        self.env_parameters: dict[str, Any] = {}
        self.env_workers: list[Worker] = [Worker(i, actor) for i, actor in enumerate(self.actors)]

    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Wait for pending steps and send parameters to all envs. They take effect in the next step.

        Args:
            config: Numbers, or objects with ``apply(name, channel)`` such as ML-Agents' samplers, by name.

        Raises:
            VectorInputError: A value is neither a number nor such an object.
        """
        for error in _failed(self._call_all("envactors_send", self._record_parameters(config))).values():
            if not isinstance(error, _LOSSES):  # a restarted worker receives all parameters with its reset
                raise raised_by_user_code(error)

    @property
    def training_behaviors(self) -> dict[str, Any]:
        """The ``BehaviorSpec`` of all envs, by behavior name. Reading it waits for pending steps."""
        return self._merged("envactors_behaviors")

    @property
    def external_brains(self) -> dict[str, Any]:
        """The old name of `training_behaviors`."""
        return self.training_behaviors

    @property
    def get_properties(self) -> dict[str, float]:
        """Numbers that were sent as parameters, and properties that envs sent. Reading it waits for pending steps."""
        return self._merged("envactors_properties")

    def close(self, timeout: float | None = None) -> None:
        """Wait for pending steps, close the envs, and end their processes; calling it again does nothing.

        Args:
            timeout: How long to wait before killing processes, in seconds; None for the close deadline.
        """
        timeout = as_timeout(timeout, "close(timeout=...)")
        close_all([worker.actor for worker in self.env_workers], timeout)

    # Methods of the base class ---------------------------------------------------------------------------

    def _step(self) -> list[EnvironmentStep]:
        while True:
            for worker in self.env_workers:
                if worker.future is None:
                    self._begin_step(worker)
            futures = self._pending_steps()
            wait(futures.values(), return_when=FIRST_COMPLETED)
            done = {worker: future for worker, future in futures.items() if future.done()}
            failed = _failed(done)
            if not failed:
                return [self._collect(worker) for worker in done]
            self._recover(failed, "step")

    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        self._record_parameters(config)
        self._discard_steps()
        resets: dict[Worker, ActorFuture] = {}
        left = self.env_workers
        while left:
            attempts = {worker: worker.call("reset", self.env_parameters) for worker in left}
            resets |= attempts
            left = self._replace(_failed(attempts), "reset")
        for worker, future in resets.items():
            worker.incarnation = worker.replied_in
            worker.previous_step = EnvironmentStep(future.result(), worker.worker_id, {}, {})
        return [worker.previous_step for worker in self.env_workers]

    # Steps -----------------------------------------------------------------------------------------------

    def _begin_step(self, worker: Worker) -> None:
        infos = worker.previous_all_action_info = self._take_step(worker.previous_step)
        actions = {name: info.env_action for name, info in infos.items() if len(info.agent_ids)}
        # The call is bound to the incarnation, since another process does not have the episodes.
        worker.future = worker.call("step", actions, incarnation=worker.incarnation)

    def _take_step(self, last_step: EnvironmentStep) -> dict[str, Any]:
        """Return the policies' actions after a step, by behavior name."""
        with hierarchical_timer("ActorEnvManager._take_step"):
            return {
                name: self.policies[name].get_action(decisions, last_step.worker_id)
                for name, (decisions, _) in last_step.current_all_step_result.items()
                if name in self.policies
            }

    def _pending_steps(self) -> dict[Worker, ActorFuture]:
        return {worker: worker.future for worker in self.env_workers if worker.future is not None}

    def _collect(self, worker: Worker) -> EnvironmentStep:
        """Return the finished step of a worker and merge its timers, if it has its own."""
        assert worker.future is not None, "the step is pending"
        results, timers, stats = worker.future.result()
        if timers is not None:
            with hierarchical_timer("workers") as node:
                node.merge(timers, root_name="worker_root", is_parallel=True)
        worker.previous_step = EnvironmentStep(results, worker.worker_id, worker.previous_all_action_info, stats)
        worker.future = None
        return worker.previous_step

    def _discard_steps(self) -> None:
        """Wait for all pending steps, and discard their results and those that are known."""
        failed = _failed(self._pending_steps())
        for worker in self.env_workers:
            worker.previous_step = EnvironmentStep.empty(worker.worker_id)  # without agents, if an interrupt comes
            worker.future = None
        self._replace({worker: error for worker, error in failed.items() if _is_loss(error)}, "step")

    # Restarting workers ----------------------------------------------------------------------------------

    def _recover(self, failed: Mapping[Worker, BaseException], method: str) -> None:
        """Restart failed workers. If one had an episode, end all episodes and reset all envs, as ML-Agents does."""
        self._replace(failed, method)
        if any(worker.incarnation is not None for worker in failed):
            self.reset()
            self._process_step_infos(self.first_step_infos)
            self.first_step_infos = []

    def _replace(self, failed: Mapping[Worker, BaseException], method: str) -> list[Worker]:
        """Let the actors restart failed workers, after discarding the processes of envs that raised.

        Raises:
            Exception: The error of a worker that has no restarts left, or that has not failed.
        """
        for worker, error in failed.items():
            worker.future = None
            if not _is_loss(error) or worker.actor.state is ActorState.DEAD:
                raise raised_by_user_code(error)
            logger.warning("restarting worker %d after: %s", worker.worker_id, error)
            if isinstance(error, _COMPLAINTS):
                discard_process(worker.actor, worker.replied_in, method, error)
        return list(failed)

    # Calls -----------------------------------------------------------------------------------------------

    def _record_parameters(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Check parameters, add them to `env_parameters`, and return them."""
        changes = dict(config or {})
        for name, value in changes.items():
            if not (hasattr(value, "apply") or isinstance(value, numbers.Real)):
                raise VectorInputError(
                    f"the parameter {name!r} is {value!r}: expected a number or an object with apply(name, channel)"
                )
        self.env_parameters |= changes
        return changes

    def _call_all(self, method: str, *args: Any) -> dict[Worker, ActorFuture]:
        return {worker: worker.call(method, *args, incarnation=worker.incarnation) for worker in self.env_workers}

    def _merged(self, method: str) -> dict[str, Any]:
        while True:
            futures = self._call_all(method)
            failed = _failed(futures)
            if not failed:
                return {name: value for future in futures.values() for name, value in future.result().items()}
            self._recover(failed, method)


def _failed(futures: Mapping[Worker, ActorFuture]) -> dict[Worker, BaseException]:
    """Wait for all futures and return the errors of those that failed."""
    return {worker: error for worker, future in futures.items() if (error := future.exception()) is not None}


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, _LOSSES + _COMPLAINTS)


def _settings(run_options: Any) -> tuple[Any, RestartPolicy]:
    """Return the engine configuration and the restart limits of a ``RunOptions`` or an ``EngineConfig``."""
    if isinstance(run_options, EngineConfig):
        return run_options, _policy(10, 1, 60)  # the defaults of ML-Agents' EnvironmentSettings
    engine, env = run_options.engine_settings, run_options.env_settings
    limits = env.max_lifetime_restarts, env.restarts_rate_limit_n, env.restarts_rate_limit_period_s
    return EngineConfig(*(getattr(engine, name) for name in EngineConfig._fields)), _policy(*limits)


def _policy(lifetime: int, count: int, period: float) -> RestartPolicy:
    return RestartPolicy(_limit(count), window=period, max_lifetime_restarts=_limit(lifetime))


def _limit(count: int) -> float:
    return math.inf if count == -1 else count
