"""What env code logs reaches the caller's logging, once, wherever the env runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading

import pytest
from helpers import FORK_SERVER, SOON, Counter, wait_until
from nodes import preloading_backend, standing

import envactors as ea
from envactors.remote import LocalNodes
from envactors.testing import EchoEnv

NAME = "some.env"


class Logger(Counter):
    """Logs on command, as envs do."""

    def log(self, level, message, *args):
        logging.getLogger(NAME).log(level, message, *args)

    def log_error(self):
        try:
            raise LookupError("no such level")
        except LookupError:
            logging.getLogger(NAME).exception("it went wrong")

    def log_with_extra(self):
        logging.getLogger(NAME).warning("a run", extra={"run": {"seed": 3}, "lock": threading.Lock()})

    def level(self, name):
        return logging.getLogger(name).getEffectiveLevel()

    def log_much(self, count):
        threads = [threading.Thread(target=self._log_numbers, args=(number, count)) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in range(count):
            self.add(1)
            self._log_numbers("main", 1, number)
        for thread in threads:
            thread.join()
        return count

    def _log_numbers(self, who, count, first=0):
        for number in range(first, first + count):
            logging.getLogger(NAME).warning("%s %d", who, number)

    def log_in_a_signal_handler(self):
        def handle(*_):
            logging.getLogger(NAME).warning("handled")

        signal.signal(signal.SIGUSR1, handle)
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGUSR1)
            logging.getLogger(NAME).warning("x" * 100_000)

    def fork_and_log(self):
        pid = os.fork()
        if pid == 0:
            logging.getLogger(NAME).warning("of a child")
            os._exit(0)
        os.waitpid(pid, 0)

    def die(self):
        logging.getLogger(NAME).warning("the last words")
        os.kill(os.getpid(), signal.SIGKILL)


# Not for the whole module: once the last actor has ended, all that was to be logged has been, for those that have none.
@pytest.fixture(scope="class")
def far(helper_processes):
    """A backend of one node that stays for the tests of a class."""
    backend = preloading_backend(LocalNodes(1), __name__)
    with standing(backend):
        yield backend


@pytest.fixture(params=["forkserver", "loky", "node"])
def actor(request, far):
    backend = {"forkserver": FORK_SERVER, "node": far}.get(request.param) or ea.ProcessBackend(request.param)
    with ea.spawn(Logger, name="loud", backend=backend, restart=ea.RestartPolicy(max_restarts=1)) as actor:
        actor.add(1).result(SOON)
        yield actor


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == NAME]


class TestWherever:
    """With every start method, and on a node."""

    def test_records_come_under_their_own_names_with_the_actors(self, actor, caplog, capfd):
        actor.log(logging.WARNING, "careful: %s", [1, 2]).result(SOON)
        actor.log_error().result(SOON)
        wait_until(lambda: len(messages(caplog)) == 2)
        careful, wrong = (record for record in caplog.records if record.name == NAME)
        assert (careful.levelno, careful.getMessage(), careful.exc_text) == (logging.WARNING, "careful: [1, 2]", None)
        assert (careful.actor, careful.env_id, careful.incarnation) == ("loud", 0, 0)
        assert (careful.funcName, careful.process) == ("log", actor.pid)
        assert wrong.getMessage() == "it went wrong"
        assert "LookupError: no such level" in wrong.exc_text
        assert "careful" not in "".join(capfd.readouterr()), "it is no line of output, too"

    def test_threads_and_results_do_not_mix_up(self, actor, caplog):
        assert actor.log_much(200).result(SOON) == 200
        wait_until(lambda: len(messages(caplog)) == 5 * 200)
        for who in (*range(4), "main"):
            numbers = [int(text.split()[1]) for text in messages(caplog) if text.split()[0] == str(who)]
            assert numbers == list(range(200))
        assert actor.add(0).result(SOON) == 201

    def test_the_last_output_of_a_process_arrives(self, actor, caplog):
        with pytest.raises(ea.ActorDiedError):
            actor.die().result(SOON)
        wait_until(lambda: messages(caplog) == ["the last words"])


def test_records_keep_their_extra(caplog):
    """Only the names of the actor and its env used to arrive."""
    with ea.spawn(Logger) as actor:
        actor.log_with_extra().result(SOON)
        wait_until(lambda: messages(caplog))
    (record,) = (record for record in caplog.records if record.name == NAME)
    assert (record.run, record.actor) == ({"seed": 3}, actor.name)
    assert record.lock.startswith("<unlocked _thread.lock object")  # it cannot be pickled


def test_log_records_below_the_callers_level_are_not_sent(caplog):
    caplog.set_level(logging.ERROR, NAME)
    logging.getLogger("some.other").setLevel(logging.DEBUG)
    try:
        with ea.spawn(Logger) as actor:
            assert actor.level(NAME).result(SOON) == logging.ERROR
            assert actor.level("some.other").result(SOON) == logging.DEBUG
            assert actor.level("any").result(SOON) == logging.root.level
            actor.log(logging.WARNING, "too little").result(SOON)
            actor.log(logging.ERROR, "enough").result(SOON)
            wait_until(lambda: messages(caplog) == ["enough"])
    finally:
        logging.getLogger("some.other").setLevel(logging.NOTSET)


def test_logs_of_signal_handlers_arrive(caplog):
    with ea.spawn(Logger) as actor:
        actor.log_in_a_signal_handler().result(SOON)
        wait_until(lambda: len(messages(caplog)) == 100)
        assert messages(caplog).count("handled") == 50
        assert actor.add(1).result(SOON) == 1


def test_a_child_of_the_env_prints(caplog, capfd):
    with ea.spawn(Logger, name="parent") as actor:
        actor.fork_and_log().result(SOON)
        assert actor.add(1).result(SOON) == 1
    assert "[parent] of a child" in capfd.readouterr().err
    assert messages(caplog) == []


def test_threads_and_inline_envs_use_the_callers_logging(caplog):
    for backend in ("thread", "inline"):
        with ea.spawn(Logger, backend=backend) as actor:
            actor.log(logging.WARNING, backend).result(SOON)
    assert messages(caplog) == ["thread", "inline"]


class Chatty(EchoEnv):
    def step(self, action):
        logging.getLogger(NAME).warning("step %d of env %d", self.steps, self.env_id)
        return super().step(action)


def test_steps_log_while_they_run(caplog):
    factories = [lambda i=i: Chatty(i) for i in range(4)]
    with ea.VectorEnv(factories, envs_per_actor=2) as envs:
        envs.reset(seed=0)
        for turn in range(20):
            obs, *_ = envs.step([turn] * 4)
            assert obs[:, 1].tolist() == [turn + 1] * 4
        wait_until(lambda: len(messages(caplog)) == 80)
    records = [record for record in caplog.records if record.name == NAME]
    assert all(record.getMessage().endswith(f"of env {record.env_id}") for record in records)
    assert {record.actor for record in records} == {"envs-0-1", "envs-2-3"}


def test_starts_losses_and_renewals_are_reported(caplog):
    caplog.set_level(logging.INFO, "envactors")
    policy = ea.RestartPolicy(max_restarts=1, backoff=0.0)
    with ea.spawn(Logger, name="told", restart=policy) as actor:
        actor.add(1).result(SOON)
        assert actor.renew().result(SOON) == 1
        for _ in range(2):
            with pytest.raises(ea.ActorError):
                actor.die().result(SOON)
        wait_until(lambda: actor.state is ea.ActorState.DEAD)
    told = [record for record in caplog.records if record.name == "envactors.actors"]
    assert [(record.levelname, record.incarnation, record.getMessage().split(",")[0][:40]) for record in told] == [
        ("INFO", 0, told[0].getMessage().split(",")[0][:40]),
        ("INFO", 0, "actor 'told' gets a new process: on requ"),
        ("INFO", 1, told[2].getMessage().split(",")[0][:40]),
        ("WARNING", 1, "actor 'told' (env 0"),
        ("INFO", 2, told[4].getMessage().split(",")[0][:40]),
        ("WARNING", 2, "actor 'told' (env 0"),
    ]
    assert {(record.actor, record.env_id) for record in told} == {("told", 0)}
    for start in told[0], told[2], told[4]:
        assert start.getMessage().startswith("actor 'told' has started in ")
    assert "(SIGKILL) in die" in told[3].getMessage()


def test_without_any_logging_set_up_losses_print_nothing(capfd):
    with ea.VectorEnv([EchoEnv] * 2, on_failure="renew") as envs:
        envs.reset(seed=0)
        os.kill(envs[0].pid, signal.SIGKILL)
        wait_until(lambda: envs[0].incarnation == 1)
        envs.step([1, 2])
    assert capfd.readouterr().err == ""


class Failing(EchoEnv):
    """Raises, hangs, or crashes in a step with the action for it."""

    def step(self, action):
        if action == 1:
            raise ValueError("no such action")
        while action == 2:
            pass
        if action == 3:
            os.abort()
        return super().step(action)


def lines_with(caplog, text):
    return [record.getMessage() for record in list(caplog.records) if text in record.getMessage()]


class RaisesInClose(EchoEnv):
    """An env that cannot be closed."""

    def close(self):
        raise ConnectionError("no such server")


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_exceptions_of_close_are_logged(caplog, backend):
    with ea.VectorEnv([RaisesInClose] * 2, envs_per_actor=2, backend=backend):
        pass
    wait_until(lambda: len(lines_with(caplog, "ConnectionError: no such server")) == 2)
    for env_id, record in enumerate(caplog.records):
        assert record.getMessage().startswith(f"close of env {env_id} of actor 'envs-0-1' has raised\nTraceback")
        assert (record.levelname, record.actor, record.env_id) == ("WARNING", "envs-0-1", env_id)


@pytest.mark.parametrize(
    ("action", "kind", "evidence"),
    [
        (1, "raised ValueError", "ValueError: no such action"),
        (2, "passed its deadline", "in step"),
        (3, "SIGABRT", "in step"),
    ],
)
def test_the_log_shows_where_the_env_was_when_its_process_was_lost(action, kind, evidence, caplog, monkeypatch):
    # A worker on a busy machine may not run for 0.2 s.
    monkeypatch.setattr("envactors.actor.actor._STACKS_GRACE", 1.0)
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.2)
    options = {"on_failure": "renew", "deadlines": ea.Deadlines(step=0.5), "restart": restart}
    with ea.VectorEnv([Failing], **options) as envs:
        envs.reset(seed=0)
        assert envs.step([action])[3][0]
        envs.step([4])
        wait_until(lambda: lines_with(caplog, kind))
        (line,) = lines_with(caplog, kind)
        assert evidence in line
        first = next(text for text in line.splitlines() if text.startswith("  File "))
        assert "test_logging" in first
        wait_until(lambda: lines_with(caplog, "actor 'env-0': restart 1 of 9 in 0.2 s"))


def test_the_record_of_a_failure_names_the_env_that_has_failed(caplog):
    with ea.VectorEnv([Failing] * 2, envs_per_actor=2, on_failure="renew") as envs:
        envs.reset(seed=0)
        envs.step([0, 3])
        wait_until(lambda: lines_with(caplog, "SIGABRT"))
        assert [record.env_id for record in list(caplog.records) if "SIGABRT" in record.getMessage()] == [1]


def test_the_log_says_that_no_restart_is_left(caplog):
    with ea.VectorEnv([Failing], on_failure="renew", restart=ea.RestartPolicy(max_restarts=1, backoff=0)) as envs:
        for _ in range(2):
            envs.reset()
            with contextlib.suppress(ea.VectorStepError):
                envs.step([3])
        wait_until(lambda: len(lines_with(caplog, "SIGABRT")) == 2)
        ends = [line.splitlines()[0].endswith("; it is not restarted") for line in lines_with(caplog, "SIGABRT")]
        assert ends == [False, True]


def test_evidence_is_logged_once_in_a_while(caplog, monkeypatch):
    monkeypatch.setattr("envactors.actor.log._EVIDENCE_PERIOD", SOON)
    policy = ea.RestartPolicy(max_restarts=99, backoff=0)
    with ea.VectorEnv([Failing], on_failure="renew", restart=policy) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([1])
            envs.step([4])
        wait_until(lambda: len(lines_with(caplog, "raised ValueError")) == 5)
        assert len(lines_with(caplog, "Traceback")) == 1


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_the_log_shows_where_an_env_of_this_process_has_raised(backend, caplog):
    restart = ea.RestartPolicy(max_restarts=9, backoff=0)
    with ea.VectorEnv([Failing] * 2, on_failure="renew", backend=backend, restart=restart) as envs:
        envs.reset(seed=0)
        envs.step([1, 0])
        wait_until(lambda: lines_with(caplog, "raised ValueError"))
        (line,) = lines_with(caplog, "raised ValueError")
        assert "actor 'env-0'" in line
        first = next(text for text in line.splitlines() if text.startswith("  File "))
        assert "test_logging" in first


def test_the_log_says_that_an_episode_was_replayed(caplog):
    policy = ea.RestartPolicy(max_restarts=9, backoff=0)
    with ea.VectorEnv([EchoEnv] * 2, on_failure="replay", restart=policy) as envs:
        envs.reset(seed=0)
        envs.step([1, 2])
        os.kill(envs[1].pid, signal.SIGKILL)
        assert not envs.step([3, 4])[3].any()
        wait_until(lambda: lines_with(caplog, "replayed"))
        assert lines_with(caplog, "replayed") == ["the episode of env 1 was replayed in the new process, and continues"]


def test_statistics_say_when_the_next_process_starts():
    policy = ea.RestartPolicy(max_restarts=9, backoff=60.0, backoff_max=60.0)
    with ea.VectorEnv([EchoEnv], on_failure="renew", restart=policy) as envs:
        envs.reset(seed=0)
        assert envs.stats().actors[0].restart_in is None
        os.kill(envs[0].pid, signal.SIGKILL)
        wait_until(lambda: envs.stats().actors[0].restart_in is not None)
        assert 50 < envs.stats().actors[0].restart_in <= 60
