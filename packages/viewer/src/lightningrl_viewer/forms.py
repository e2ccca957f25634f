"""Forms of the folder of runs: tags and a note, and deletion, which a page asks about first.

runs/NAME/notes    the form ─► POST ─► notes.json ─► back to the list
runs/NAME/delete   what goes, and what stays ─► POST ─► back to the list
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from lightningrl.errors import LightningError, RunFolderError
from lightningrl_viewer.page import NoSuchPage, PageView
from lightningrl_viewer.reading.notes import RunNotes, read_notes, write_notes
from lightningrl_viewer.reading.summary import is_live
from lightningrl_viewer.runs import RunsFolder

__all__ = ["FORMS", "Form"]

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
