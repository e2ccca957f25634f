"""How the server's process is: how long its event loop stood still, and what memory it has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

__all__ = ["Vitals", "memory_bytes"]

INTERVAL_S: Final = 0.25
_STATM: Final = Path("/proc/self/statm")


class Vitals:
    """Of one event loop. `watch` runs beside everything else and wakes four times a second."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.longest_pause_s = 0.0
        """The longest that nothing else could run, since the start: one body that takes long, or a machine that is too busy."""
        self._interval_s = interval_s

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(self._interval_s)
            self.longest_pause_s = max(self.longest_pause_s, loop.time() - before - self._interval_s)


def memory_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
