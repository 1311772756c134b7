"""Checks the results and errors that a user of the simulated world gets against the promises of the library."""

from __future__ import annotations

import collections
import dataclasses
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from envactors.mailbox.control_page import BEGUN
from envactors.mailbox.messages import episode_seed
from simulation.envs import EnvFailedError, SimulatedEnv, checksum_of
from simulation.processes import FIRST_PID
from simulation.world import Violation, World

# The most episodes of an env one after the other that fail to begin.
_MOST_FAILURES = 100


@dataclasses.dataclass
class Model:
    """What is known of an env.

    Attributes:
        last: Its last observation, None before the first.
        ended: Whether its episode has ended, so that the next step resets it.
        needs_reset: Whether only a reset will do.
        token: The action of the step under way, None for a reset; nothing is under way if ``is_pending`` is False.
        token_before: The action of the step that the reset under way gives up, unless an interrupt is earlier.
        is_pending: Whether a step or reset is under way.
        seed: The seed of the reset under way, if the user gave one.
        options: Its options.
        root_seed: The seed of the last reset that the user gave one.
        episode: The number of the last episode since then, if each has a seed of its own.
        notes: What the env was given since its last result, or since what is under way was asked.
        notes_before: What it was given before that.
        notes_late: What of that, before its last result, may still run before the next one: a signal handler has asked
            for that result while the user was still calling.
        is_uncertain: Whether it may have been lost since its last result.
        posted: The call id of its last post when it was asked.
        must_reset: Whether its episode was lost.
        may_skip: Whether an episode may have failed to begin since the last one.
        tags: The values that its attribute may have, besides the first one.
        is_tag_known: Whether it can have no other.
        foreign: How many calls another thread has made, which may run at any time.
    """

    last: Any = None
    ended: bool = False
    needs_reset: bool = True
    token: int | None = None
    token_before: int | None = None
    is_pending: bool = False
    seed: int | None = None
    options: Any = None
    root_seed: int | None = None
    episode: int = -1
    notes: list[int] = dataclasses.field(default_factory=list)
    notes_before: list[int] = dataclasses.field(default_factory=list)
    notes_late: list[int] = dataclasses.field(default_factory=list)
    is_uncertain: bool = False
    posted: int = 0
    must_reset: bool = False
    may_skip: bool = False
    tags: list[int] = dataclasses.field(default_factory=lambda: [0])
    is_tag_known: bool = True
    foreign: int = 0


class _Answer(NamedTuple):
    """A result, as messages describe it."""

    env_id: int
    token: int | None
    obs: Any
    info: dict[str, Any]
    last: Any

    def __str__(self) -> str:
        before = None if self.last is None else self.last.tolist()
        return f"env {self.env_id}, asked {self.token}, answers {self.obs.tolist()}, {self.info}; before {before}"


