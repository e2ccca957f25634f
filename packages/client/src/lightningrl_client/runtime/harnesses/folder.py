"""A rollout's own place on disk: its working folder, a HOME, the state that the work began with, for the diff.

ROOT                 one for each process that runs harnesses; guard.py removes it, however that process ends
└── 7                one for each rollout, removed after it
    ├── work         from a template folder or a git revision, and the task's files; a git repository of one commit
    ├── home         HOME, with .config, .cache, … below it; tmp beside it; others of both for the check
    ├── start.bundle the same commit: what it is compared with
    ├── diff-…       made afterwards, for the comparison: git reads no repository that a program could write
    └── log          stdin, stdout and stderr
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, TypeVar

from lightningrl.errors import LightningError
from lightningrl.keeper import list_descendants
from lightningrl_client.runtime.command import wait_for
from lightningrl_client.runtime.harnesses import guard

__all__ = ["FolderError", "Rollouts", "Room", "in_thread", "write_files"]

T = TypeVar("T")
GIT_S: Final = 120.0
LONGEST_DIFF: Final = 256 * 1024
"""Characters."""
MOST_OUTPUT: Final = 4 * LONGEST_DIFF + 1
"""Bytes of git's output that are read; a file with a hole in it may be of any size."""
LONGEST_PATH: Final = 3_000
"""Characters of a folder's path, of which the system names 4,095."""
WHO: Final = ("-c", "user.name=lightningrl", "-c", "user.email=lightningrl@localhost", "-c", "commit.gpgsign=false")


PLAIN: Final = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
NOBODYS: Final = {
    "HOME": os.devnull,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": os.devnull,
    "GIT_CONFIG_KEY_2": "core.bigFileThreshold",
    "GIT_CONFIG_VALUE_2": "16m",
}
"""Variables of a git that runs no program but its own, and reads a large file in pieces."""


class FolderError(LightningError):
    """A rollout's folder cannot be made, or something in it cannot be read."""


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run it beside the event loop. One who is cancelled waits until it has ended: it works on a folder that goes."""
    return await wait_for(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


class Room:
    """One rollout's folders."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work, self.home, self.tmp = place / "work", place / "home", place / "tmp"
        self.start, self.log = place / "start.bundle", place / "log"
        self.commit = ""
        """The state that the work began with; git checks each of its objects by the digest."""
        self.exclude: tuple[str, ...] = ()
        self.disk = 0
        """The device that its files are on."""

    def furnish(
        self,
        template: Path | None,
        repository: Path,
        revision: str | None,
        files: Mapping[str, str],
        exclude: Sequence[str] = (),
    ) -> None:
        """Make the folders, fill the one for work, and keep the state it starts with; files of the patterns `exclude`
        are no part of it. Raises FolderError or OSError."""
        self.place.mkdir(mode=0o700)
        self.exclude = tuple(exclude)
        for folder in (self.home, self.home / ".codex", self.tmp, self.log):
            folder.mkdir()
        if template is not None:
            shutil.copytree(template, self.work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        self.work.mkdir(exist_ok=True)
        if revision is not None:
            archive = self.place / "revision.tar"
            git("-C", repository, "archive", "--format=tar", "-o", archive, "--end-of-options", revision)
            with tarfile.open(archive) as tar:
                tar.extractall(self.work, filter="tar")
            archive.unlink()
        write_files(self.work, files)
        git("init", "--quiet", "--initial-branch=main", self.work)
        (self.work / ".git/info").mkdir(exist_ok=True)
        (self.work / ".git/info/exclude").write_text("\n".join((*exclude, "")))
        git("-C", self.work, "add", "--all")
        git(*WHO, "-C", self.work, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "start")
        self.commit = git("-C", self.work, "rev-parse", "HEAD").strip()
        git("-C", self.work, "bundle", "create", "--quiet", self.start, "HEAD")
        self.disk = self.start.stat().st_dev

    def renew_home(self) -> None:
        """Make a HOME and a TMPDIR for what runs next, in which no program before has written. Raises FolderError."""
        self.refuse_links()
        self.home, self.tmp = (Path(tempfile.mkdtemp(prefix=name, dir=self.place)) for name in ("home-", "tmp-"))

    def refuse_links(self) -> None:
        """Raise FolderError where a program has put something else in the place of a folder that we work in."""
        for folder in (self.place, self.work, self.log):
            if folder.is_symlink() or not folder.is_dir():
                raise FolderError(
                    f"the harness has removed or replaced its folder {folder.name!r}; look at what it runs"
                )

    def diff(self, boxed: Sequence[str] = ()) -> str:
        """The work's difference from its start, new files included, at most `LONGEST_DIFF` characters. `boxed`: words
        before a command that run it in the box. Raises FolderError."""
        self.refuse_links()
        place = Path(tempfile.mkdtemp(prefix="diff-", dir=self.place))
        git("init", "--quiet", "--bare", "--template=", place)
        (place / "info").mkdir()
        (place / "info/exclude").write_text("\n".join((*self.exclude, "")))
        state = ("--git-dir", place, "--work-tree", self.work)
        git("--git-dir", place, "bundle", "unbundle", self.start)
        git(*state, "read-tree", self.commit)
        git(*state, "add", "--all", cwd=self.work, boxed=boxed)
        text = git(*state, "diff", "--cached", *PLAIN, self.commit, cwd=self.work, boxed=boxed)
        if len(text) <= LONGEST_DIFF:
            return text
        return f"{text[:LONGEST_DIFF]}\n... the diff was cut at {LONGEST_DIFF} characters\n"

    def used_bytes(self, keeper_pid: int = 0) -> int:
        """Bytes that its files take on the disk, with those that programs below a keeper have removed and hold open.
        Raises FolderError where folders are nested beyond what can be named."""
        total, left = self._removed_bytes(keeper_pid), [str(self.place)]
        while left:
            folder = left.pop()
            if len(folder) > LONGEST_PATH:
                raise FolderError(
                    f"the harness nested folders more than {LONGEST_PATH} characters deep; look at what it runs"
                )
            with contextlib.suppress(OSError), os.scandir(folder) as entries:  # it has gone meanwhile
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def _removed_bytes(self, keeper_pid: int) -> int:
        sizes: dict[int, int] = {}
        for pid in list_descendants(keeper_pid):
            with contextlib.suppress(OSError):  # it has ended
                for link in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):  # it has closed this one
                        state = link.stat()
                        if stat.S_ISREG(state.st_mode) and state.st_dev == self.disk and not state.st_nlink:
                            sizes[state.st_ino] = state.st_blocks * 512
        return sum(sizes.values())


