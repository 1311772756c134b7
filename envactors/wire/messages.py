"""Every message that travels between an actor and its worker.

What is asked of a vector's envs in every step, and what comes of it, stands in shared memory instead where that is
possible (`envactors.arrays.slab`); only what does not fit there is sent, as `Mail`.

A frame is a fixed header (length, kind, incarnation, call id) and a pickled payload: the fields of one of the
named tuples below. The header is readable without the payload, so that a payload that cannot be unpickled
fails its own call and no other.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy.typing as npt

from envactors.arrays.slab import Layout
from envactors.arrays.specs import Spec


class Kind(enum.IntEnum):
    """What a frame says; requests first, then replies."""

    START = 1
    CALL = 2
    GET = 3
    SET = 4
    DESCRIBE = 5
    RESET = 6
    STEP = 7
    CLOSE = 8
    ATTACH = 9
    ADOPT = 10
    REPLAY = 11

    RESULT = 16
    FAILED = 17
    RESETTING = 18
    PROGRESS = 19
    # How many envs are made, while there are more to make: whose factory it is that runs.
    MADE = 20


class Frame(NamedTuple):
    """One message as it travels; ``check`` is the env's checksum after a reset or a step, where one is kept."""

    kind: int
    incarnation: int
    call_id: int
    payload: bytes | bytearray | memoryview
    check: int = 0


class Attach(NamedTuple):
    """Use the shared slab; with ``autoreset`` an episode that ends is reset within the step."""

    layout: Layout
    autoreset: bool


class Start(NamedTuple):
    """Make the envs.

    ``first`` is the index of the first of them; ``registrations`` are for Gymnasium; with ``journal`` a checksum over
    all observations since its last seeded reset is kept of each env.
    """

    name: str
    first: int
    factories: list[bytes]
    registrations: tuple[list[bytes], list[bytes]]
    attach: Attach | None = None
    journal: bool = False


class Adopt(NamedTuple):
    """Be another actor from now on, with the first ``envs`` of the envs; otherwise as in `Start`."""

    name: str
    first: int
    envs: int
    attach: Attach | None


class Call(NamedTuple):
    """Call a method of an env; with ``or_get``, what cannot be called is read instead."""

    env: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    or_get: bool = False


class Get(NamedTuple):
    """Read an attribute of an env."""

    env: int
    name: str


class Set(NamedTuple):
    """Write an attribute of an env."""

    env: int
    name: str
    value: Any


class Describe(NamedTuple):
    """Say what an env's observations, actions and rewards look like."""

    env: int


class Reset(NamedTuple):
    """Reset an env; without ``seed``, a new incarnation's first reset takes one that follows from ``root_seed``."""

    env: int
    seed: int | None
    options: dict[str, Any] | None
    root_seed: int | None


class Step(NamedTuple):
    """Step an env; with ``autoreset`` an episode that ends is reset within the step."""

    env: int
    action: Any
    autoreset: bool
    root_seed: int | None


class Turns(NamedTuple):
    """Steps of one env in shared memory, one after the other: a column for each leaf of the action; what was asked."""

    actions: list[npt.NDArray[Any]]
    what: bytes


class Replay(NamedTuple):
    """Bring an env to where it was: set attributes, ask the same again, and say whether it has shown the same.

    ``entries`` are `Turns`, whose actions have the spec ``action``, or the kind and the payload of a message; ``check``
    is the checksum that must come out, and where there is no entry nothing is compared.
    """

    env: int
    attributes: list[bytes]
    action: Spec | None
    autoreset: bool
    entries: list[Turns | tuple[int, bytes]]
    check: int


class Close(NamedTuple):
    """Close the envs and end."""


class Fault(enum.IntEnum):
    """Where a call failed."""

    RAISED = 0
    ARGUMENTS = 1
    RESULT = 2


class Failure(NamedTuple):
    """A call that failed: the pickled exception (None where it does not pickle) and what can always be said."""

    fault: Fault
    pickled: bytes | None
    text: str
    traceback: str


class Description(NamedTuple):
    """What an env's values look like; a spec that is None is learnt from the first value."""

    observation: Any
    action: Any
    reward: Any
    metadata: dict[str, Any]
    render_mode: str | None


class Mail(NamedTuple):
    """What a step in shared memory had besides: its info, and the parts of its observation that are not arrays.

    A turn's come together, as a `envactors.wire.bundle` by the envs' indices; so do the failures of its envs.
    """

    info: dict[str, Any]
    loose: list[Any]


class Transition(NamedTuple):
    """The result of `Reset` (with reward 0 and no flags) and `Step`."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]


REQUESTS: dict[int, Any] = {
    Kind.START: Start,
    Kind.CALL: Call,
    Kind.GET: Get,
    Kind.SET: Set,
    Kind.DESCRIBE: Describe,
    Kind.RESET: Reset,
    Kind.STEP: Step,
    Kind.CLOSE: Close,
    Kind.ATTACH: Attach,
    Kind.ADOPT: Adopt,
    Kind.REPLAY: Replay,
}
