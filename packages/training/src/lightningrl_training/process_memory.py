"""Memory of a run's processes on this machine, as metrics of a step.

memory/trainer   this process     memory/server    the servers
memory/workers   workers, and whatever else this process has started
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from lightningrl.keeper import list_descendants

__all__ = ["measure_memory"]

PROC: Final = Path("/proc")


def measure_memory(servers: Collection[int]) -> dict[str, float]:
    """Read the resident bytes of this process and of those that it has started; empty where the system does not say.
    `servers`: pids of the servers."""
    own = os.getpid()
    sizes = {"memory/trainer": _resident(own)}
    for pid in list_descendants(own):
        name = "memory/server" if pid in servers else "memory/workers"
        sizes[name] = sizes.get(name, 0.0) + _resident(pid)
    return {name: size for name, size in sizes.items() if size}


def _resident(pid: int) -> float:
    try:
        return float(int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0
