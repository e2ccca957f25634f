"""Processes as a test sees them from outside: whether they live, that they have ended; a `lightningrl train` run
started, its processes found through /proc, killed, resumed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sizes import PATIENCE_S
from warm import WarmCommand

__all__ = [
    "ROLES",
    "Process",
    "Role",
    "TrainRun",
    "all_ended",
    "ancestors",
    "commands",
    "descendants",
    "is_alive",
    "processes_that_name",
    "wait_for",
    "written",
]

Role = Literal["server", "worker"]
ROLES: tuple[Role, ...] = ("server", "worker")
LOOKS = 600
"""At processes that were killed: each takes a moment to die, and none dies by itself before the last look."""
MARKS: dict[bytes, Role] = {b"lightningrl_server": "server", b"lightningrl_client.runtime.worker": "worker"}
WARM: Final = str(Path(__file__).with_name("warm.py")).encode()


@dataclass(frozen=True, slots=True)
class Process:
    """A process that no other can be mistaken for, though its id is used again."""

    pid: int
    started: int
    role: Role | None = None

    @property
    def is_alive(self) -> bool:
        stat = read_stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"


@dataclass(frozen=True, slots=True)
class Stat:
    state: str
    parent: int
    started: int


class TrainRun:
    """One run folder and whichever trainer process works on it now."""

    def __init__(self, warm: WarmCommand, folder: Path, journal: Path) -> None:
        self._warm = warm
        self.folder = folder
        self.journal = journal
        self.console = folder.with_name(f"{folder.name}.console")
        self.seen: set[Process] = set()
        self.killed: set[Process] = set()
        self._trainer: subprocess.Popen[bytes] | None = None

    @property
    def trainer(self) -> subprocess.Popen[bytes]:
        assert self._trainer is not None, "the run was not started"
        return self._trainer

    def start(self, *arguments: str) -> None:
        """`lightningrl train …` in this run folder."""
        environment = {**os.environ, "CRASH_JOURNAL": str(self.journal), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        command = ["lightningrl", "train", "--run", str(self.folder), *arguments]
        with self.console.open("ab") as console:
            self._trainer = self._warm.start(
                *command, output=console, errors=console, cwd=Path.cwd(), environment=environment
            )

    def children(self, role: Role) -> list[Process]:
        """Of the trainer, as they are now, without those that are dying."""
        found = [child for child in list_children(self.trainer.pid) if child.is_alive]
        self.seen.update(found)
        return [child for child in found if child.role == role and child not in self.killed]

    def kill(self, process: Process) -> None:
        self.killed.add(process)
        if process.is_alive:
            os.kill(process.pid, signal.SIGKILL)

    def kill_trainer(self) -> None:
        self.children("worker")
        self.trainer.send_signal(signal.SIGKILL)
        self.trainer.wait()

    def orphans(self) -> list[Process]:
        """Processes of this run that live."""
        return [process for process in self.seen if process.is_alive]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """The run must still be going. What it starts meanwhile is seen."""

        def is_met() -> bool:
            assert self.trainer.poll() is None, f"the trainer ended with {self.trainer.returncode}\n{self.describe()}"
            self.children("worker")
            return condition()

        wait_for(is_met, self.describe)

    def wait_for_orphans(self) -> None:
        """Until nothing of this run lives."""
        wait_for(lambda: not self.orphans(), lambda: f"orphans: {self.orphans()}\n{self.describe()}")

    def lines(self) -> list[list[str]]:
        """The journal, finished lines only."""
        if not self.journal.exists():
            return []
        return [line.split() for line in self.journal.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait(self) -> int:
        """The trainer's exit status. What it starts meanwhile is seen."""
        wait_for(lambda: (self.children("worker"), self.trainer.poll() is not None)[1], self.describe)
        return self.trainer.wait()

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._trainer is not None and self._trainer.poll() is None:
            self.kill_trainer()
        for process in self.orphans():
            self.kill(process)

    def said(self) -> str:
        """On the console, on one line."""
        return " ".join(self.console.read_text().split())

    def describe(self) -> str:
        """For a failure's message: what the run said last."""
        logs = [self.console, *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.is_file())


@contextlib.asynccontextmanager
async def all_ended(*files: Path) -> AsyncIterator[None]:
    """At the end the processes whose ids are in the files have ended. Those that have not are killed, and the test
    fails."""
    try:
        yield
        living = list_living(files)
        for _ in range(LOOKS):
            if not living:
                return
            await asyncio.sleep(0.05)
            living = list_living(files)
        raise AssertionError(f"not ended: {living}")
    finally:
        for pid in list_living(files):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def list_living(files: Sequence[Path]) -> list[int]:
    return [pid for file in files if file.exists() for pid in map(int, file.read_text().split()) if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """A zombie that nobody reaps has ended."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


async def written(file: Path, *, words: int) -> None:
    """Returns when a process has written so many words into the file."""
    async with asyncio.timeout(PATIENCE_S):
        while not (file.exists() and len(file.read_text().split()) == words):
            await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain\n{describe()}"
        time.sleep(0.05)


def list_children(parent: int) -> Sequence[Process]:
    found = []
    for pid in child_ids(parent):
        stat = read_stat(pid)
        try:
            command = [
                *Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"),
                Path(f"/proc/{pid}/comm").read_bytes().strip(),
            ]
        except OSError:
            continue
        if WARM in command:  # the arguments of what is forked are the forge's
            command = command[-1:]
        if stat is not None:
            found += [
                Process(pid, stat.started, role)
                for mark, role in MARKS.items()
                if mark in command or mark[-15:] in command
            ]
    return found


def child_ids(parent: int) -> list[int]:
    return [pid for pid, stat in read_stats().items() if stat.parent == parent]


def descendants(pid: int) -> set[Process]:
    """The process, its children, theirs, and so on, as they are now."""
    stats = read_stats()
    found = {pid} & stats.keys()
    while more := {child for child, stat in stats.items() if stat.parent in found} - found:
        found |= more
    return {Process(each, stats[each].started) for each in found}


def ancestors(pid: int) -> list[int]:
    """The process, its parent, and so on, up to a child of this one."""
    line: list[int] = []
    while pid not in (0, 1, os.getpid()):
        line.append(pid)
        stat = read_stat(pid)
        pid = 0 if stat is None else stat.parent
    return line


def commands(words: str) -> list[int]:
    """Processes with this command line."""
    lines = {int(file.parent.name): read_bytes(file) for file in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, line in lines.items() if line.replace(b"\0", b" ").strip() == words.encode()]


def processes_that_name(folder: Path) -> list[Process]:
    """Processes that have the folder in their command line or in the environment that they began with, but this one and
    its child that warm.py forks others from."""
    found, word = [], str(folder).encode()
    for pid, stat in read_stats().items():
        command, environment = (read_bytes(Path(f"/proc/{pid}/{name}")) for name in ("cmdline", "environ"))
        is_ours = pid == os.getpid() or (stat.parent == os.getpid() and b"/warm.py\0" in command)
        if not is_ours and stat.state not in "ZX" and (word in command or word in environment):
            found.append(Process(pid, stat.started))
    return found


def read_bytes(file: Path) -> bytes:
    """Empty for a process that has ended, or is somebody else's."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def read_stats() -> dict[int, Stat]:
    stats = {int(entry.name): read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def read_stat(pid: int) -> Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(state=fields[0], parent=int(fields[1]), started=int(fields[19]))
