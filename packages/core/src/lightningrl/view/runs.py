"""Which runs a viewer shows: one that is open already, or those of a folder, opened when somebody looks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from lightningrl.look.reader import open_run
from lightningrl.look.runs import is_run
from lightningrl.view.page import NoSuchPage, ViewedRun

__all__ = ["OneRun", "RunsFolder"]

_MOST_OPEN: Final = 8


class OneRun:
    """A run whose reader is open."""

    def __init__(self, viewed: ViewedRun) -> None:
        self._viewed = viewed

    @asynccontextmanager
    async def viewed(self, _: str) -> AsyncIterator[ViewedRun]:
        yield self._viewed


class RunsFolder:
    """Runs below a folder. The ones looked at last stay open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, tuple[AsyncExitStack, ViewedRun]] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def viewed(self, name: str) -> AsyncIterator[ViewedRun]:
        """Raises NoSuchPage where no run of that name lies here."""
        async with self._lock:
            if name not in self._open:
                await self._enter(name)
            self._open.move_to_end(name)
            self._users[name] = self._users.get(name, 0) + 1
        try:
            yield self._open[name][1]
        finally:
            self._users[name] -= 1

    async def close(self) -> None:
        while self._open:
            await self._open.popitem()[1][0].aclose()

    async def _enter(self, name: str) -> None:
        folder = self.folder / name
        if name in {"", ".", ".."} or "/" in name or not is_run(folder):
            raise NoSuchPage(f"there is no run {name[:100]!r} in {str(self.folder)!r}; choose one of the list")
        for idle in [known for known in self._open if not self._users.get(known)][: max(0, len(self._open) + 1 - _MOST_OPEN)]:
            await self._open.pop(idle)[0].aclose()
        stack = AsyncExitStack()
        run = await stack.enter_async_context(open_run(folder))
        viewed = ViewedRun(name=name, folder=folder, run=run, home=f"/runs/{name}")
        stack.callback(viewed.credit.close)
        self._open[name] = stack, viewed
