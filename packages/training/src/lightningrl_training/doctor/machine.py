"""Use of the machine by this process and those that it has started (time, memory), and what the machine has.
Linux tells in /proc; elsewhere the answers are None."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "NO_COST",
    "UNTIMED",
    "Clock",
    "Cost",
    "Machine",
    "MemoryGrowth",
    "cpu_seconds",
    "folder_bytes",
    "free_disk",
    "memory_now",
    "memory_used",
    "read_machine",
    "store_bytes",
]

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The memory and disk that a run may use."""

    memory: int | None
    """Bytes of the machine or of the container; None = not known."""
    memory_used: int | None
    """Largest use of server, workers, engine and learner together, in bytes."""
    disk_free: int
    """Free bytes where runs are written."""
    gpus: int = 0
    """GPUs that a process here may use; only NVIDIA's are seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Time that something took."""

    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU seconds of all our processes; None = the system does not say."""

    def __add__(self, other: Cost) -> Cost:
        pair = self.cpu_seconds, other.cpu_seconds
        cpu = None if pair[0] is None or pair[1] is None else pair[0] + pair[1]
        return Cost(seconds=self.seconds + other.seconds, cpu_seconds=cpu)

    def __mul__(self, times: float) -> Cost:
        cpu = None if self.cpu_seconds is None else self.cpu_seconds * times
        return Cost(seconds=self.seconds * times, cpu_seconds=cpu)

    def beyond(self, seconds: float) -> Cost:
        """The part after so many seconds."""
        return self * (max(0.0, 1.0 - seconds / self.seconds) if self.seconds else 0.0)


NO_COST: Final = Cost(cpu_seconds=0.0)
UNTIMED: Final = Cost()


class Clock:
    """Wall and CPU time since the last lap."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), cpu_seconds()

    def lap(self) -> Cost:
        before = self._wall, self._cpu
        self._wall, self._cpu = time.monotonic(), cpu_seconds()
        cpu = None if self._cpu is None or before[1] is None else max(0.0, self._cpu - before[1])
        return Cost(seconds=self._wall - before[0], cpu_seconds=cpu)


class MemoryGrowth:
    """Growth of this process's memory from now on."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")  # VmHWM counts anew
            self._before = _status(os.getpid(), "VmRSS")

    def most(self) -> int | None:
        """Bytes at the worst moment so far; None = the system does not say."""
        peak = _status(os.getpid(), "VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def read_machine(where: Path, used: int | None) -> Machine:
    """Measure the machine. `where`: a folder on the disk of the runs, which need not exist yet."""
    return Machine(memory=_memory(), memory_used=used, disk_free=free_disk(where), gpus=_gpus())


def cpu_seconds() -> float | None:
    """CPU seconds of this process, its descendants, and those of them that have ended."""
    processes = _processes()
    family = _family(os.getpid(), processes)
    ticks = sum(
        sum(map(int, processes[pid][11:15])) for pid in family
    )  # utime, stime, and those of children that were waited for
    return ticks / os.sysconf("SC_CLK_TCK") if family else None


def memory_used() -> int | None:
    """Bytes of this process at its peak, ever or since a `MemoryGrowth` began, and of its descendants now."""
    family = _family(os.getpid(), _processes())
    sizes = [_status(pid, "VmHWM" if pid == os.getpid() else "RssAnon") for pid in family]
    numbers = [number for number in sizes if number is not None]
    return sum(numbers) if numbers else None


def memory_now() -> int | None:
    """Bytes of this process and its descendants now."""
    family = _family(os.getpid(), _processes())
    sizes = [_status(pid, "VmRSS" if pid == os.getpid() else "RssAnon") for pid in family]
    numbers = [number for number in sizes if number is not None]
    return sum(numbers) if numbers else None


def free_disk(where: Path) -> int:
    """Free bytes of the disk that holds `where`."""
    there = where.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def store_bytes(path: Path) -> int:
    """Bytes of a SQLite database's pages, those in its write-ahead log included."""
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        (pages,), (size,) = (database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)


def _processes() -> dict[int, list[str]]:
    """Fields of each process's `stat` after its name, by pid."""
    processes: dict[int, list[str]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            processes[int(path.parent.name)] = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile; its parent has its time
            continue
    return processes


def _family(pid: int, processes: Mapping[int, Sequence[str]]) -> list[int]:
    """Pids of a process and its descendants."""
    family = [pid] if pid in processes else []
    for parent in family:
        family += [child for child, fields in processes.items() if fields[1] == str(parent)]
    return family


def _status(pid: int, name: str) -> int | None:
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _gpus() -> int:
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def _memory() -> int | None:
    try:
        total = int((PROC / "meminfo").read_text().split()[1]) * 1024
    except OSError:
        return None
    try:
        return min(total, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total
