"""Marks that name a process for good: this boot of the machine, its id, and when it started."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_living", "name_owner"]


def name_owner() -> str:
    """Name this process as no other is named, on this machine or another."""
    return f"{_boot()}.{os.getpid()}.{_started(os.getpid())}"


def is_living(owner: str) -> bool:
    """False = the process is of this boot of this machine and has ended; others are not ours to judge."""
    boot, _, process = owner.partition(".")
    pid, _, started = process.partition(".")
    if boot != _boot() or not pid.isdigit():
        return True
    return _started(int(pid)) == started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no Linux: the container command's own end of stdin has to do
        return "unknown"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
