"""The tree of errors; each of them pickles, whole."""

from __future__ import annotations

import concurrent.futures
import copyreg
import pickle
import sys

import numpy as np
import pytest

import envactors as ea
from envactors import errors
from envactors.errors import copy_error, describe_end

TREE = {
    ea.EnvActorsError: Exception,
    ea.ActorError: ea.EnvActorsError,
    ea.ActorStartError: ea.ActorError,
    ea.ActorDiedError: ea.ActorError,
    ea.NodeLostError: ea.ActorDiedError,
    ea.ActorTimeoutError: ea.ActorError,
    ea.ActorClosedError: ea.ActorError,
    ea.RestartsExhaustedError: ea.ActorError,
    ea.SerializationError: ea.ActorError,
    ea.VectorEnvError: ea.EnvActorsError,
    ea.VectorStepError: ea.VectorEnvError,
    ea.VectorTimeoutError: ea.VectorEnvError,
    ea.AlreadyPendingError: ea.VectorEnvError,
    ea.NothingPendingError: ea.VectorEnvError,
    ea.VectorInputError: ea.VectorEnvError,
    ea.SpaceMismatchError: ea.VectorInputError,
}
WHERE = {"actor": "env-3", "index": 3, "pid": 1234, "incarnation": 2, "method": "step", "call_id": 77}
DETAILS = {
    ea.ActorStartError: {"exitcode": 3, "signal": None, "stderr_tail": "tail"},
    ea.ActorDiedError: {"exitcode": None, "signal": 9, "stderr_tail": "tail", "aborted": True},
    ea.ActorTimeoutError: {"timeout": 2.5, "stacks": "Thread 0x1", "stderr_tail": "tail"},
}
ACTOR_ERRORS = [kind for kind in TREE if issubclass(kind, ea.ActorError)]


def make(kind):
    if issubclass(kind, ea.ActorError):
        return kind("the message", **WHERE, **DETAILS.get(kind, {}))
    return kind("the message")


def pickled(error):
    return pickle.loads(pickle.dumps(error))


class TwoArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def test_the_tree_is_as_drawn():
    for kind, parent in TREE.items():
        assert parent in kind.__bases__
    strangers = (errors.RemoteTraceback,)
    exported = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    own = {kind for kind in exported if kind.__module__ == errors.__name__ and not kind.__name__.startswith("_")}
    assert own == {*TREE, *strangers}


def test_time_outs_are_time_outs():
    for kind in (ea.ActorTimeoutError, ea.VectorTimeoutError):
        assert issubclass(kind, TimeoutError)
        assert issubclass(kind, concurrent.futures.TimeoutError)
        with pytest.raises(TimeoutError, match="the message"):
            raise make(kind)
    assert not any(issubclass(kind, TimeoutError) for kind in TREE if "Timeout" not in kind.__name__)


def test_wrong_input_is_a_value_error():
    assert issubclass(ea.VectorInputError, ValueError)
    assert issubclass(ea.SpaceMismatchError, ValueError)


def test_every_error_pickles_with_all_its_attributes():
    for kind in TREE:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            error = make(kind)
            again = pickle.loads(pickle.dumps(error, protocol))
            assert type(again) is kind
            assert (str(again), again.args) == ("the message", ("the message",))
            assert vars(again) == vars(error)
            assert vars(again).items() >= DETAILS.get(kind, {}).items()


def test_every_actor_error_says_where():
    for kind in ACTOR_ERRORS:
        assert vars(pickled(make(kind))).items() >= WHERE.items()
        assert vars(kind()).items() >= dict.fromkeys(WHERE).items()


def test_an_attribute_that_an_error_does_not_have_is_rejected():
    with pytest.raises(TypeError, match=r"ActorTimeoutError has no attributes \['exitcode'\]: expected \['actor'"):
        ea.ActorTimeoutError("late", exitcode=3)


def test_causes_of_exhausted_restarts_pickle_in_order():
    causes = [make(ea.ActorDiedError), make(ea.ActorTimeoutError), make(ea.ActorStartError)]
    again = pickled(ea.RestartsExhaustedError("spent", causes=causes, **WHERE))
    assert [type(cause) for cause in again.causes] == [type(cause) for cause in causes]
    assert [vars(cause) for cause in again.causes] == [vars(cause) for cause in causes]
    assert [str(cause) for cause in again.causes] == ["the message"] * 3
    assert ea.RestartsExhaustedError().causes == []


