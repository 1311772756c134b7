"""Unwrap an env's exception from a `VectorStepError`, for drop-ins whose users expect the env's own exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from envactors.errors import VectorStepError

_T = TypeVar("_T")


def first_failure(error: VectorStepError) -> BaseException:
    """Return the exception from the first env that failed."""
    return next(iter(error.failures.values()))


def or_first_failure(request: Callable[[], _T]) -> _T:
    """Return the result of a request to a vector, or raise the exception from the first env that failed."""
    try:
        return request()
    except VectorStepError as error:
        failed = error
    raise first_failure(failed)
