"""How many file descriptors an actor takes, and their limit: raised if needed, and given back in workers."""

from __future__ import annotations

import re

from helpers import run_script

from envactors.system.choice import PORTABLE

ENV = """
import logging, os, resource, sys, time
import envactors as ea
from envactors.system.descriptors import count_descriptors

class Env:
    def limits(self):
        return resource.getrlimit(resource.RLIMIT_NOFILE)

def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s %(message)s")
"""


def test_the_soft_limit_is_raised_when_it_is_needed_and_only_in_the_caller():
    done = run_script(
        ENV
        + """
limit(250, 4096)
with ea.spawn(Env) as first:
    assert first.limits().result(30) == (250, 4096)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 250  # not needed so far
    with ea.ActorPool(Env, 40) as pool:
        limits = [actor.limits().result(30) for actor in pool.actors]
        assert limits == [(250, 4096)] * 40, limits
        assert count_descriptors() + 100 > 250
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1274
"""
    )
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if not line.startswith("envactors.actors ")]
    assert line.startswith("envactors raised the limit of open file descriptors from 250 to 1274, since ")


def test_two_hundred_actors_fit_where_the_usual_limit_is_soft():
    done = run_script(
        ENV
        + """
limit(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
with ea.ActorPool(Env, 200) as pool:
    assert {actor.limits().result(60)[0] for actor in pool.actors} == {1024}
""",
        timeout=60.0,
    )
    assert done.stderr == ""


def test_where_the_hard_limit_is_too_low_the_start_is_rejected_at_once(run_warm):
    done = run_warm(
        ENV
        + """
limit(250, 250)
with ea.ActorPool(Env, 3) as pool:
    pids = [actor.limits().result(30) and actor.pid for actor in pool.actors]
    files = [os.dup(0) for _ in range(250 - count_descriptors() - 90)]
    begun = time.monotonic()
    with ea.spawn(Env, restart=ea.RestartPolicy(max_restarts=100)) as actor:
        try:
            actor.limits().result(30)
        except ea.ActorStartError as error:
            print(error)
        assert time.monotonic() - begun < 22
        assert (actor.state, actor.stats().restarts) == (ea.ActorState.DEAD, 0)
    assert [actor.limits().result(30) and actor.pid for actor in pool.actors] == pids
"""
    )
    assert done.stderr == ""
    assert re.search(r"\b1[5-9]\d file descriptors are open", done.stdout), "fewer than the hard limit"
    assert "a worker is started only if 100 more fit below the hard limit of 250 (ulimit -Hn)" in done.stdout


def test_an_actor_takes_few_descriptors(run_warm):
    done = run_warm(
        """
        import envactors as ea
        from envactors.system.descriptors import count_descriptors

        class Env:
            def ping(self):
                return 1

        with ea.ActorPool(Env, 10) as first:
            [actor.ping().result(30) for actor in first.actors]
            before = count_descriptors()
            with ea.ActorPool(Env, 10) as second:
                [actor.ping().result(30) for actor in second.actors]
                print((count_descriptors() - before) / 10)
        """
    )
    assert (done.stdout, done.stderr) == ("10.0\n" if PORTABLE else "7.0\n", "")
