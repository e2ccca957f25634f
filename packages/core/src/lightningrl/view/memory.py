"""What pages show is computed again only when it may have changed, and never so often that a run would notice."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["Memory"]

T = TypeVar("T")

_SHARE: Final = 0.02
"""Of a core, at most, for one value of a run that goes on."""
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class _Known:
    value: Any
    token: Hashable
    made_at: float
    took_s: float


class Memory:
    """Values of one run. One stands while the run's files are as they were; while they change, for fifty times as long as it took."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    async def recall(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        token, now = self._token(), self._clock()
        known = self._known.get(key)
        if known is not None and (known.token == token or now - known.made_at < known.took_s / _SHARE):
            self._known.move_to_end(key)
            value: T = known.value
            return value
        value = await make()
        self._known[key] = _Known(value, token, now, self._clock() - now)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return value

    def _token(self) -> Hashable:
        """Changes with what the run writes. A database does not say, so it may have been."""
        if not (self._folder / "store.sqlite").exists():
            return object()
        found = []
        for name in ("store.sqlite", "store.sqlite-wal", "metrics.jsonl"):
            try:
                stat = (self._folder / name).stat()
            except OSError:
                continue
            found.append((name, stat.st_mtime_ns, stat.st_size))
        return tuple(found)
