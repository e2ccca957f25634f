"""A rollout's own place on disk: its working folder, a HOME, the state that the work began with, for the diff.

ROOT                 one for each process that runs harnesses; guard.py removes it, however that process ends
└── 7                one for each rollout, removed after it
    ├── work         from a template folder or a git revision, and the task's files; a git repository of one commit
    ├── home         HOME, with .config, .cache, … below it; tmp beside it
    ├── start.git    the same commit, where the program does not look: what it is compared with
    └── log          stdout and stderr
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
from pathlib import Path
from typing import Any, Final, TypeVar

from lightningrl.errors import LightningError
from lightningrl_client.runtime.harnesses import guard

__all__ = ["FolderError", "Rollouts", "Room", "in_thread", "write_files"]

T = TypeVar("T")
GIT_S: Final = 120.0
LONGEST_DIFF: Final = 256 * 1024
"""Characters."""
WHO: Final = ("-c", "user.name=lightningrl", "-c", "user.email=lightningrl@localhost", "-c", "commit.gpgsign=false")


class FolderError(LightningError):
    """A rollout's folder cannot be made, or something in it cannot be read."""


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run it beside the event loop. One who is cancelled waits until it has ended: it works on a folder that goes."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Room:
    """One rollout's folders."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work, self.home, self.tmp = place / "work", place / "home", place / "tmp"
        self.start, self.log = place / "start.git", place / "log"

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
        for folder in (self.home, self.home / ".codex", self.tmp, self.log):
            folder.mkdir()
        if template is not None:
            shutil.copytree(template, self.work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        self.work.mkdir(exist_ok=True)
        if revision is not None:
            archive = self.place / "revision.tar"
            git(self.home, "-C", repository, "archive", "--format=tar", "-o", archive, "--end-of-options", revision)
            with tarfile.open(archive) as tar:
                tar.extractall(self.work, filter="tar")
            archive.unlink()
        write_files(self.work, files)
        git(self.home, "init", "--quiet", "--initial-branch=main", self.work)
        (self.work / ".git/info").mkdir(exist_ok=True)
        (self.work / ".git/info/exclude").write_text("".join(f"{pattern}\n" for pattern in exclude))
        git(self.home, "-C", self.work, "add", "--all")
        git(self.home, *WHO, "-C", self.work, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "start")
        shutil.copytree(self.work / ".git", self.start)

    def diff(self) -> str:
        """The work's difference from its start, new files included, at most `LONGEST_DIFF` characters. Raises
        FolderError."""
        state = ("--git-dir", self.start, "--work-tree", self.work)
        git(self.home, *state, "add", "--all", cwd=self.work)
        text = git(
            self.home, *state, "diff", "--cached", "--no-color", "--no-ext-diff", "--no-renames", "HEAD", cwd=self.work
        )
        if len(text) <= LONGEST_DIFF:
            return text
        return f"{text[:LONGEST_DIFF]}\n... the diff was cut at {LONGEST_DIFF} of {len(text)} characters\n"

    def used_bytes(self) -> int:
        """Bytes that its files take on the disk."""
        total = 0
        for folder, _, names in os.walk(self.place):
            for name in names:
                with contextlib.suppress(OSError):  # it has gone meanwhile
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
        return total


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
        if not parts or Path(name).is_absolute() or {"..", ".git"}.intersection(parts) or not isinstance(text, str):
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


def git(home: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Stdout of a git that reads nobody's settings. Raises FolderError with what it says."""
    command = ("git", *map(str, arguments))
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FolderError(f"git cannot be run for a rollout's folder: {error}; install git") from error
    if done.returncode:
        words = " ".join(command[-3:])
        raise FolderError(f"git {words!r} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode(errors="replace")
