"""A memory of what was used lately, bounded in entries and in the size of each: agents choose many of the words that a store keeps."""

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

    def __init__(self, most: int = MOST, longest: int = LONGEST) -> None:
        self._most = most
        self._longest = longest
        self._kept: dict[K, V] = {}
        """The newest at the end."""
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._kept.pop(key, None)
            if value is not None:
                self._kept[key] = value
            return value

    def put(self, key: K, value: V, size: int) -> V:
        """The value. `size`: of the entry, in characters."""
        if size <= self._longest:
            with self._lock:
                self._kept.pop(key, None)
                self._kept[key] = value
                if len(self._kept) > self._most:
                    del self._kept[next(iter(self._kept))]
        return value

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
