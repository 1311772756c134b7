"""Decoding what comes beside the rows of a batch, as far as possible while other workers still run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from envactors.actor.slots import Slots
from envactors.vector.results import Content


class Decoder:
    """Decodes the infos and the object leaves of batches.

    Args:
        slots: All envs.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # What was decoded of the results that had come before others, by env and the number of the result.
        self._decoded: dict[int, tuple[int, Content]] = {}

    def decode_early(self, env_ids: Sequence[int]) -> None:
        """Decode what is there while other workers run, so that little is left to decode at the end."""
        slots, decoded = self._slots, self._decoded
        for env_id in env_ids:
            number = int(slots.numbers[env_id])
            is_known = env_id in decoded and decoded[env_id][0] == number
            if not is_known and not slots.infos.failed(env_id):
                with contextlib.suppress(Exception):  # `decode` comes upon it again
                    decoded[env_id] = number, slots.infos.decode(env_id, slots.overflow.get(env_id))

    def decode(self, env_ids: Sequence[int]) -> list[Content] | None:
        """Return (info, object leaves) per env; None if one has failed."""
        infos = self._slots.infos
        contents: list[Content] = []
        for env_id in env_ids:
            if infos.failed(env_id):
                return None
            number, content = self._decoded.pop(env_id, (0, None))
            if content is None or number != self._slots.numbers[env_id]:
                try:
                    content = infos.decode(env_id, self._slots.overflow.get(env_id))
                except BaseException:  # unpickling runs any code; reading it alone makes an error of it
                    return None
            contents.append(content)
        return contents
