"""Exceptions between the arrival of an outcome and the end of its future, at every line."""

import itertools

from interrupting import interrupt

import envactors as ea
from envactors.testing import EchoEnv

# From the arrival of an outcome to the moment at which the future has it.
STEPS = {"settle", "_read_here", "read_for_future", "make_idle", "note_usual"}


def test_a_future_ends_and_its_env_is_free_after_an_exception_at_any_line_of_reading():
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], backend="inline") as envs:
        for number in itertools.count():
            envs.reset(seed=0)
            futures = []

            def step(futures=futures, number=number):
                futures[:] = envs.submit([number, number])
                for future in futures:
                    future.result()

            where = interrupt(step, number, only=STEPS)
            envs.reset(seed=1)  # refused while an env has a result pending
            assert all(future.result(timeout=10).obs[2] == number for future in futures), where
            if where is None:
                break
    assert number > 10
