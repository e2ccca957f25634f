"""The machine, and what processes use of it: memory, CPU time, disk, GPUs.

psutil ─► memory and CPU time of processes, memory of the machine      /sys/fs/cgroup ─► what its containers leave
/proc/self ─► a peak of memory that begins anew
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

__all__ = [
    "FreeMemory",
    "MemoryGrowth",
    "count_gpus",
    "cpu_seconds",
    "free_disk",
    "free_memory",
    "gigabytes",
    "memory_now",
    "memory_total",
    "memory_used",
    "resident_by_pid",
    "resident_bytes",
]

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Memory that is left to new work here."""

    free: int
    """Bytes."""
    total: int
    where: str
    """Name of the limit: `MemAvailable`, or a container's."""


def free_memory() -> FreeMemory | None:
    """The least of what the machine has available and of what each control group of this process leaves; None where the
    system does not say."""
    return min(_limits(), key=lambda limit: limit.free, default=None)


def memory_total() -> int | None:
    """Bytes of the machine or of its smallest container; None where the system does not say."""
    return min((limit.total for limit in _limits()), default=None)


def _limits() -> Iterator[FreeMemory]:
    """Yield what the machine leaves, and control groups: of version 2 this process's and all above it, of version 1 its
    own."""
    if sys.platform != "linux":  # elsewhere what is available is a guess
        return
    machine = psutil.virtual_memory()
    where = f"MemAvailable of {gigabytes(machine.total)}"
    yield FreeMemory(free=machine.available, total=machine.total, where=where)
    for folder in dict.fromkeys(_groups()):
        for limit, used, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                most = int((folder / limit).read_text(encoding="ascii"))
                inside = int((folder / used).read_text(encoding="ascii"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):  # no such version, or no limit: `max`
                continue
            if most < machine.total:
                inside -= int(stat.get(idle, 0))  # files that the kernel drops when room is needed
                yield FreeMemory(free=max(0, most - inside), total=most, where=f"the container's {gigabytes(most)}")


def _groups() -> Iterator[Path]:
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = CGROUPS / "memory" if "memory" in controllers.split(",") else CGROUPS
        if not controllers or root != CGROUPS:
            place = root / path.lstrip("/")
            yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(root))
    yield from (CGROUPS, CGROUPS / "memory")


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def resident_by_pid() -> dict[int, int]:
    """Resident bytes of this process and of each that it has started, and those in turn, by pid."""
    return {pid: memory.rss for pid, memory in _family_memory().items()}


def memory_now() -> int:
    """Bytes of this process and of its descendants, of these what each has for itself."""
    return resident_bytes() + _descendants_bytes()


def memory_used() -> int | None:
    """The same with this process's peak, ever or since a `MemoryGrowth` began; None where the system does not say."""
    peak = _peak()
    return None if peak is None else peak + _descendants_bytes()


class MemoryGrowth:
    """Growth of this process's memory from now on."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")  # VmHWM counts anew
            self._before = resident_bytes()

    def most(self) -> int | None:
        """Bytes at the worst moment so far; None = the system does not say."""
        peak = _peak()
        return None if self._before is None or peak is None else max(0, peak - self._before)


def _descendants_bytes() -> int:
    own = os.getpid()
    return sum(memory.rss - getattr(memory, "shared", 0) for pid, memory in _family_memory().items() if pid != own)


def _peak() -> int | None:
    """Most bytes of this process, which psutil does not tell (`ru_maxrss` is its parent's, too, and never begins
    anew)."""
    try:
        lines = (PROC / "self" / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def cpu_seconds(pid: int | None = None) -> float | None:
    """CPU seconds of a process, its descendants, and those of them that have ended; None where it is gone.

    `pid`: None = this process."""
    times = []
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            times.append(float(sum(process.cpu_times()[:4])))  # user, system, and those of children waited for
    return sum(times) if times else None


def _family_memory() -> dict[int, Any]:
    memory = {}
    for process in _family():
        with contextlib.suppress(psutil.Error):
            memory[process.pid] = process.memory_info()
    return memory


def _family(pid: int | None = None) -> list[psutil.Process]:
    """A process and its descendants; none where it is gone."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def free_disk(where: Path) -> int:
    """Free bytes of the disk that holds `where`, which need not exist yet."""
    there = where.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def count_gpus() -> int:
    """GPUs that a process here may use; only NVIDIA's are seen."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def gigabytes(size: float) -> str:
    """A size as people say it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
