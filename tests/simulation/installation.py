"""Has the library run in a simulated world: its threads, its workers' sleep, and its processes' descriptors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from envactors.actor import engine as engines
from envactors.actor.supervisor import Supervisor
from envactors.worker import main as worker
from simulation.envs import Misbehaving
from simulation.loop import Engine
from simulation.processes import End, Poller
from simulation.world import Violation, World

# How much longer than its deadline a close may take, in seconds.
_CLOSE_GRACE = 1.0


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Have the library use this world instead of threads and processes."""
    real = engines._engine, worker.Poller, Supervisor.wait_closed
    engines._engine = Engine(world)  # type: ignore[assignment]
    worker.Poller = Poller  # type: ignore[assignment,misc]
    Poller.world = Misbehaving.world = world
    Supervisor.wait_closed = _make_wait_closed(world)  # type: ignore[method-assign]
    End.by_fd.clear()
    try:
        with world.installed():
            yield
    finally:
        engines._engine, worker.Poller, Supervisor.wait_closed = real  # type: ignore[method-assign]


def _make_wait_closed(world: World) -> Callable[[Supervisor, float | None], None]:
    def wait_closed(supervisor: Supervisor, timeout: float | None) -> None:
        patience = supervisor.config.deadlines.close if timeout is None else timeout
        assert patience is not None, "closing always has a deadline here"
        deadline = world.now + patience + _CLOSE_GRACE
        while not supervisor.closed.is_set():
            if not world.step(deadline):
                raise Violation(f"{supervisor.config.name} never closes")
            if world.now > deadline:
                raise Violation(f"{supervisor.config.name} is not closed in time")

    return wait_closed
