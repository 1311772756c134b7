"""`make`: the arguments of ``pufferlib.vector.make``, checked, for an `ActorVecEnv`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from envactors.backends.base import Backend
from envactors.integrations.options import make_vector
from envactors.integrations.pufferlib.adapter import PufferEnvAdapter
from envactors.integrations.pufferlib.vec_env import ActorVecEnv, Sizes
from envactors.vector.env import VectorEnv
from envactors.vector.options import VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = {
    "autoreset": "PufferLib resets an env in the step after the end of its episode, which is autoreset='next_step'",
    "envs_per_actor": "num_workers is the number of processes",
    "copy": "results of several steps are in one batch",
    "standbys": "the factories of the envs differ in their seeds",
}
# What PufferLib calls the backends that exist here.
_BACKENDS = {"Multiprocessing": "process", "Serial": "inline"}


def make(  # type: ignore[misc] # `backend` takes more than that of the options, and has PufferLib's place
    env_creator_or_creators: Callable[..., Any] | Sequence[Callable[..., Any]],
    env_args: Sequence[Any] | None = None,
    env_kwargs: Any = None,
    backend: Any = "process",
    num_envs: int = 1,
    seed: int = 0,
    num_workers: int | Literal["auto"] | None = None,
    batch_size: int | Literal["auto"] | None = None,
    zero_copy: bool = True,
    overwork: bool = True,  # noqa: ARG001 # PufferLib's name
    **options: Unpack[VectorOptions],
) -> ActorVecEnv:
    """Make a vector env with the protocol of PufferLib 3, in actors, like ``pufferlib.vector.make``.

    Args:
        env_creator_or_creators: Makes an emulated env, a native one, or a bare env of Gymnasium, which is emulated;
            called only in the workers. A sequence has one per env, and then ``env_args`` and ``env_kwargs`` are
            sequences too.
        env_args: Positional arguments of the creator.
        env_kwargs: Keyword arguments of the creator.
        backend: ``"process"`` (default), ``"thread"``, ``"inline"``, or a backend of envactors.
            ``"Multiprocessing"`` and ``"Serial"``, and these classes, mean ``"process"`` and ``"inline"``.
        num_envs: Number of envs.
        seed: Creator ``i`` gets the seed ``seed + i`` if it takes ``buf`` and ``seed``, as PufferLib's own do.
        num_workers: Number of processes; None and ``"auto"`` mean one per env.
        batch_size: Number of envs that `ActorVecEnv.recv` returns; None means all, ``"auto"`` half of them.
        zero_copy: True to make batches of neighboring envs, False to make batches of the envs that are ready first.
        overwork: Ignored: the number of workers has no limit.
        **options: See `envactors.VectorOptions`. With ``on_failure="renew"`` a failed env's agents are truncated, and
            ``{"failure": exception}`` is among the infos.

    Raises:
        ValueError: A number does not fit the others, or the backend is none of these.
        ActorStartError: An env could not be created.
        SpaceMismatchError: The envs' spaces differ.
    """
    sizes = _sizes(num_envs, num_workers, batch_size, contiguous=zero_copy)
    factories = [
        functools.partial(PufferEnvAdapter, creator, args, kwargs, seed + i)
        for i, (creator, args, kwargs) in enumerate(_arguments(env_creator_or_creators, env_args, env_kwargs, num_envs))
    ]
    envs = make_vector(
        VectorEnv,
        "make",
        factories,
        cast("VectorOptions", options),
        _REFUSED,
        backend=_backend(backend),
        envs_per_actor=num_envs // sizes.num_workers,
    )
    try:
        return ActorVecEnv(envs, sizes)
    except BaseException:
        envs.close(0)
        raise


def _sizes(num_envs: Any, num_workers: Any, batch_size: Any, *, contiguous: bool) -> Sizes:
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs is {num_envs!r}: expected a positive int")
    if num_workers in (None, "auto"):
        num_workers = num_envs
    if num_workers < 1 or num_envs % num_workers:
        raise ValueError(f"num_workers={num_workers!r} does not divide num_envs={num_envs}: expected a divisor")
    if batch_size == "auto":
        batch_size = max(num_envs // 2, 1)
    elif batch_size is None:
        batch_size = num_envs
    per_worker = num_envs // num_workers
    if not 1 <= batch_size <= num_envs or batch_size % per_worker:
        raise ValueError(
            f"batch_size={batch_size!r} with {per_worker} envs per worker: expected a multiple of {per_worker}, at "
            f"most {num_envs}"
        )
    if contiguous and num_envs % batch_size:
        raise ValueError(
            f"batch_size={batch_size} does not divide num_envs={num_envs}: expected a divisor, or zero_copy=False"
        )
    return Sizes(num_envs, num_workers, batch_size, contiguous)


def _arguments(creators: Any, args: Any, kwargs: Any, num_envs: int) -> list[tuple[Any, Any, Any]]:
    """Return the creator of each env, with its arguments."""
    if not isinstance(creators, (list, tuple)):
        return [(creators, list(args or ()), dict(kwargs or {}))] * num_envs
    args = [()] * num_envs if args is None else args
    kwargs = [{}] * num_envs if kwargs is None else kwargs
    if {len(creators), len(args), len(kwargs)} != {num_envs}:
        raise ValueError(
            f"{len(creators)} creators, {len(args)} env_args and {len(kwargs)} env_kwargs for num_envs={num_envs}: "
            "expected one of each per env"
        )
    return list(zip(creators, args, kwargs, strict=True))


def _backend(backend: Any) -> str | Backend:
    name = backend.__name__ if isinstance(backend, type) else backend
    if name in ("PufferEnv", "Ray"):
        raise ValueError(
            f"backend={name}: expected 'process', 'thread', 'inline', or a backend of envactors. A native PufferEnv "
            "that steps many envs itself can run in one process, with num_envs=1"
        )
    known: str | Backend = _BACKENDS.get(name, backend) if isinstance(name, str) else backend
    return known