class Checker:
    """Compares what a user is told with what was promised.

    Args:
        world: The world.
        num_envs: How many envs the vector has.
        autoreset: The vector's.
        on_failure: The vector's.
        seeds_episodes: Whether each episode has a seed of its own.
        is_hidden: Whether all that happens are crashes, of which a replay is to leave no trace.

    Attributes:
        models: What is known of each env.
        is_hidden: As above.
        replays: Whether failures are followed by replays.
        may_kill: Whether another process may be killed from outside.
        retries: How many more times than once each call may run, by its token.
        uncertain: The tokens of calls that nobody knows of whether they have run.
        unordered: The tokens of calls that may have run at another time than in their order.
        asked_before: For each call of another thread, the token of the user's last request before it was queued.
        last_token: The last token of the user. Actions and calls are told apart by these.
        canceled: The tokens of calls that must not run.
        has_exhausted: Whether an actor has failed for good.
        resets_later: Whether an env may be reset in the next process within the step that ends its episode.
    """

    def __init__(
        self, world: World, num_envs: int, *, autoreset: str, on_failure: str, seeds_episodes: bool, is_hidden: bool
    ) -> None:
        self.world = world
        self.models = [Model() for _ in range(num_envs)]
        self.may_kill = True
        self.retries: collections.Counter[int] = collections.Counter()
        self.uncertain: set[int] = set()
        self.unordered: set[int] = set()
        self.asked_before: dict[int, int] = {}
        self.last_token = 0
        self.canceled: set[int] = set()
        self.has_exhausted = False
        self.resets_later = False
        self._autoreset = autoreset
        self.replays = on_failure == "replay"
        self._on_failure = on_failure
        self._seeds_episodes = seeds_episodes
        self.is_hidden = is_hidden

    def next_token(self) -> int:
        """Return another token."""
        self.last_token += 1
        return self.last_token

    def fail(self, env_id: int, failure: BaseException) -> None:
        model = self.models[env_id]
        if not model.is_pending:
            raise Violation(f"env {env_id} fails twice: {failure!r}") from failure
        self.check_cause(env_id, failure)
        self.has_exhausted |= isinstance(failure, (ea.RestartsExhaustedError, ea.ActorStartError))
        model.must_reset = self._on_failure == "raise" and isinstance(failure, ea.ActorError)
        model.is_pending = False
        model.needs_reset = model.is_uncertain = model.may_skip = True

    def expect_seed(self, env_id: int, seed: int) -> None:
        """Note that the user resets an env with a seed."""
        self._forget_failed_seeds(env_id)
        model = self.models[env_id]
        model.seed = model.root_seed = seed
        model.episode = -1

    def _forget_failed_seeds(self, env_id: int) -> None:
        """Allow the seeds of earlier resets: a seed of the user begins its episodes anew."""
        self.world.failed_seeds = {failed for failed in self.world.failed_seeds if failed[0] != env_id}

    def check_process(self, env_id: int, model: Model, step: ea.EnvStep) -> None:
        """Check that a result that came after an interrupt belongs to the last request of its env."""
        self.world.note(f"env {env_id}, asked {model.token} before an interrupt, answers {step.obs.tolist()}")
        if step.obs[0] != env_id:
            raise Violation(f"another env's result: {step}")
        is_repeated = "failure" in step.info
        if step.obs[2] not in (model.token, model.token_before, -1) and not is_repeated:
            raise Violation(f"the result of another request than {model.token}: {step}")

    def check_cause(self, env_id: int, failure: BaseException) -> None:
        if not self.world.troubles or self.is_hidden:
            raise Violation(f"nothing has happened, or what is to leave no trace, and {failure!r}")
        if not isinstance(failure, (ea.ActorError, EnvFailedError)) or isinstance(failure, ea.SerializationError):
            raise Violation(f"env {env_id} fails with {failure!r}") from failure
        is_blamed = isinstance(failure, ea.ActorTimeoutError) and failure.method and failure.pid is not None
        if is_blamed and (failure.pid - FIRST_PID, failure.index) not in self.world.hung:
            raise Violation(f"it does not hang, and {failure!r}")
        model = self.models[env_id]
        is_own = is_blamed and failure.method == "step" and failure.index == env_id and model.is_pending
        if is_own and model.token not in (None, *self.world.hung[failure.pid - FIRST_PID, env_id]):
            raise Violation(f"it hangs, but not in {model.token}, and {failure!r}")
        is_blamed = isinstance(failure, ea.ActorDiedError) and failure.method == "step" and failure.__cause__ is None
        is_blamed = is_blamed and not failure.aborted and failure.index == env_id and failure.pid is not None
        if is_blamed and failure.call_id > model.posted:
            page = self.world.processes[failure.pid - FIRST_PID].page
            if page.counters[BEGUN] < failure.call_id:
                raise Violation(f"it had not begun, and {failure!r}")
        # What was not posted when its process ended has the number of the request before.
        is_lost = isinstance(failure, ea.ActorDiedError) and failure.index is not None and failure.call_id is not None
        is_lost = is_lost and failure.call_id > self.models[failure.index].posted and failure.pid is not None
        is_lost = is_lost and not any(env == failure.index for _, env in self.world.hung)  # too late does not count
        if is_lost and (failure.index, failure.call_id) in self.world.completed:
            raise Violation(f"its result was complete, and {failure!r}")

    def check_call(self, env_id: int, token: int, error: ea.ActorError) -> None:
        """Check that a call may fail with an error."""
        if not self.world.troubles:
            self.check_cause(env_id, error)
        is_own = isinstance(error, ea.ActorDiedError) and error.method == "note" and error.index == env_id
        if not is_own or error.aborted or error.pid is None or error.call_id is None:
            return
        process = self.world.processes[error.pid - FIRST_PID]
        if process.page.counters[BEGUN] < error.call_id:
            raise Violation(f"the call with {token} had not begun, and {error!r}") from error
        if error.call_id in self.world.replies and not self.world.raised:
            raise Violation(f"the call with {token} was answered, and {error!r}") from error

    def _check_in_time(self, env_id: int, what: _Answer) -> None:
        """Check that a result did not come after its deadline."""
        key = env_id, what.token
        ran = {process for *entry, process in self.world.log if tuple(entry) == key}
        if ran and ran <= self.world.too_late[key]:
            raise Violation(f"it came too late, and counts: {what}")

    def settle(self, env_id: int, row: Any) -> None:
        """Check one result."""
        model = self.models[env_id]
        obs, reward, terminated, truncated, info = row
        obs = np.array(obs)
        what = _Answer(env_id, model.token, obs, info, model.last)
        self.world.note(what)
        if not model.is_pending:
            raise Violation(f"two results of one request: {what}")
        if obs[0] != env_id:
            raise Violation(f"another env's result: {what}")
        failure = info.get("failure")
        if failure is not None and self._on_failure == "raise":
            raise Violation(f"a failure that is not raised: {what}")
        if failure is not None:
            self.check_cause(env_id, failure)
            model.may_skip = True
        final = np.array(info["final_obs"]) if "final_obs" in info else None
        shown = obs if final is None else final
        # If a process is recycled, the reset after its last step runs in the next one. If that fails, the step counts.
        is_kept = failure is not None and bool(terminated)
        if is_kept and (truncated or not self.resets_later or model.token is None):
            raise Violation(f"an episode has ended, although the step has failed: {what}")
        if failure is not None and model.token is not None and not (is_kept or truncated):
            raise Violation(f"a step that has failed is not truncated: {what}")
        is_step = (failure is None or is_kept) and model.token is not None and not model.ended
        if reward != (model.token if is_step else 0):
            raise Violation(f"another reward, {reward}: {what}")
        is_repeated = failure is not None and truncated and self._autoreset != "same_step" and model.token is not None
        if is_repeated:
            if not np.array_equal(obs, model.last):
                raise Violation(f"not the last observation: {what}")
        elif is_step:
            if terminated and final is None and self._autoreset == "same_step":
                raise Violation(f"an episode has ended, and no other has begun: {what}")
            self._check_step(model, shown, what)
            self._check_in_time(env_id, what)
            if (info if final is None else info["final_info"]).get("token", model.token) != model.token:
                raise Violation(f"another action's info: {what}")
        elif final is not None and not np.array_equal(final, model.last):
            raise Violation(f"not the last observation: {what}")
        if final is not None or not (is_step or is_repeated):
            self._check_reset(env_id, obs, info, what)
        if (final is not None and self._is_reset_later(what)) or env_id in self.world.failed_resets:
            # Calls that waited behind the last step of a process that is recycled have run before the reset; and so may
            # those that came between a reset that has raised and the next one.
            self.unordered.update(model.notes)
        self.world.failed_resets.discard(env_id)
        if model.token is None and model.seed is not None:
            self._forget_failed_seeds(env_id)  # the step before it may have failed after the user had asked for it
        model.last = obs
        model.is_pending = False
        model.is_uncertain, model.must_reset = failure is not None or model.token in self.world.raised, False
        model.notes_late = [token for token in model.notes_before if token in self.unordered]
        model.notes_before = []
        self.may_kill |= not any(model.is_pending for model in self.models)
        model.needs_reset = self._autoreset == "disabled" and bool(terminated or truncated)
        model.ended = self._autoreset == "next_step" and bool(terminated or truncated)

    def _check_step(self, model: Model, obs: Any, what: _Answer) -> None:
        assert model.token is not None
        if obs[2] != model.token:
            raise Violation(f"another action's result: {what}")
        if model.last is None:
            return
        # A call may have run between a step that has raised and the same step after a replay.
        is_lenient = model.is_uncertain or model.token in self.world.raised or model.foreign > 0
        is_lenient |= not self.unordered.isdisjoint([*model.notes_before, *model.notes, *model.notes_late])
        if obs[1] != model.last[1] + 1 or not (is_lenient or obs[3] in self._possible_checksums(model)):
            raise Violation(f"a step or call that was repeated or skipped: {what}")

    def _possible_checksums(self, model: Model) -> set[int]:
        """Return the checksums that an env may have after its step, with each uncertain call or without it."""
        found = {int(model.last[3])}
        for token in (*model.notes_before, model.token):
            others = {zlib.crc32(struct.pack("<q", token), before) for before in found}
            found = others | found if token in self.uncertain else others
        return found

    def _check_reset(self, env_id: int, obs: Any, info: dict[str, Any], what: _Answer) -> None:
        model = self.models[env_id]
        seed, failure = info["seed"], info.get("failure")
        if obs[1] != 0 or obs[2] != -1 or obs[3] != checksum_of(seed):
            raise Violation(f"no reset: {what}")
        if info["options"] != (model.options if model.token is None else None):
            raise Violation(f"other options: {what}")
        if model.token is None and model.seed not in (None, seed) and failure is None:
            raise Violation(f"another seed: {what}")
        if seed is None and info["is_renewed"]:
            raise Violation(f"no seed after the end of a process: {what}")
        was_given = (model.token is None and model.seed is not None) or self._seeds_episodes
        was_given |= self._is_reset_later(what)
        if seed is not None and not was_given and (self.is_hidden or not self.replays):
            raise Violation(f"a seed that nobody gave: {what}")
        # A reset that the user has called may be tried again with its seed, unless failures are raised.
        changes_seed = self._seeds_episodes and self._on_failure == "raise" and model.seed is None
        changes_seed |= self._on_failure != "replay" and model.token is not None
        if changes_seed and (env_id, seed) in self.world.failed_seeds:
            raise Violation(f"the seed of a reset that has failed: {what}")
        if self._seeds_episodes:
            root = model.root_seed
            assert root is not None, "the first reset has a seed"
            later = range(model.episode + 1, model.episode + (_MOST_FAILURES if model.may_skip else 2))
            model.may_skip = False
            of_episode = ((number, episode_seed(root, number) if number else root) for number in later)
            model.episode = next((number for number, wanted in of_episode if wanted == seed), -1)
            if model.episode < 0:
                raise Violation(f"the seed of no episode, or of one before: {what}")

    def _is_reset_later(self, what: _Answer) -> bool:
        """Return whether the reset of a step's result may have run in a later process than the step.

        If the process crashes that was to be recycled, the step runs again in the next one before the reset, so that
        this is not the first reset there.
        """
        if what.info["is_renewed"] or not self.resets_later:
            return bool(what.info["is_renewed"])
        return len({process for *entry, process in self.world.log if entry == [what.env_id, what.token]}) > 1

    def check_log(self) -> None:
        """Check how often everything has run, and in which order."""
        self.world.check_errors()
        self._check_order()
        each = collections.Counter(entry for entry in self.world.log if entry[1] is not None)
        runs: collections.Counter[tuple[int, int]] = collections.Counter()
        for (env_id, token, process), count in each.items():
            runs[env_id, token] += count
            if count > 1:
                raise Violation(f"process {process} ran {token} of env {env_id} {count} times")
        for (env_id, token), count in runs.items():
            if token in self.canceled:
                raise Violation(f"env {env_id} ran {token}, which was canceled")
            if count > 1 + self.retries[token] and self._on_failure != "replay":
                raise Violation(f"env {env_id} ran {token} {count} times")
            # Calls are harmless. They are the tokens with retries, even if these are 0.
            is_fatal = SimulatedEnv.poison and token % SimulatedEnv.poison == 0 and token not in self.retries
            # It may have ended a process that was being ended for another env, which had raised or was aborted: that is
            # not counted.
            # After a raise, a call may have run, which makes the inputs others.
            if is_fatal and count > 2 + self.world.raised.total() + self.world.aborts:
                raise Violation(f"env {env_id} was asked {token}, which kills it, {count} times")

    def _check_order(self) -> None:
        """Check that calls have run after all that was asked before them, and steps after all such calls.

        The steps of several envs run in any order, and so does what runs again.
        """
        last: collections.Counter[int] = collections.Counter()
        last_call: collections.Counter[int] = collections.Counter()
        seen = set(self.unordered)
        for env_id, token, process in self.world.log:
            if token is None or token in seen:
                continue
            seen.add(token)
            before = last if token in self.retries else last_call
            if self.asked_before.get(token, token) < before[process]:
                raise Violation(f"process {process} ran {token} of env {env_id} after {before[process]}")
            if token not in self.asked_before:
                last[process] = max(last[process], token)
                if token in self.retries:
                    last_call[process] = token
