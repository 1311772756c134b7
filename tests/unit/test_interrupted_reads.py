"""Exceptions between the arrival of an outcome and the moment at which its reader has it, at every line."""

import itertools

import pytest
from interrupting import interrupt

import envactors as ea
from envactors.testing import EchoEnv


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_a_future_ends_and_its_env_is_free_after_an_exception_at_any_line_of_reading(backend):
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], backend=backend) as envs:
        envs.reset(seed=0)
        for number in itertools.count():
            futures = envs.submit([number, number])  # refused while an env has a result pending

            def read(futures=futures):
                for future in futures:
                    future.result()

            where = interrupt(read, number)
            assert [future.result(timeout=10).obs[2] for future in futures] == [number, number], where
            if where is None:
                break
    assert number > 10
