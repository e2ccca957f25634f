"""What this process and those that it has started take of the machine: CPU seconds, memory; and what there is. Linux says it in /proc;
elsewhere the answers are None."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Machine", "MemoryGrowth", "cpu_seconds", "folder_bytes", "free_disk", "memory_used", "read_machine"]

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The memory and disk that a run may use."""

    memory: int | None
    """Bytes that this machine, or the container, has; None = not known."""
    memory_used: int | None
    """The most that server, workers, engine and learner had together."""
    disk_free: int
    """Bytes where runs are written."""
    gpus: int = 0
    """That a process here may use; NVIDIA's alone are seen."""


class MemoryGrowth:
    """How far this process's memory grows from now on."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")  # VmHWM counts anew
            self._before = _status(os.getpid(), "VmRSS")

    def most(self) -> int | None:
        """Bytes, at the worst moment so far; None = the system does not say."""
        peak = _status(os.getpid(), "VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def read_machine(where: Path, used: int | None) -> Machine:
    """`where`: a folder on the disk of the runs, whether it is there yet or not."""
    return Machine(memory=_memory(), memory_used=used, disk_free=free_disk(where), gpus=_gpus())


def cpu_seconds() -> float | None:
    """Of this process, its descendants, and those of them that have ended."""
    processes = _processes()
    family = _family(os.getpid(), processes)
    ticks = sum(sum(map(int, processes[pid][11:15])) for pid in family)  # utime, stime, and those of children that were waited for
    return ticks / os.sysconf("SC_CLK_TCK") if family else None


def memory_used() -> int | None:
    """Bytes: the most that this process had, ever or since a `MemoryGrowth` began, and what its descendants have."""
    family = _family(os.getpid(), _processes())
    found = [_status(pid, "VmHWM" if pid == os.getpid() else "RssAnon") for pid in family]
    known = [number for number in found if number is not None]
    return sum(known) if known else None


def free_disk(where: Path) -> int:
    """Bytes."""
    there = where.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def folder_bytes(folder: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _processes() -> dict[int, list[str]]:
    """By pid: the fields of its `stat` after its name."""
    found: dict[int, list[str]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile; its parent has its time
            continue
    return found


def _family(pid: int, processes: Mapping[int, Sequence[str]]) -> list[int]:
    """A process and its descendants."""
    found = [pid] if pid in processes else []
    for parent in found:
        found += [child for child, fields in processes.items() if fields[1] == str(parent)]
    return found


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
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    total = int(lines[0].split()[1]) * 1024
    try:
        return min(total, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total
