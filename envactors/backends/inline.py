"""The in-process backend: envs run in the threads that call them."""

from __future__ import annotations

from typing import Any

from envactors.backends.base import Backend, Traits


class InlineBackend(Backend):
    """A backend whose envs run in the thread that calls them, without workers.

    Nothing can end an env that hangs there: deadlines are not enforced, and a running call cannot be aborted.
    """

    traits: Traits = Traits(can_kill=False, is_inline=True)

    def __repr__(self) -> str:
        return "InlineBackend()"

    def make_memory(self) -> Any:
        raise NotImplementedError("envs of this backend share no memory with workers")

    def use(self, env_vars: Any, runtime: Any) -> Any:
        raise NotImplementedError("this backend has no workers")
