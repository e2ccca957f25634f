"""Values of pages, computed again only when they may have changed, and never so often that a run would notice.

get(key, make) ─► as before where the run is as it was ─► as before where the last computing is not paid for ─► make()
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from lightningrl_server.store.location import find_store
from lightningrl_viewer.reading.queries.health import Position
from lightningrl_viewer.reading.summary import is_live

__all__ = ["Cache"]

T = TypeVar("T")

_SHARE: Final = 0.005
"""Share of a core, at most, for all that is computed again of a run that goes on; a value nobody has asked for before
is computed at once."""
_LONGEST_S: Final = 15.0
"""Seconds that a value stands at most, also where a busy machine took long to compute it."""
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    token: Hashable
    """None = parts of it were older than the run already when it was made."""
    step: int
    """The last that had finished."""


class Cache:
    """Values of one run, pages among them. One that took 25 ms stands for 5 s while the run goes on, or until a step
    ends."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._is_file = find_store(folder).startswith("sqlite")
        self._clock = clock
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._position: Position | None = None
        self._free_at = 0.0
        """When something may be computed again."""
        self._making = 0
        """Values that are made at this moment: a page, and what it gets itself."""
        self._is_behind = False
        """True where the page that is made now got something older than the run."""

    def see(self, position: Position) -> None:
        """Note how far the store has come: all that tells of it where it is no file of the run's folder."""
        self._position = position

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        token, began = self._token(), self._clock()
        entry, step = self._entries.get(key), self._position.step if self._position else 0
        if entry is not None and (entry.token == token or (began < self._free_at and entry.step == step)):
            self._entries.move_to_end(key)
            self._is_behind = self._is_behind or entry.token != token
            value: T = entry.value
            return value
        is_whole = not self._making
        if is_whole:
            self._is_behind = False
        self._making += 1
        try:
            value = await make()
        finally:
            self._making -= 1
        self._entries[key] = _Entry(value, None if self._is_behind else token, step)
        if is_whole:
            now = self._clock()
            self._free_at = now + min((now - began) / _SHARE, _LONGEST_S)
        while len(self._entries) > _MOST:
            self._entries.popitem(last=False)
        return value

    def fresh_in(self, key: Hashable) -> float | None:
        """Return the seconds until a value that is older than the run may be computed again. None = it is as the run
        is, or unknown."""
        entry = self._entries.get(key)
        return None if entry is None or entry.token == self._token() else max(0.0, self._free_at - self._clock())

    def _token(self) -> Hashable:
        """Return a token that changes with what the run writes. A database does not say, so it may have been."""
        if not self._is_file:
            return object()
        token: list[Hashable] = [self._position, is_live(self._folder)]
        for name in ("store.sqlite", "store.sqlite-wal", "metrics.jsonl"):
            try:
                stat = (self._folder / name).stat()
            except OSError:
                continue
            token.append((name, stat.st_mtime_ns, stat.st_size))
        return tuple(token)
