"""The messages between an actor and its worker: each request is a frame, and so is its reply.

A frame has a fixed header (length, kind, incarnation, call id) and a pickled payload: the fields of one of the named
tuples below. The header is readable without the payload, so a payload that cannot be unpickled fails its own call and
no other. Steps and resets go through rows of shared memory instead (`envactors.mailbox.slab`). Only what does not fit
there is sent, as `Kind.PAYLOADS` and `Kind.OVERFLOW`: env by env, so that what cannot be unpickled fails its own env.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

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
    # What does not fit into the rows that are posted after it with the same call id, by the envs' positions in the
    # actor: packed by `envactors.mailbox.packing`, or within one process a list of pairs.
    PAYLOADS = 12
    SAVE = 13
    RESTORE = 14
    EXTEND = 15

    RESULT = 16
    FAILED = 17
    # Sent while rows run: results that do not fit into them, by the envs' indices in the vector, packed by
    # `envactors.mailbox.packing`. `envactors.mailbox.info_codec` reads them.
    OVERFLOW = 19
    # Sent during START while there is more to make or to unpickle: the count of envs that are made.
    ENV_MADE = 20
    # Sent at any time by any thread: what env code logs, as the attributes of a log record.
    LOGGED = 21
    # Sent while an EXTEND runs: pieces of its reply, packed by `envactors.mailbox.packing`.
    PIECE = 22


class Frame(NamedTuple):
    """One message. Its payload is pickled; within one process that of `Kind.PAYLOADS` is a list of objects."""

    kind: int
    incarnation: int
    call_id: int
    payload: Any


class Attach(NamedTuple):
    """Use the rows of a slab; with ``resets_within_step`` a step that ends the episode also resets the env."""

    layout: Layout
    resets_within_step: bool


class Start(NamedTuple):
    """Make the envs.

    ``first`` is the index of the first env; ``registrations`` are for Gymnasium. With ``journal`` each env has a
    checksum over all observations since its last seeded reset. ``levels`` are the levels of the caller's loggers. With
    ``seed_episodes`` the infos of resets contain their seeds. ``snapshot`` is a pickled pair of functions that return
    and set the state of an env. ``authkey`` is the caller's key for managers of `multiprocessing`; None for workers on
    other machines.
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
    """Work for another actor from now on, with the first ``envs`` envs; for the other fields see `Start`."""

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
    """Write an attribute of an env; the value is `Pickled`, since the parent reads the names."""

    env: int
    name: str
    value: Any


class Describe(NamedTuple):
    """Return the `Description` of an env."""

    env: int


class Reset(NamedTuple):
    """Reset an env."""

    env: int
    seed: int | None
    options: dict[str, Any] | None


class Step(NamedTuple):
    """Step an env; with ``resets_within_step`` a step that ends the episode also resets it, with ``next_seed``."""

    env: int
    action: Any
    resets_within_step: bool
    next_seed: int | None


class Pickled(NamedTuple):
    """A value inside a message that stays pickled until it is used."""

    content: bytes


class RecordedSteps(NamedTuple):
    """Consecutive steps of one env whose actions have come in rows.

    ``columns`` are the bytes of their actions, for each leaf of the action's spec; ``resets`` says which are resets.
    """

    columns: list[bytearray]
    resets: bytearray


class Replay(NamedTuple):
    """Replay an env's journal: set the attributes, repeat the entries, and return whether the checksum agrees.

    ``entries`` are `RecordedSteps`, whose actions have the spec ``action``, or (kind, payload) of a message. The
    expected ``checksum`` is compared only if there are entries.
    """

    env: int
    attributes: list[bytes]
    action: Spec | None
    resets_within_step: bool
    entries: list[RecordedSteps | tuple[int, bytes]]
    checksum: int


class Save(NamedTuple):
    """Return the checksum over an env's observations and, as bytes, the state of the env."""

    env: int


class Restore(NamedTuple):
    """Restore the state of an env, and its checksum, that a `Save` has returned."""

    env: int
    checksum: int
    state: bytes


class Close(NamedTuple):
    """Close the envs and end."""


class Extend(NamedTuple):
    """Call a function with the worker's server and these arguments; the function is pickled by its name.

    Rooms above this one, such as `envactors.rollout`, define their requests with it.
    """

    function: Any
    arguments: tuple[Any, ...]


class Fault(enum.IntEnum):
    """Where a call failed."""

    RAISED = 0
    ARGUMENTS = 1
    RESULT = 2
    TOO_LARGE = 3  # on the way to a node or back
    RESET = 4  # a reset raised, or the step that ended the episode, perhaps in its reset
    LAST_RESULT = 5  # like RESULT, of the step that ended the episode


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


def episode_seed(root_seed: int, episode: int) -> int:
    """Return the seed of an env's episode; the reset with ``root_seed`` has begun episode 0."""
    return int(np.random.SeedSequence(root_seed, spawn_key=(0, episode)).generate_state(1)[0])
