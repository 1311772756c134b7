"""Capture and restore the state of a Gymnasium env with all its wrappers, as bytes.

The state is a single pickle of the attributes of the whole chain, from the outermost wrapper to the unwrapped env, so
that an object that several of them share stays one object. Some objects are not copied: the restored env keeps its own.
`envactors.state.kinds` decides which objects these are, and `envactors.state.pickling` finds them.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from envactors.options import SnapshotPolicy
from envactors.state.kinds import is_output
from envactors.state.pickling import StatePickler, StateUnpickler
from envactors.state.places import Places

# Attributes in which Gymnasium stores how an env was created. They are equal for all envs from the same factory, so
# they are not part of the state.
_ARGUMENTS = frozenset(["spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"])


class Own:
    """Marks, in a state, an attribute whose value the env keeps."""


def gymnasium_snapshot(every: int = 1000) -> SnapshotPolicy:
    """Return the snapshot policy for Gymnasium envs: classic control, MuJoCo, ALE, and others written in Python.

    A snapshot contains the attributes of the env and of every wrapper, their random generators and those of the spaces,
    the variables that their functions close over, and the state of ALE and MuJoCo. An env from the same factory
    continues from it bit for bit, even in another process.

    The restored env keeps its own windows, renderers, drawing surfaces, locks, and files that are open for writing:
    they cannot be copied, and no step depends on them. Bounds of spaces are assumed to be constant, and so are the
    textures, meshes, and skins of MuJoCo models. State outside the env, such as globals and attributes of classes, is
    not captured.

    ``get`` raises a TypeError that names the attribute if the env holds anything else that cannot be pickled: sockets,
    processes, generators, other envs, or objects of other engines. Such an env needs a custom `SnapshotPolicy`.

    Args:
        every: The number of steps of an env between two automatic snapshots.

    Raises:
        ValueError: ``every`` is not a positive int.
    """
    return SnapshotPolicy(capture, restore, every)


def capture(env: Any) -> bytes:
    """Return the state of an env and its wrappers.

    Raises:
        TypeError: The env holds an object that cannot be captured.
    """
    chain = chain_of(env)
    states = [_attributes(one) for one in chain]
    places = Places(chain)
    try:
        data = _pickled(states, chain, places)
    except Exception as error:
        raise _explained(error, states, chain, places) from error
    return pickle.dumps(_names(chain)) + data


def restore(env: Any, state: bytes) -> None:
    """Restore the state that `capture` returned for an env from the same factory.

    Raises:
        ValueError: The env differs from the captured one.
    """
    chain = chain_of(env)
    file = io.BytesIO(state)
    names = pickle.load(file)
    if names != _names(chain):
        raise ValueError(
            f"the snapshot was taken from the env {'<'.join(names)}: expected one from {'<'.join(_names(chain))}. "
            "Restore it into an env from the same factory"
        )
    unpickler = StateUnpickler(file, chain)
    states = unpickler.load()
    unpickler.apply_states()
    for one, values in zip(chain, states, strict=True):
        _set_attributes(one, values)


def chain_of(env: Any) -> list[Any]:
    """Return an env and the envs that it wraps, outermost first.

    Raises:
        TypeError: One of them has ``__slots__``, whose values are not among its attributes.
    """
    chain = [env]
    while (inner := _inner(chain[-1])) is not None and all(inner is not one for one in chain):
        chain.append(inner)
    for one in chain:
        if not hasattr(one, "__dict__") or copyreg._slotnames(type(one)):  # type: ignore[attr-defined] # noqa: SLF001 # as pickle
            raise TypeError(
                f"cannot capture {type(one).__name__}: it has __slots__. Use a SnapshotPolicy with your own get and set"
            )
    return chain


def _inner(env: Any) -> Any:
    """Return the env inside a wrapper of Gymnasium or an adapter of a drop-in; None if there is none."""
    attributes = getattr(env, "__dict__", {})
    return next((attributes[name] for name in ("env", "_env") if hasattr(attributes.get(name), "step")), None)


def _attributes(env: Any) -> dict[str, Any]:
    """Return the attributes of an env, with `Own` in place of the outputs, which each env keeps."""
    attributes = {name: value for name, value in vars(env).items() if name not in _ARGUMENTS}
    return {name: Own if is_output(value) else value for name, value in attributes.items()}


def _set_attributes(env: Any, values: dict[str, Any]) -> None:
    live = vars(env)
    # The env also keeps windows and renderers that it opened after the snapshot. Otherwise nobody would close them.
    own = {name for name, value in live.items() if name in _ARGUMENTS or is_output(value)}
    for name in live.keys() - own - values.keys():
        del live[name]
    for name, value in values.items():
        if value is not Own and not (value is None and name in own):
            live[name] = value


def _names(chain: list[Any]) -> list[str]:
    return [type(one).__qualname__ for one in chain]


def _pickled(states: Any, chain: list[Any], places: Places) -> bytes:
    shared: set[int] = set()
    while True:
        file = io.BytesIO()
        pickler = StatePickler(file, chain, places, shared)
        pickler.dump(states)
        if not pickler.found_shared():
            return file.getvalue()
        # The pickler found arrays that are views of one another. Pickle again, this time as views.
        shared |= pickler.found_shared()


def _explained(error: Exception, states: list[dict[str, Any]], chain: list[Any], places: Places) -> TypeError:
    """Return an error that names the attribute that cannot be captured."""
    advice = "Use a SnapshotPolicy with your own get and set"
    for one, values in zip(chain, states, strict=True):
        for name, value in values.items():
            try:
                _pickled(value, chain, places)
            except Exception as reason:
                what = f"attribute {name!r} of {type(one).__name__} ({type(value).__name__})"
                why = f"{reason}" if isinstance(reason, TypeError) else f"{type(reason).__name__}: {reason}"
                return TypeError(f"cannot capture {what}: {why}. {advice}")
    return TypeError(f"cannot capture {type(chain[0]).__name__}: {error}. {advice}")
