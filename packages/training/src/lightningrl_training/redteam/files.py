"""Files that a reward reads and that an agent could have written: verdicts in temporary folders, or in files that do
not exist yet."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lightningrl_credit.rewards.processes import is_function_process

__all__ = ["FORGERIES", "WatchedReward", "forged", "is_async", "is_watchable", "reachable"]

TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
FORGERIES: Final = ("1", "1.0", '{"reward": 1.0, "score": 1.0, "success": true, "passed": true}', "pass", "{gold}")
"""Texts that an agent would write there."""


class WatchedReward:
    """A sync reward whose process notes the files that it opens."""

    _watching: list[set[tuple[str, bool]]] = []  # noqa: RUF012  of a process: audit hooks stay
    _is_hooked: list[bool] = []  # noqa: RUF012

    def __init__(self, function: Callable[..., Any], log: Path) -> None:
        self.function = function
        self.log = log

    def __call__(self, task: Any, output: Any, trajectory: Any, /) -> Any:
        if is_function_process() and not self._is_hooked:
            _be_silent()
        opened: set[tuple[str, bool]] = set()
        if not self._is_hooked:
            self._is_hooked.append(True)
            sys.addaudithook(self._note)
        self._watching.append(opened)
        try:
            return self.function(task, output, trajectory)
        finally:
            self._watching.remove(opened)
            written = {path for path, is_written in opened if is_written}
            read = sorted({path for path, is_written in opened if not is_written} - written)
            with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
                log.writelines(json.dumps(path) + "\n" for path in read)

    @classmethod
    def _note(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not cls._watching or not isinstance(arguments[0], str | bytes):
            return
        path, mode, flags = arguments
        is_written = any(letter in str(mode or "") for letter in "wax+") or bool(
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        for opened in cls._watching:
            opened.add((os.path.abspath(os.fsdecode(path)), is_written))  # noqa: PTH100  no file is looked up


def _be_silent() -> None:
    """Write nothing to the terminal: attacks make a reward's helpers print what they cannot read."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def is_async(function: Any) -> bool:
    """True for a coroutine function, or an object that is called as one: such a reward asks somebody, as a rule."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_watchable(function: Any) -> bool:
    """True for a function of the user's that runs in a process of its own."""
    is_ours = type(function).__module__.startswith("lightningrl_")
    return sys.platform == "linux" and not is_async(function) and not is_ours


def reachable(log: Path, folder: Path) -> list[Path]:
    """Files that several calls read and that an agent can write before: in a temporary folder, or not there yet where
    agents are at home. `folder`: the recipe's."""
    if not log.exists():
        return []
    temporary = {Path(place).resolve() for place in (tempfile.gettempdir(), *TEMPORARY)}
    reads = Counter(Path(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines())
    within_reach = []
    for path in sorted(path for path, count in reads.items() if count > 1):
        above = set(path.resolve().parents)
        if path.suffix in (".pyc", ".py", ".so") or path.is_dir() or log.parent in path.parents:
            continue
        is_foreign = bool(temporary & above) and folder.resolve() not in above
        is_missing = (
            not path.exists() and path.parent.is_dir() and bool((temporary | {Path.cwd(), folder.resolve()}) & above)
        )
        if is_missing or (is_foreign and path.is_file() and os.access(path, os.W_OK)):
            within_reach.append(path)
    return within_reach


@contextmanager
def forged(path: Path, text: str) -> Iterator[bool]:
    """Write a file where none is, for a while. Yields False where there is one, which stays as it is."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
