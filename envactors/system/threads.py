"""What the threads of this process are doing."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is at, by its id.

    Up to some releases of Python 3.12, a garbage collection in the middle of `sys._current_frames` may run code that
    waits for a thread which waits for that function (https://github.com/python/cpython/issues/106883), for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 # documented for debugging tools
    finally:
        if was_enabled:
            gc.enable()
