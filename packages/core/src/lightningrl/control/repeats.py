"""When a client of the control API asks again, and what a refusal says: the same for a worker's line and for the trainer's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

__all__ = ["TRY_AGAIN", "pauses", "read_sentence"]

TRY_AGAIN: Final = frozenset({429, 502, 503, 504, 507})
"""Statuses that say "not now": nobody is behind it, the store is in use or has no room. Nothing was kept, and clients ask again."""


def pauses(deadline: float) -> Iterator[float]:
    """Seconds to wait before each repeat, until the `time.monotonic()` of `deadline`. The first is none: a kept-alive connection may just
    have been closed."""
    pause = 0.0
    while time.monotonic() + pause <= deadline:
        yield pause
        pause = min(2.0, pause * 2 or 0.05)


def read_sentence(answer: bytes) -> str | None:
    """None = the answer is not one of the control API's."""
    try:
        return str(msgspec.json.decode(answer, type=dict[str, Any])["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
