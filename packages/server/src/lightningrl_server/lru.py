"""A least-recently-used cache, bounded in entries and in their size: agents choose many of its words and prompts."""

from __future__ import annotations

import threading
from typing import Final, Generic, TypeVar

__all__ = ["LONGEST", "MOST", "LruCache"]

MOST: Final = 4096
"""Entries."""
LONGEST: Final = 1024
"""Characters of an entry; longer ones are not kept."""

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Drops the entry that was not used for the longest. Safe from any thread."""

    def __init__(self, most: int = MOST, longest: int = LONGEST, *, together: int | None = None) -> None:
        """`longest`: most size of an entry that is kept; `together`: of all entries, None = `most * longest`."""
        self._most = most
        self._longest = longest
        self._together = most * longest if together is None else together
        self._entries: dict[K, tuple[V, int]] = {}
        """Values with their sizes, the newest at the end."""
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._entries[key] = entry
            return entry[0]

    def put(self, key: K, value: V, size: int) -> V:
        """Keep a value and return it. `size`: of the entry, in characters or tokens."""
        if size <= self._longest:
            with self._lock:
                self._drop(key)
                self._entries[key] = value, size
                self._size += size
                while len(self._entries) > self._most or self._size > self._together:
                    self._drop(next(iter(self._entries)))
        return value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._size -= entry[1]
