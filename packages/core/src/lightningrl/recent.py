"""A memory of what was used lately, bounded in entries and in their size: agents choose many of the words and prompts that are kept."""

from __future__ import annotations

import threading
from typing import Final, Generic, TypeVar

__all__ = ["LONGEST", "MOST", "Recent"]

MOST: Final = 4096
"""Entries."""
LONGEST: Final = 1024
"""Characters of an entry; longer ones are read from the database each time."""

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Forgets what was not used for the longest. From any thread."""

    def __init__(self, most: int = MOST, longest: int = LONGEST, *, together: int | None = None) -> None:
        """`longest`: size of an entry that is kept; `together`: of all of them, None = as many as there may be."""
        self._most = most
        self._longest = longest
        self._together = most * longest if together is None else together
        self._kept: dict[K, tuple[V, int]] = {}
        """With their sizes, the newest at the end."""
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._kept.pop(key, None)
            if entry is None:
                return None
            self._kept[key] = entry
            return entry[0]

    def put(self, key: K, value: V, size: int) -> V:
        """The value. `size`: of the entry, in characters or tokens."""
        if size <= self._longest:
            with self._lock:
                self._drop(key)
                self._kept[key] = value, size
                self._size += size
                while len(self._kept) > self._most or self._size > self._together:
                    self._drop(next(iter(self._kept)))
        return value

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, key: K) -> None:
        if (entry := self._kept.pop(key, None)) is not None:
            self._size -= entry[1]