def test_a_step_error_pickles_with_its_failures_and_its_batch():
    batch = ea.Batch(
        np.array([0, 2]),
        np.zeros((2, 3), np.float32),
        np.ones(2),
        np.zeros(2, bool),
        np.ones(2, bool),
        [{"a": 1}, {}],
        np.array([0, 5]),
    )
    failures = {1: TwoArguments(3, "detail"), 3: make(ea.ActorTimeoutError), 4: OSError(2, "none", "a file")}
    again = pickled(ea.VectorStepError("3 of 5 failed", failures=failures, batch=batch))
    assert (type(again), str(again)) == (ea.VectorStepError, "3 of 5 failed")
    assert list(again.failures) == [1, 3, 4]
    assert [type(failure) for failure in again.failures.values()] == [
        TwoArguments,
        ea.ActorTimeoutError,
        FileNotFoundError,
    ]
    assert [str(failure) for failure in again.failures.values()] == [str(failure) for failure in failures.values()]
    assert (again.failures[1].code, again.failures[1].detail) == (3, "detail")
    assert vars(again.failures[3]) == vars(failures[3])
    assert again.failures[4].filename == "a file"
    assert isinstance(again.batch, ea.Batch)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again.batch, batch, strict=True))
    assert ea.VectorStepError().failures == {}


def test_a_step_error_pickles_within_another_value():
    error = ea.VectorStepError("failed", failures={0: TwoArguments(1, "x")})
    again = pickled({"errors": [error, error]})["errors"]
    assert again[0] is again[1]
    assert again[0].failures[0].code == 1


def test_a_timeout_error_pickles_without_its_future():
    error = ea.VectorTimeoutError("late", env_ids=[1], timeout=2.0, future=concurrent.futures.Future())
    assert vars(pickled(error)) == {"env_ids": [1], "timeout": 2.0, "future": None}


def test_a_remote_traceback_is_its_text():
    remote = pickled(ea.RemoteTraceback("Traceback: line 3\n"))
    assert remote.text == "Traceback: line 3\n"
    assert remote.text in str(remote)
    assert not isinstance(remote, ea.EnvActorsError)


def test_a_twin_is_another_error_with_the_same_story():
    """Two futures never share one exception: raising it would mix their tracebacks."""
    for kind in ACTOR_ERRORS:
        if kind is ea.ActorTimeoutError:
            continue
        error = make(kind)
        error.__cause__ = ValueError("why")
        try:
            raise error
        except ea.ActorError:
            other = copy_error(error)
        assert other is not error
        assert (type(other), str(other), vars(other)) == (kind, "the message", vars(error))
        assert other.__cause__ is error.__cause__
        assert other.__traceback__ is None


def test_a_copy_has_no_traceback_where_exceptions_are_pickled_with_theirs(monkeypatch):
    """As once `distributed` was imported."""

    def rebuild(args, state, traceback, context):
        error = ea.ActorDiedError(*args)
        vars(error).update(state)
        error.__traceback__ = traceback
        error.__context__ = context
        return error

    def reduce(error):
        return rebuild, (error.args, vars(error), error.__traceback__, error.__context__)

    monkeypatch.setitem(copyreg.dispatch_table, ea.ActorDiedError, reduce)
    with pytest.raises(ea.ActorDiedError) as caught:
        try:
            raise ValueError("before")
        except ValueError:
            raise make(ea.ActorDiedError)
    error = caught.value
    assert error.__traceback__ is not None
    assert error.__context__ is not None
    other = copy_error(error)
    assert (str(other), vars(other)) == (str(error), vars(error))
    assert (other.__traceback__, other.__context__) == (None, None)


def test_the_end_of_a_process_in_words():
    assert describe_end(3, None) == "ended with exit code 3"
    assert describe_end(None, 9) == "was killed by signal 9 (SIGKILL)"
    assert describe_end(None, 11) == "was killed by signal 11 (SIGSEGV)"
    assert describe_end(None, 44) == "was killed by signal 44 (a real-time signal)"
    assert describe_end(None, None) == "ended with an unknown status"


def test_a_copy_of_a_timeout_keeps_its_message():
    """OSError.__new__ drops the arguments where a subclass has an __init__ of its own."""
    error = ea.ActorTimeoutError("late", timeout=2.0)
    assert (str(copy_error(error)), copy_error(error).args) == ("late", ("late",))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups and no notes")
def test_a_step_error_pickles_with_nested_failures_and_its_notes():
    outer = ValueError("outer")
    outer.inner = TwoArguments(1, "x")
    group = ExceptionGroup("group", [TwoArguments(1, "x")])  # noqa: F821 # of Python 3.11
    for failure in (outer, group):
        arrived = pickle.loads(pickle.dumps(ea.VectorStepError("m", failures={0: failure})))
        assert repr(arrived.failures[0]) == repr(failure)
    error = ea.VectorStepError("m")
    error.add_note("a note")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["a note"]
