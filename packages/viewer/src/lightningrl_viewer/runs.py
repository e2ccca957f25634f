"""Runs that a viewer shows: one that is open already, or those of a folder, opened when somebody looks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote

from lightningrl_server.store.location import named_store
from lightningrl_viewer.page import NoSuchPage, ViewedRun
from lightningrl_viewer.reading.reader import open_run
from lightningrl_viewer.reading.runs import is_run
from lightningrl_viewer.removal import remove_run

__all__ = ["OneFolder", "OneRun", "Runs", "RunsFolder"]

_MOST_OPEN: Final = 8


class OneRun:
    """A run whose reader is open."""

    def __init__(self, viewed: ViewedRun) -> None:
        self._viewed = viewed

    @asynccontextmanager
    async def viewed(self, _: str) -> AsyncIterator[ViewedRun]:
        yield self._viewed


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenRun:
    stack: AsyncExitStack
    viewed: ViewedRun
    store: Hashable
    """File that it was read from."""
    users: int = 0


class OneFolder:
    """A run that is read from its folder, and opened anew where another run was written over it."""

    def __init__(self, folder: Path, *, home: str = "") -> None:
        self._folder = folder
        self._home = home
        self._open: _OpenRun | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def viewed(self, _: str = "") -> AsyncIterator[ViewedRun]:
        """Open the run. Raises RunFolderError where no run lies there any more."""
        async with self._lock:
            if self._open is None or self._open.store != _store_of(self._folder):
                left, self._open = self._open, None
                if left is not None and not left.users:  # else the last who looks at it closes it
                    await left.stack.aclose()
                self._open = await self._enter()
            opened = self._open
            opened.users += 1
        try:
            yield opened.viewed
        finally:
            opened.users -= 1
            if opened is not self._open and not opened.users:
                await opened.stack.aclose()

    async def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.stack.aclose()

    async def retire(self) -> None:
        """Close it once nobody looks at it any more."""
        async with self._lock:
            opened, self._open = self._open, None
            if opened is not None and not opened.users:
                await opened.stack.aclose()

    async def _enter(self) -> _OpenRun:
        store, stack = _store_of(self._folder), AsyncExitStack()
        run = await stack.enter_async_context(open_run(self._folder))
        viewed = ViewedRun(name=self._folder.absolute().name, folder=self._folder, run=run, home=self._home)
        stack.callback(viewed.credit.close)
        return _OpenRun(stack=stack, viewed=viewed, store=store)


class RunsFolder:
    """Runs below a folder. The ones looked at last stay open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: OrderedDict[str, OneFolder] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def viewed(self, name: str) -> AsyncIterator[ViewedRun]:
        """Open a run. Raises NoSuchPage where no run of that name lies here."""
        async with self._lock:
            if name not in self._runs:
                await self._add(name)
            self._runs.move_to_end(name)
            self._users[name] = self._users.get(name, 0) + 1
        try:
            async with self._runs[name].viewed() as viewed:
                yield viewed
        finally:
            self._users[name] -= 1

    async def close(self) -> None:
        while self._runs:
            await self._runs.popitem()[1].close()

    def place_of(self, name: str) -> Path:
        """Return a run's folder. Raises NoSuchPage where no run of that name lies here."""
        folder = self.folder / name
        if name in {"", ".", ".."} or "/" in name or not is_run(folder):
            raise NoSuchPage(f"there is no run {name[:100]!r} in {str(self.folder)!r}; choose one of the list")
        return folder

    async def remove(self, name: str) -> list[str]:
        """Delete a run; return the names of what else lies in its folder, and stays. Raises NoSuchPage, RunFolderError
        and StoreError."""
        async with self._lock:
            left = await asyncio.to_thread(remove_run, self.place_of(name))
            if (opened := self._runs.pop(name, None)) is not None:
                await opened.retire()
            return left

    async def _add(self, name: str) -> None:
        folder = self.place_of(name)
        for idle in [known for known in self._runs if not self._users.get(known)][
            : max(0, len(self._runs) + 1 - _MOST_OPEN)
        ]:
            await self._runs.pop(idle).close()
        self._runs[name] = OneFolder(folder, home=f"/runs/{quote(name, safe='')}")


Runs: TypeAlias = OneRun | OneFolder | RunsFolder


def _store_of(folder: Path) -> Hashable:
    """Return what changes where another run was written over it: the file that is open keeps its number."""
    path = folder / "store.sqlite"
    return named_store(folder), path.stat().st_ino if path.is_file() else None
