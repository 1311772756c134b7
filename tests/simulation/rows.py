"""Checks each row of each rollout: it follows from the row before, as the result of a step does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import envactors as ea
from envactors.rollout.context import generator_of
from simulation.checker import Checker
from simulation.policies import PolicyFailedError, SimulatedPolicy, choose
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.rollouts import Flight

# What is posted in a rollout has any call id.
_ANY_CALL = sys.maxsize


class RowChecker:
    """Checks rollouts.

    Args:
        checker: Knows what each env has done, and checks single results.
        actors: The envs of each actor.
        autoreset: The vector's.
    """

    def __init__(self, checker: Checker, actors: Sequence[range], autoreset: str) -> None:
        self._checker = checker
        self._world = checker.world
        self._models = checker.models
        self._actors = actors
        self._disables = autoreset == "disabled"
        self._is_next_step = autoreset == "next_step"
        # The envs that have failed in a rollout: what they are asked in one that was started before that is not known.
        self._unknown: set[int] = set()
        # What each env has failed with last.
        self._errors: dict[int, BaseException] = {}

    def begin(self) -> None:
        """Note that a rollout starts."""
        for env_id, model in enumerate(self._models):
            if not model.is_pending:
                model.is_pending = True
                model.posted = _ANY_CALL
                model.notes_before += model.notes
                model.notes = []
                self._unknown.discard(env_id)

    def check(self, flight: Flight, later: Sequence[Flight]) -> None:
        """Check the results of a rollout.

        Args:
            flight: The rollout.
            later: Those that were started after it.

        Raises:
            Violation: A promise does not hold.
        """
        may_kill = self._checker.may_kill
        whole = [range(len(self._models))]
        for envs, future in zip(whole if len(flight.futures) == 1 else self._actors, flight.futures, strict=True):
            error = future.exception()
            if isinstance(error, PolicyFailedError):
                self._forget(envs, error)
            elif error is not None and not isinstance(error, ea.VectorStepError):
                raise Violation(f"a rollout fails with {error!r}") from error
            else:
                rollout = future.result() if error is None else error.batch
                self._check_part(flight, envs, rollout, {} if error is None else error.failures)
        for model in self._models:
            model.is_pending = bool(later)
            self._checker.uncertain.update(model.notes)
        self._checker.may_kill = may_kill or not later

    def _forget(self, envs: range, error: PolicyFailedError) -> None:
        """Forget what envs have done: rows that were not handed out tell of it."""
        if not self._world.troubles or self._checker.is_hidden:
            raise Violation(f"nothing has happened, and {error!r}")
        for env_id in envs:
            model = self._models[env_id]
            model.needs_reset = model.is_uncertain = model.may_skip = True
            self._unknown.add(env_id)

    def _check_part(self, flight: Flight, envs: range, rollout: ea.Rollout, failures: dict[int, BaseException]) -> None:
        """Check the rows of some actors."""
        self._check_shapes(flight, envs, rollout, failures)
        told = {(step, env_id): error for step, env_id, error in rollout.failures}
        infos = {(step, env_id): info for step, env_id, info in rollout.infos}
        if len(told) != len(rollout.failures) or len(infos) != len(rollout.infos):
            raise Violation("a rollout tells of one step twice")
        for actor in self._actors:
            if actor.start not in envs:
                continue
            self._check_actions(flight, rollout, slice(actor.start - envs.start, actor.stop - envs.start), actor.start)
            failed = [env_id for env_id in actor if env_id in failures]
            # Where the last step of the actor has failed; None if the actor has.
            steps = (step for (step, env_id), error in told.items() if env_id in failed and error is failures[env_id])
            last = next(steps, None)
            if any(failures[env_id] is self._errors.get(env_id) or env_id in self._unknown for env_id in failed):
                last = None  # a rollout before has failed, also with its policy: this one may not have begun
            for env_id in actor:
                end = flight.steps if not failed else last
                if last is not None and env_id not in failures:
                    # Where the actor has no process any more, a replay that was to come leaves the step undone.
                    ran = rollout.valid[last, env_id - envs.start] or (last, env_id) in infos
                    end = last + bool(ran or not self._checker.replays)
                self._check_env(rollout, env_id, env_id - envs.start, end, infos, told)
                if env_id in failures:
                    self._models[env_id].is_pending = True
                    is_known = last is not None and rollout.actions is not None
                    token = int(rollout.actions[last, env_id - envs.start]) if is_known else None
                    self._models[env_id].token = token
                    self._checker.fail(env_id, failures[env_id])
                    # If the rollout could not run at all, the next step tells of a process that was lost before it.
                    self._models[env_id].must_reset &= last is not None
                    self._unknown.add(env_id)
                    self._errors[env_id] = failures[env_id]

    def _check_shapes(
        self, flight: Flight, envs: range, rollout: ea.Rollout, failures: dict[int, BaseException]
    ) -> None:
        shape = flight.steps, len(envs)
        arrays = [rollout.rewards, rollout.terminated, rollout.truncated, rollout.starts, rollout.valid]
        if rollout.env_ids.tolist() != list(envs) or not failures.keys() <= {*envs}:
            raise Violation(f"a rollout of the envs {rollout.env_ids}, with failures of {list(failures)}")
        if any(array.shape != shape for array in arrays) or rollout.obs.shape[:2] != shape:
            raise Violation(f"a rollout is not of the shape {shape}")
        if len(rollout.last_obs) != len(envs):
            raise Violation(f"{len(rollout.last_obs)} last observations of {len(envs)} envs")
        if set(rollout.policy_version.tolist()) != {flight.version}:
            raise Violation(f"the policy has version {rollout.policy_version} rather than {flight.version}")

    def _check_actions(self, flight: Flight, rollout: ea.Rollout, columns: slice, first: int) -> None:
        """Check that the policy of one process has chosen each action from what the rollout says."""
        for step in range(flight.steps):
            if not rollout.valid[step, columns].any():
                continue
            obs, starts = rollout.obs[step, columns], rollout.starts[step, columns]
            wanted = choose(obs, starts, generator_of(flight.seed, step, flight.number, first), flight.version)
            if not np.array_equal(rollout.actions[step, columns], wanted):
                found = rollout.actions[step, columns].tolist()
                raise Violation(f"step {step}: the actions are {found} rather than {wanted.tolist()}")
            if SimulatedPolicy.has_extras and not np.array_equal(rollout.extras["ages"][step, columns], obs[:, 1]):
                raise Violation(f"step {step}: extras are those of other observations")

    def _check_env(
        self,
        rollout: ea.Rollout,
        env_id: int,
        column: int,
        end: int | None,
        infos: dict[tuple[int, int], dict[str, Any]],
        told: dict[tuple[int, int], BaseException],
    ) -> None:
        """Check the rows of one env; ``end`` is the first one that did not run, None if that is not known."""
        model, steps = self._models[env_id], len(rollout.rewards)
        has_begun = bool(rollout.valid[0, column]) or (0, env_id) in infos
        if env_id in self._unknown and (has_begun if end is None else end > 0):
            self._unknown.discard(env_id)
            # An env that has raised may have taken a part of its step.
            model.last = None if rollout.valid[0, column] else np.array(rollout.obs[0, column])
            model.is_uncertain = True
            model.ended = self._is_next_step and not rollout.valid[0, column]
            model.needs_reset = self._disables and not rollout.valid[0, column] and (0, env_id) not in infos
        for step in range(steps):
            info = infos.get((step, env_id))
            ran = bool(rollout.valid[step, column]) or info is not None
            has_ended = self._disables and model.needs_reset
            if ran and has_ended:
                raise Violation(f"env {env_id} takes step {step} after the end of its episode")
            repeats = has_ended and end is not None and step < end
            if (not ran and not repeats) or step == end:
                if end not in (None, step) or rollout.valid[step:, column].any():
                    raise Violation(f"env {env_id} has not taken step {step}; it should end before step {end}")
                return
            self._check_row(rollout, step, env_id, column, {} if info is None else info, ran, (step, env_id) in told)

    def _check_row(
        self, rollout: ea.Rollout, step: int, env_id: int, column: int, info: dict[str, Any], ran: bool, fails: bool
    ) -> None:
        model = self._models[env_id]
        before, start = rollout.obs[step, column], bool(rollout.starts[step, column])
        after = rollout.last_obs[column] if step == len(rollout.rewards) - 1 else rollout.obs[step + 1, column]
        flags = bool(rollout.terminated[step, column]), bool(rollout.truncated[step, column])
        reward, what = float(rollout.rewards[step, column]), f"env {env_id}, step {step}"
        if model.last is not None and not np.array_equal(before, model.last):
            raise Violation(f"{what}: {before.tolist()} follows {model.last.tolist()}")
        if start != (before[1] == 0) and not model.is_uncertain:
            raise Violation(f"{what}: starts is {start}, and the observation {before.tolist()}")
        if not ran:
            if reward or any(flags) or not np.array_equal(after, before):
                raise Violation(f"{what}: {after.tolist()}, {reward}, {flags} is to repeat {before.tolist()}")
            return
        if fails != ("failure" in info):
            raise Violation(f"{what}: the failures of the rollout and the info {info} differ")
        is_step = not model.ended and not fails
        if bool(rollout.valid[step, column]) != is_step:
            raise Violation(f"{what} is valid: {not is_step}; info {info}, ended {model.ended}")
        # Without an action space there are no actions before the first one is chosen.
        model.token = 0 if rollout.actions is None else int(rollout.actions[step, column])
        model.is_pending = True
        model.seed = model.options = None
        # Calls since the rollout began have run before any of its steps, or after them.
        model.is_uncertain |= bool(model.notes)
        self._checker.settle(env_id, (after, reward, *flags, info))
