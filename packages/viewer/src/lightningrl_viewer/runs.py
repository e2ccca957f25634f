"""Runs that a viewer shows: one that is open already, or those of a folder, opened when somebody looks; and the
removal of one, for good: what the run made goes, and what else lies in its folder stays.

a run of ours, and no link? ─► does nobody hold its lock? ─► schema, files by their names ─► run.json, .lock, folder

Forms of the folder of runs: tags and a note, and deletion, which a page asks about first.

runs/NAME/notes    the form ─► POST ─► notes.json ─► back to the list
runs/NAME/delete   what goes, and what stays ─► POST ─► back to the list
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from lightningrl.errors import LightningError, RunFolderError
from lightningrl.files import locked
from lightningrl_runs.belongings import remove_made
from lightningrl_runs.notes import RunNotes, read_notes, write_notes
from lightningrl_runs.origin import is_own
from lightningrl_runs.reader import open_run
from lightningrl_runs.runs import is_run
from lightningrl_runs.summary import is_live
from lightningrl_server.store.location import find_store, named_store
from lightningrl_viewer.page import NoSuchPage, PageView, ViewedRun

__all__ = ["FORMS", "Form", "OneFolder", "OneRun", "Runs", "RunsFolder", "remove_run"]

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


_LOCK_S: Final = 0.5
"""Seconds to wait for the lock: pages that ask whether the run is live hold it for a moment."""
_LAST: Final = ("run.json", ".lock")
"""Files by which a folder is known as a run's: they go when nothing else of it is left."""


def remove_run(folder: Path) -> list[str]:
    """Remove a run, also from its database; return the names of what else lies in its folder, and stays. Raises
    RunFolderError where it is no run of ours, or runs, and StoreError where its database is away."""
    if folder.is_symlink() or not is_run(folder) or not is_own(folder):
        raise RunFolderError(f"no run of ours in {str(folder)!r}, so nothing is deleted; name the folder of a run")
    try:
        with locked(folder / ".lock", wait_s=_LOCK_S):
            if not (store := find_store(folder)).startswith("sqlite"):
                from lightningrl_server.store.postgresql import drop_schema

                drop_schema(store, folder)
            remove_made(folder)
            left = sorted(path.name for path in folder.iterdir() if path.name not in _LAST)
            for name in _LAST:
                (folder / name).unlink(missing_ok=True)
        if not left:
            folder.rmdir()
    except BlockingIOError:
        raise RunFolderError(f"run {str(folder)!r} is training, so it is not deleted; stop it first (Ctrl-C)") from None
    except (OSError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else "folders are nested too deeply in it"
        raise RunFolderError(
            f"run {str(folder)!r} cannot be deleted: {problem}; make its folder writable, then delete it again"
        ) from error
    return left


_MOST_BYTES: Final = 64_000
_MOST_FIELDS: Final = 20
Form = Callable[[RunsFolder, Request, str], Awaitable[PageView | Response]]
"""Answers GET with a page and POST with a redirection; the text is the token that the form must carry."""


async def edit_notes(runs: RunsFolder, request: Request, token: str) -> PageView | Response:
    name = request.path_params["run"]
    folder = runs.place_of(name)
    if request.method == "POST":
        fields = await _read_fields(request, token)
        tags = fields.get("tags", "").replace(",", " ").split()
        await asyncio.to_thread(write_notes, folder, RunNotes.of(tags, fields.get("note", "")))
        return _back(request)
    notes = await asyncio.to_thread(read_notes, folder)
    return PageView("notes.html", title=f"Notes of {name}", name=name, notes=notes, token=token)


async def confirm_deletion(runs: RunsFolder, request: Request, token: str) -> PageView | Response:
    name = request.path_params["run"]
    folder = runs.place_of(name)
    if request.method == "POST":
        fields = await _read_fields(request, token)
        if fields.get("run") != name:
            raise RunFolderError(f"run {name[:100]!r} is not deleted: the form was of another; open its page again")
        left = await runs.remove(name)
        if left:
            others = f"{len(left)} more in its folder are not the run's and stay: {', '.join(left[:5])[:200]}"
            return PageView("error.html", title="Deleted", sentence=f"Run {name[:100]!r} is deleted; {others}.")
        return _back(request)
    files, size = await asyncio.to_thread(_measure, folder)
    return PageView(
        "delete.html", title=f"Delete {name}", name=name, token=token, files=files, bytes=size, is_live=is_live(folder)
    )


def _measure(folder: Path) -> tuple[int, int]:
    """Count the files below a folder, and their bytes; links are not followed."""
    sizes = [path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()]
    return len(sizes), sum(sizes)


async def _read_fields(request: Request, token: str) -> Mapping[str, str]:
    """Read a form. Raises LightningError where it is too long, or not one of these pages'."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise LightningError(f"the form is longer than {_MOST_BYTES:,} bytes; shorten the note")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise LightningError(f"the form cannot be read: {error}; open its page again") from None
    if not hmac.compare_digest(fields.get("token", [""])[0].encode(), token.encode()):
        raise NoSuchPage("the form is of another start of the viewer; open its page again")
    return {name: values[0] for name, values in fields.items()}


def _back(request: Request) -> Response:
    return RedirectResponse(request.scope.get("root_path", "") + "/", status_code=303)


FORMS: Final[Mapping[str, Form]] = {"notes": edit_notes, "delete": confirm_deletion}
"""Forms by their path below a run."""