class Rollouts:
    """The rooms of a process. The first makes their root, and starts the guard that removes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._root: Path | None = None

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[Room]:
        """A room, cleared in the end: processes that live in it are killed, its files removed."""
        root = await in_thread(self._find_root)
        room = Room(root / str(next(self._numbers)))
        try:
            yield room
        finally:
            await in_thread(guard.clear, str(room.place))

    def _find_root(self) -> Path:
        with self._lock:
            if self._root is None or not self._root.is_dir():
                self._root = Path(tempfile.mkdtemp(prefix="lightningrl-harness-")).resolve()
                # a session and an environment of its own: who ends the worker and what it started leaves the guard
                watch = subprocess.Popen(
                    (sys.executable, "-I", "-S", guard.__file__, str(self._root)),
                    stdin=subprocess.PIPE,
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
                weakref.finalize(self, _end_guard, watch)
            return self._root


def _end_guard(watch: subprocess.Popen[bytes]) -> None:
    """Have the guard clear its folder, and wait for that."""
    assert watch.stdin is not None
    watch.stdin.close()
    watch.wait()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by their paths in the folder; links and files that stand in the way are replaced. Raises FolderError
    for a path that leads elsewhere, and for what is no text."""
    for name, text in files.items():
        parts = Path(name).parts
        is_elsewhere = Path(name).is_absolute() or "\0" in name or {"..", ".git"}.intersection(name.lower().split("/"))
        if not parts or is_elsewhere or not isinstance(text, str):
            raise FolderError(
                f"the file {name!r} cannot be written: give a path within the folder, without '..', and a text"
            )
        place = folder
        for part in parts[:-1]:
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                place.unlink()
            place.mkdir(exist_ok=True)
        place = place / parts[-1]
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            place.chmod(place.stat().st_mode | stat.S_IXUSR)


def git(*arguments: str | Path, cwd: Path | None = None, boxed: Sequence[str] = ()) -> str:
    """Stdout, at most `MOST_OUTPUT` bytes of it, of a git that reads nobody's settings and runs nobody's hooks;
    `boxed`: words that run it in a box. Raises FolderError with what it says."""
    command = (*boxed, "git", *map(str, arguments))
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={"PATH": os.environ.get("PATH", os.defpath), **NOBODYS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except (OSError, ValueError) as error:
        raise FolderError(f"git cannot be run for a rollout's folder: {error}; install git") from error
    words = " ".join(command[-3:])
    with process, ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(stream.read, MOST_OUTPUT) for stream in (process.stdout, process.stderr) if stream]
        is_late = bool(wait(reading[:1], GIT_S).not_done)
        is_cut = not is_late and len(reading[0].result()) == MOST_OUTPUT
        if is_late or is_cut:
            process.kill()
    output, errors = (end.result().decode(errors="replace") for end in reading)
    if is_late:
        raise FolderError(f"git {words!r} took longer than {GIT_S:g} s in a rollout's folder; look at what lies in it")
    if process.returncode and not is_cut:
        raise FolderError(f"git {words!r} failed: {errors.strip()[-500:]}")
    return output
