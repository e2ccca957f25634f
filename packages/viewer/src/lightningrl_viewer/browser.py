"""`lightningrl view`: a run's pages in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from lightningrl.console import cancel_on_signals
from lightningrl.errors import RunFolderError
from lightningrl_server.process import Server, bind
from lightningrl_server.store.location import has_store
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.pages import all_pages
from lightningrl_viewer.reading.origin import newest_run
from lightningrl_viewer.reading.runs import run_folders
from lightningrl_viewer.runs import OneFolder, RunsFolder

__all__ = ["view_command", "viewer_of"]


def view_command(folder: Path | None, *, runs: Path, port: int, browser: bool, may_write: bool = False) -> None:
    folder = folder or newest_run(runs)
    is_run = has_store(folder)
    if not is_run and not run_folders(folder):
        raise RunFolderError(f"no run in {str(folder)!r}, nor below it; name a run folder, or a folder of runs")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_view(folder, port, is_run=is_run, browser=browser, may_write=may_write))


async def _view(folder: Path, port: int, *, is_run: bool, browser: bool, may_write: bool) -> None:
    cancel_on_signals()
    key = secrets.token_urlsafe(24)
    async with viewer_of(folder, key, is_run=is_run, may_write=may_write) as app:
        listener = bind("127.0.0.1", port)
        link = f"http://127.0.0.1:{listener.getsockname()[1]}/?key={key}"
        console = Console()
        console.print(f"{folder}: {link}", highlight=False, soft_wrap=True)
        console.print("stop it with Ctrl-C", highlight=False)
        if browser:
            webbrowser.open(link)
        await Server(
            uvicorn.Config(app, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1)
        ).serve([listener])


@asynccontextmanager
async def viewer_of(folder: Path, key: str, *, is_run: bool, may_write: bool = False) -> AsyncIterator[ASGIApp]:
    """The application, which wants this key."""
    runs = OneFolder(folder) if is_run else RunsFolder(folder)
    try:
        if isinstance(runs, OneFolder):
            async with runs.viewed() as viewed:  # one that cannot be read is refused at once
                # The first look reads every rollout: now, and not for somebody's page.
                await viewed.run.queries.reward_values()
        yield create_viewer(runs, key=key, pages=all_pages(), may_write=may_write and os.access(folder, os.W_OK))
    finally:
        await runs.close()
