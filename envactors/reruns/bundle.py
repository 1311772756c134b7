"""`load_bundle`, which reads a crash bundle, and the `Bundle`, which runs its inputs again in a fresh worker."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

from envactors import backends
from envactors.actor.actor import Actor
from envactors.actor.calls import Call
from envactors.actor.config import ActorConfig
from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, Lifeline
from envactors.crashes import files
from envactors.crashes.files import SavedInputs
from envactors.crashes.writer import ENDINGS, ending_of, wait_written
from envactors.errors import ActorError, ActorTimeoutError
from envactors.mailbox.factory import Factory, as_callable
from envactors.mailbox.messages import Failure, Frame, Kind, Replay, Start
from envactors.mailbox.pickling import dumps, dumps_by_value, load_message, loads
from envactors.options import Deadlines, RestartPolicy, is_int
from envactors.reruns.worker import SkippedFactory, run_request, wait_for_start

# Where a rerun has ended, if not in the request that failed.
_FACTORY, _BEFORE = "in the factory", "in the requests before"


@dataclasses.dataclass(frozen=True)
class Rerun:
    """How the inputs of a bundle have ended this time.

    Attributes:
        expected: How they ended when the bundle was written, such as ``"SIGSEGV in step 52"``.
        endings: How each rerun has ended.
        differs: Whether the observations differed from the recorded ones, in any rerun.
    """

    expected: str
    endings: list[str]
    differs: bool

    @property
    def is_same(self) -> bool:
        """Whether every rerun has ended in the same way."""
        return all(ending == self.expected for ending in self.endings)

    def __str__(self) -> str:
        times = len(self.endings)
        same = self.endings.count(self.expected)
        if self.is_same:
            return f"ends in the same way: {self.expected}, {same} of {times}"
        others = ", ".join(dict.fromkeys(ending for ending in self.endings if ending != self.expected))
        text = f"does not end in the same way: {self.expected}, {same} of {times}; instead: {others}"
        return f"{text}. Before that, the observations were not the recorded ones" if self.differs else text


class _Request(NamedTuple):
    """A request of a rerun.

    Attributes:
        where: The place that a rerun names which ends in this request.
        kind, payload: The message.
        method: The method, for errors.
        deadline: Its deadline; None for that of `Deadlines`.
    """

    where: str
    kind: Kind
    payload: bytes | bytearray
    method: str
    deadline: float | None = None


class Bundle:
    """A crash bundle.

    Attributes:
        path: Its directory.
        report: The content of its ``report.json``.
        inputs: The content of its ``inputs.pkl``.
    """

    def __init__(self, path: str, report: dict[str, Any], inputs: SavedInputs) -> None:
        self.path = path
        self.report = report
        self.inputs = inputs

    @property
    def last_observation(self) -> Any:
        """The last observation before the failure; None if there was none. Runs code of the env's modules."""
        return None if self.inputs.observation is None else loads(self.inputs.observation)

    @property
    def ending(self) -> str:
        """How the inputs ended, such as ``"SIGSEGV in step 52"``."""
        # A process that has ended in a replay has a journal only.
        was_replaying = self.inputs.request is None and self.inputs.journal is not None
        ending = {name: self.report[name] for name in ENDINGS}
        return _describe(ending, _BEFORE if was_replaying else self._where)

    @property
    def _where(self) -> str:
        method = self.report["method"]
        if method == "start":
            return _FACTORY
        if method is None:
            return "while idle"
        return f"in step {self.report['step']}" if method == "step" else f"in {method}"

    def check_complete(self) -> None:
        """Raise if the inputs begin in the middle, or lack the request that failed.

        Raises:
            ValueError: They do.
        """
        if self.report["method"] == "policy" and self.inputs.request is None:  # else it is a method of the env
            raise ValueError(
                f"{self.path} ends in the policy of a rollout, which is not part of a bundle: it has only the inputs "
                "of the env, and the error and the stacks in its report"
            )
        if self.report["begins_in_the_middle"]:
            raise ValueError(
                f"{self.path} begins in the middle: the env was not reset with a seed, or has taken more than "
                "max_journal steps since. The bundle has the action and the last observation"
            )

    def replay(self, times: int = 1, env: Factory | None = None) -> Rerun:
        """Run the inputs again, each time in a fresh worker.

        Args:
            times: How often.
            env: Makes the env in place of the factory, to try a fix; a callable, or ``"module:callable"``.

        Raises:
            ValueError: The inputs begin in the middle or lack the request that failed, or ``times`` is not positive.
        """
        if not is_int(times):
            raise ValueError(f"times is {times!r}: expected an int >= 1")
        self.check_complete()
        start = self.start(env)
        ended = [self._run(start) for _ in range(times)]
        return Rerun(self.ending, [ending for ending, _ in ended], any(differs for _, differs in ended))

    def start(self, env: Factory | None = None) -> Start:
        """Return the first message to a worker; see `replay`."""
        saved = self.inputs
        factory = saved.factory if env is None else dumps_by_value(as_callable(env, "the bundle"))
        skipped = pickle.dumps(SkippedFactory(factory))
        first = saved.env - saved.position
        factories = [*[skipped] * saved.position, factory]
        return Start(
            saved.name,
            first,
            factories,
            saved.registrations,
            journal=saved.has_checks,
            seed_episodes=saved.seed_episodes,
            snapshot=saved.snapshot,
        )

    def _run(self, start: Start) -> tuple[str, bool]:
        """Run the inputs once; return how they have ended, and whether the observations differed."""
        config = ActorConfig(
            name=start.name,
            backend=backends.resolve("process"),
            start=start,
            deadlines=Deadlines(**self.report["deadlines"]),
            restart=RestartPolicy(max_restarts=0),
            env_vars=self.inputs.env_vars,
        )
        actor = Actor(config)
        lifeline = Lifeline(actor)
        differs = False
        with ActorHandle(actor, lifeline):
            actor.join_and_start()
            for request in self._requests():
                replies: list[Frame] = []
                future: ActorFuture[Any] = ActorFuture(actor, lifeline)
                call = Call(request.method, self.inputs.env, request.kind, future, request.deadline)
                call.payload, call.before_outcome = request.payload, replies.append
                actor.accept(call)
                future.wait_ended()
                ending = _ending_of(replies, future, actor)
                if ending is not None:
                    where = request.where if actor.process.has_started else _FACTORY
                    return _describe(ending, where), differs
                differs |= request.kind == Kind.REPLAY and not load_message(bool, replies[0].payload)
        return _describe({}, self._where), differs

    def _requests(self) -> Iterator[_Request]:
        """Yield the requests to the worker."""
        journal, request = self.inputs.journal, self.inputs.request
        yield _Request(_FACTORY, Kind.EXTEND, dumps((wait_for_start, ())), "start")
        if journal is not None:
            yield _Request(_BEFORE, Kind.REPLAY, journal, "replay", self._deadline_of_journal(journal))
        if request is not None:
            kind, payload = request
            if kind in (Kind.STEP, Kind.RESET):
                kind, payload = Kind.EXTEND, bytes(dumps((run_request, request)))
            yield _Request(self._where, Kind(kind), payload, self.report["method"], self.report["deadline"])

    def _deadline_of_journal(self, journal: bytes) -> float | None:
        """Return a deadline that the requests together meet if each one meets its own; None for no limit."""
        each = [self.report["deadlines"][name] for name in ("call", "reset", "step")]
        longest = max((seconds for seconds in each if seconds is not None), default=None)
        return None if longest is None else longest * (1 + len(Replay(*loads(journal)).entries) + self.report["step"])


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a crash bundle.

    Args:
        path: Its directory, such as ``error.bundle``.

    Raises:
        OSError: There is no bundle.
        ValueError: It has another format, or is damaged.
    """
    path = os.fsdecode(path)
    wait_written(path)
    return Bundle(path, *files.read(path))


def _ending_of(replies: list[Frame], future: ActorFuture[Any], actor: Actor) -> dict[str, Any] | None:
    """Return how a request has ended; None if it has a result."""
    failure = actor.process.failure
    if replies and replies[0].kind == Kind.FAILED:
        failure = Failure(*loads(replies[0].payload))
    if replies and failure is None:
        return None
    error = None if replies else future.exception()
    assert error is None or isinstance(error, ActorError), "the worker has not replied"
    if isinstance(error, ActorError) and isinstance(error.__cause__, ActorTimeoutError):
        error = error.__cause__
    return ending_of({} if error is None else vars(error), failure)


def _describe(ending: dict[str, Any], where: str) -> str:
    """Return an ending, as `ENDINGS` lists its parts, in words."""
    if ending.get("exception") is not None:
        how = ending["exception"]
    elif ending.get("deadline") is not None:
        how = f"missed deadline of {ending['deadline']} s"
    elif ending.get("signal") is not None:
        names = {int(known): known.name for known in signal.Signals}
        how = names.get(ending["signal"], f"signal {ending['signal']}")
    else:
        how = "no failure" if ending.get("exitcode") is None else f"exit code {ending['exitcode']}"
    return f"{how} {where}"
