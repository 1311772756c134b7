"""Signals at any moment: handlers may raise, and may use the objects that they interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
from helpers import SOON, wait_always, wait_for_path, wait_until

import envactors as ea
from envactors.testing import EchoEnv

SLEEP, BOTH_SPIN = "sleep", "spin"


def test_an_interrupt_in_the_middle_of_a_short_step_loses_no_result():
    caller = os.getpid()

    class Interrupts(EchoEnv):
        def step(self, action):
            if action == 7:
                time.sleep(0.02)  # the caller waits by then; in the middle of posting, the envs would need a reset
                os.kill(caller, signal.SIGINT)
            return super().step(action)

    with ea.VectorEnv([Interrupts] * 2) as envs:
        envs.reset(seed=0)
        for turn in range(20):
            wait_always(envs, BOTH_SPIN)
            with pytest.raises(KeyboardInterrupt):
                envs.step([7, 0])
            assert envs.recv().obs[:, 1].tolist() == [turn + 1] * 2


@pytest.mark.parametrize("way", ["actor", "pool", "vector", "finally"])
def test_after_ctrl_c_a_hung_env_is_closed_before_its_close_deadline(way):
    class Hangs(EchoEnv):
        def step(self, action):
            os.kill(caller, signal.SIGINT)
            time.sleep(1000)

    caller, options = os.getpid(), {"deadlines": ea.Deadlines(close=1000)}
    with pytest.raises(KeyboardInterrupt):
        if way == "actor":
            with ea.spawn(Hangs, **options) as actor:
                actor.step(0).result()
        elif way == "pool":
            with ea.ActorPool(Hangs, 1, **options) as pool:
                pool.submit("step", 0).result()
        elif way == "vector":
            with ea.VectorEnv([Hangs], **options) as envs:
                envs.reset()
                envs.step([0])
        else:
            actor = ea.spawn(Hangs, **options)
            try:
                actor.step(0).result()
            finally:
                actor.close()


@pytest.mark.parametrize("closes", [False, True])
def test_a_signal_handler_may_use_the_vector_in_the_middle_of_a_step(closes, tmp_path):
    """After a call the results used to be delivered twice; after an end the step waited forever."""

    class Waits(EchoEnv):
        def step(self, action):
            if action == 7:
                handled = tmp_path / str(self.steps)
                time.sleep(0.02)  # the caller waits by then; in the middle of posting, the handler would be refused
                if closes:
                    wait_for_path(tmp_path / "the other env is done")
                os.kill(caller, signal.SIGALRM)
                wait_for_path(handled)  # where the handler closes the vector: until this process is killed
            return super().step(action)

    def handle(_signum, _frame):
        if closes:
            envs.close(0)
        else:
            (tmp_path / str(len(seen) // 2 + 1)).touch()
            seen.extend(envs.get_attr("steps"))

    caller, seen = os.getpid(), []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ea.VectorEnv([Waits] * 2) as envs:
            envs.reset(seed=0)
            envs.step([1, 1])
            wait_always(envs, SLEEP)
            if closes:
                rows = envs._engine.table.slab
                first = int(rows.posted_ids[0])

                def watch():
                    wait_until(lambda: rows.written_ids[0] == first + 1)
                    (tmp_path / "the other env is done").touch()

                watcher = threading.Thread(target=watch)
                watcher.start()
                with pytest.raises(ea.VectorStepError) as caught:
                    envs.step([1, 7])
                watcher.join()
                assert caught.value.failures.keys() == {1}
                return
            for turn in range(2, 5):
                assert envs.step([turn, 7])[0][:, 1].tolist() == [turn] * 2
            assert len(seen) == 6
            with pytest.raises(ea.NothingPendingError):
                envs.recv()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("strategy", [SLEEP, BOTH_SPIN], ids=["asleep", "spinning"])
@pytest.mark.parametrize("ask", ["step", "recv"])
def test_a_signal_handler_may_take_the_results_that_are_waited_for(ask, strategy, tmp_path):
    class Signals(EchoEnv):
        def step(self, action):
            if action == 7:
                time.sleep(0.1)  # the caller waits by then; in the middle of posting, the handler would be refused
                os.kill(caller, signal.SIGALRM)
                wait_for_path(tmp_path / "handled")
            return super().step(action)

    def handle(_signum, _frame):
        (tmp_path / "handled").touch()
        with contextlib.suppress(ea.NothingPendingError):  # the second env's signal
            seen.append(envs.recv().obs[:, 2].tolist())

    caller, seen = os.getpid(), []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ea.VectorEnv([Signals] * 2) as envs:
            envs.reset(seed=0)
            wait_always(envs, strategy)
            with pytest.raises(ea.NothingPendingError):
                if ask == "step":
                    envs.step([7, 7])
                else:
                    envs.send([7, 7])
                    envs.recv()
            assert envs.step([1, 2])[0][:, 2].tolist() == [1, 2]
            assert seen == [[7, 7]]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_a_handler_raises_while_arguments_are_pickled_reaches_the_caller():
    class Late(BaseException):
        pass

    def handle(_signum, _frame):
        raise Late

    class Slow:
        """Is pickled for so long that a time limit passes."""

        def __reduce__(self):
            signal.raise_signal(signal.SIGALRM)
            return int, ()

    class Env:
        def echo(self, value):
            return value

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ea.spawn(Env) as actor:
            with pytest.raises(Late):
                actor.echo(Slow())
            assert actor.echo(5).result(SOON) == 5
    finally:
        signal.signal(signal.SIGALRM, before)
