"""Repeated requests of the control API's clients, and what an answer says: alike for workers and the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from lightningrl.errors import ServerError

__all__ = ["TRY_AGAIN", "Repeats", "read_sentence", "reading_answer"]

TRY_AGAIN: Final = frozenset({429, 502, 503, 504, 507})
"""Statuses that say "not now": nobody is behind it, the store is in use or has no room. Nothing was kept; ask again."""
NOT_NOW_S: Final = 60.0
"""Seconds that a client believes that: a server may start slowly, a store that is in use for longer has an owner."""


class Repeats:
    """The pauses between the tries of one request."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: of all tries after the first, which may have been a long poll."""
        self._patience_s = patience_s
        self._until: float | None = None
        self._not_now_until: float | None = None
        self._pause = 0.0

    def next_pause(self, *, says_not_now: bool = False) -> float | None:
        """Seconds to wait before the next try, 0 before the second: a kept-alive connection may just have been closed.
        None = give up. `says_not_now`: the server did answer, with one of `TRY_AGAIN`."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._patience_s
        if not says_not_now:
            self._not_now_until = None
        elif self._not_now_until is None:
            self._not_now_until = now + NOT_NOW_S
        until = self._until if self._not_now_until is None else min(self._until, self._not_now_until)
        pause, self._pause = self._pause, min(2.0, self._pause * 2 or 0.05)
        return pause if now + pause < until else None


def read_sentence(answer: bytes) -> str | None:
    """Read the sentence of an error; None = the answer is not one of the control API's."""
    try:
        return str(msgspec.json.decode(answer, type=dict[str, Any])["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


@contextmanager
def reading_answer(url: str) -> Iterator[None]:
    """Raises ServerError where the block cannot decode what the server at `url` answered."""
    try:
        yield
    except msgspec.MsgspecError as error:
        raise ServerError(f"server {url!r} answered {error}; is it of the same version?") from error
