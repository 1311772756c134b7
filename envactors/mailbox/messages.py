"""The messages between an actor and its worker.

Each request is a frame, and so is its reply. Steps and resets go through rows of shared memory instead
(`envactors.mailbox.slab`), and only what does not fit there is sent, as `Kind.PAYLOADS` and `Kind.OVERFLOW`.

A frame is a fixed header (length, kind, incarnation, call id) and a pickled payload: the fields of one of the named
tuples below. The header is readable without the payload, so that a payload that cannot be unpickled fails its own call
and no other. For the same reason payloads and overflows are packed env by env; if caller and worker are in one
process, they are passed as objects.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.mailbox.slab import Layout
from envactors.mailbox.specs import Spec


class Kind(enum.IntEnum):
    """The kind of a frame; requests first, then replies."""

    START = 1
    CALL = 2
    GET = 3
    SET = 4
    DESCRIBE = 5
    # The kinds of `Reset` and `Step` where a `Replay` repeats them; requests come in rows.
    RESET = 6
    STEP = 7
    CLOSE = 8
    ATTACH = 9
    ADOPT = 10
    REPLAY = 11
    # What goes with rows that are posted after it, with the same call id; packed by `pickling.pack_payloads`.
    PAYLOADS = 12
    SAVE = 13
    RESTORE = 14
    EXTEND = 15

    RESULT = 16
    FAILED = 17
    # Sent while rows run: what does not fit into its rows. A `envactors.mailbox.bundle` of parts by the
    # envs' indices in the vector, read by `envactors.mailbox.info_codec`.
    OVERFLOW = 19
    # Sent during START while there are more envs to make: how many are made, and so whose factory runs.
    ENV_MADE = 20
    # Sent while an EXTEND runs: parts of its result, a `envactors.mailbox.bundle`.
    PART = 22
    # At any time, of any thread: what env code logs, as the attributes of a log record.
    LOGGED = 21


class Frame(NamedTuple):
    """One message. The payload is pickled, except that `Kind.PAYLOADS` has objects within one process."""

    kind: int
    incarnation: int
    call_id: int
    payload: Any


class Attach(NamedTuple):
    """Use the shared slab; with ``autoreset`` an episode that ends is reset within the step."""

    layout: Layout
    autoreset: bool


class Start(NamedTuple):
    """Make the envs.

    ``first`` is the index of the first env; ``registrations`` are for Gymnasium. With ``journal`` each env has a
    checksum over all observations since its last seeded reset. ``levels`` are those of the caller's loggers. With
    ``seed_episodes`` the infos of resets contain their seeds. ``snapshot`` is a pickled pair of functions that return
    and set the state of an env. ``authkey`` is the caller's for `multiprocessing`, whose managers ask for it; None for
    workers on other machines.
    """

    name: str
    first: int
    factories: list[bytes]
    registrations: tuple[list[bytes], list[bytes]]
    attach: Attach | None = None
    journal: bool = False
    levels: dict[str, int] = {}  # noqa: RUF012 # never changed
    seed_episodes: bool = False
    snapshot: bytes | None = None
    authkey: bytes | None = None


class Adopt(NamedTuple):
    """Belong to another actor from now on, with the first ``envs`` of the envs; for the other fields see `Start`."""

    name: str
    first: int
    envs: int
    attach: Attach | None


class Call(NamedTuple):
    """Call a method of an env; with ``or_get``, return the attribute of that name if it cannot be called."""

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
    """Return what an env's observations, actions and rewards look like."""

    env: int


class Reset(NamedTuple):
    """Reset an env; the last field is not used any more, and stands in journals on disk."""

    env: int
    seed: int | None
    options: dict[str, Any] | None
    root_seed: None = None


class Step(NamedTuple):
    """Step an env; with ``autoreset`` an episode that ends is reset within the step, with ``next_seed``."""

    env: int
    action: Any
    autoreset: bool
    next_seed: int | None


class Pickled(NamedTuple):
    """A value inside of a message that stays pickled until it is used."""

    content: bytes


# The operation of a `RecordedSteps` that is a reset; steps are 0.
RECORDED_RESET: Final = 1


class RecordedSteps(NamedTuple):
    """Consecutive steps of one env in shared memory: one array per leaf of the action, and the operations."""

    actions: list[npt.NDArray[Any]]
    ops: bytes


class Replay(NamedTuple):
    """Replay an env's journal: set the attributes, repeat the entries, and return whether the checksum agrees.

    ``entries`` are `RecordedSteps`, whose actions have the spec ``action``, or (kind, payload) of a message. ``check``
    is the expected checksum; without entries nothing is compared.
    """

    env: int
    attributes: list[bytes]
    action: Spec | None
    autoreset: bool
    entries: list[RecordedSteps | tuple[int, bytes]]
    check: int


class Save(NamedTuple):
    """Return the checksum over an env's observations and, as bytes, the state of the env."""

    env: int


class Restore(NamedTuple):
    """Put an env into a state that a `Save` has returned, the checksum included."""

    env: int
    check: int
    state: bytes


class Close(NamedTuple):
    """Close the envs and end."""


class Extend(NamedTuple):
    """Call a function, which is pickled by its name, with the worker's server and these arguments.

    With it, packages above this one, such as `envactors.rollout`, define more requests.
    """

    function: Any
    arguments: tuple[Any, ...]


class Fault(enum.IntEnum):
    """Where a call failed."""

    RAISED = 0
    ARGUMENTS = 1
    RESULT = 2
    TOO_LARGE = 3  # on the way to a node or back


class Failure(NamedTuple):
    """A failed call: the pickled exception (None if it does not pickle), its repr and its traceback as text."""

    fault: Fault
    pickled: bytes | None
    text: str
    traceback: str


class Description(NamedTuple):
    """The specs of an env's values, and its attributes; a spec that is None follows from the first value."""

    observation: Any
    action: Any
    reward: Any
    metadata: dict[str, Any]
    render_mode: str | None


REQUESTS: dict[int, Any] = {
    Kind[message.__name__.upper()]: message
    for message in (Start, Call, Get, Set, Describe, Reset, Step, Close, Attach, Adopt, Replay, Save, Restore, Extend)
}


def renewed_seed(root_seed: int, incarnation: int) -> int:
    """Return the seed of a renewed env's first reset: different for each incarnation, the same in every run."""
    return int(np.random.SeedSequence(root_seed, spawn_key=(incarnation,)).generate_state(1)[0])


def episode_seed(root_seed: int, number: int) -> int:
    """Return the seed of an env's episode, from its number since the reset with ``root_seed``, which is episode 0."""
    return int(np.random.SeedSequence(root_seed, spawn_key=(0, number)).generate_state(1)[0])
