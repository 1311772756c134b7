"""Sessions whose user is interrupted anywhere in the library, or blocks in a call, lose no actor and delay nobody."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading

import pytest
from helpers import SOON, wait_until
from interrupting import interrupt

import envactors as ea


class Desk:
    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)
        return list(self.items)


def use(pool):
    with pool.session() as env:
        env.put(1).result(SOON)


def use_in_run(pool):
    assert all(isinstance(outcome, ea.Completed) for outcome in pool.run(lambda env, task: env.put(task), [1, 2]))


def interrupt_everywhere(work, first, stride):
    """Interrupts the use of sessions at lines ``first``, ``first + stride``, ...; returns at how many."""
    with ea.SessionPool(Desk, 1, standbys=1, idle_timeout=SOON, deadlines=SOON) as pool:
        work(pool)
        for turn in itertools.count():
            number = first + turn * stride
            where = interrupt(lambda: work(pool), number)
            try:
                with pool.session(timeout=SOON) as env:
                    assert env.put("alone").result(SOON) == ["alone"]
                wait_until(lambda: pool.stats().idle == 2)
                assert (pool.stats().leased, pool.stats().waiting) == (0, 0)
            except BaseException as error:
                raise AssertionError(f"interrupted at {where} (line {number}): {error!r}") from error
            if where is None:
                break
    return turn


@pytest.mark.parametrize("work", [use, use_in_run])
def test_no_actor_is_lost_after_an_exception_at_some_lines(work, helper_processes):
    assert interrupt_everywhere(work, 3, 61) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("work", "lines"), [(use, 200), (use_in_run, 20)])
def test_no_actor_is_lost_after_an_exception_at_any_line(work, lines, helper_processes):
    assert interrupt_everywhere(work, 0, 1) > lines


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_thread_that_waits_for_a_session_continues_after_an_interrupted(how, helper_processes):
    for number in itertools.count():
        with ea.SessionPool(Desk, 1) as pool:
            pool.session().__enter__()
            lease, errors = pool.session(), []
            thread = threading.Thread(target=enter, args=(lease, errors))
            thread.start()
            wait_until(functools.partial(is_asleep, lease))
            if how == "cancel":
                where = interrupt(functools.partial(lease.cancel, RuntimeError()), number, only={"give_up"})
            else:
                where = interrupt(pool.close, number, only={"close", "_shut", "_finish"})
        thread.join(SOON)
        assert not thread.is_alive(), f"interrupted at {where}"
        assert len(errors) == 1
        if where is None:
            break


def is_asleep(lease):
    return lease._request is not None and lease._request._ended._gates


def enter(lease, errors):
    try:
        lease.__enter__()
    except BaseException as error:
        errors.append(error)


class BlocksPickling:
    """Blocks while it is pickled, until it may continue."""

    def __init__(self):
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def __reduce__(self):
        self.entered.set()
        self.may_go_on.wait(SOON)
        return int, ()


def test_arguments_that_block_pickling_delay_no_other_session(helper_processes):
    argument = BlocksPickling()
    with ea.SessionPool(Desk, 2, idle_timeout=0.3) as pool:
        with pool.session("blocked") as blocked:
            thread = threading.Thread(target=lambda: blocked.put(argument))
            thread.start()
            assert argument.entered.wait(SOON)
            abandoned = pool.session("abandoned").__enter__()
            wait_until(lambda: abandoned.outcome is not None)
            assert abandoned.outcome.kind == "idle"
        with pool.session(timeout=SOON) as env, pool.session(timeout=SOON) as other:
            assert env.put(1).result(SOON) == other.put(1).result(SOON) == [1]
            argument.may_go_on.set()
            thread.join(SOON)
            assert env.put(2).result(SOON) == other.put(2).result(SOON) == [1, 2]


@pytest.mark.parametrize("fresh", ["process", "reset"])
def test_a_call_that_is_still_being_pickled_at_the_end_never_reaches_the_next_session(fresh, helper_processes):
    class Clearing(Desk):
        def reset(self):
            self.items.clear()

    argument, raised = BlocksPickling(), []

    def call(env):
        raised.append(env.put(argument).exception(SOON))

    with ea.SessionPool(Clearing, 1, fresh=fresh) as pool:
        with pool.session() as past:
            thread = threading.Thread(target=call, args=(past,))
            thread.start()
            assert argument.entered.wait(SOON)
        with pool.session(timeout=SOON) as env:
            argument.may_go_on.set()
            thread.join(SOON)
            assert isinstance(raised[0], ea.ActorError)
            assert env.put("alone").result(SOON) == ["alone"]


def test_ctrl_c_in_a_coroutine_of_arun_is_raised(helper_processes):
    async def episode(env, task):
        raise KeyboardInterrupt

    async def main(pool):
        async for _ in pool.arun(episode, [1]):
            raise AssertionError("it has no outcome")

    with ea.SessionPool(Desk, 1) as pool:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main(pool))
        wait_until(lambda: pool.stats().idle == 1)
