"""The pool of sessions behind a drop-in whose objects come and go while its actors stay."""

from __future__ import annotations

import os

from helpers import run_script

from envactors.system.choice import VARIABLE


def test_actors_start_where_there_is_no_fork_server():
    code = """
        from envactors.integrations.shared_pool import SharedPool

        shared = SharedPool(list, 1, "json", {})
        with shared.lease("one") as session:
            session.append(3).result()
            print(session.pop().result())
        shared.close()
    """
    done = run_script(code, env={**os.environ, VARIABLE: "portable"})
    assert (done.stdout, done.stderr) == ("3\n", "")
