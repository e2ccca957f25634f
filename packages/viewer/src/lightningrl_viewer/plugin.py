"""The viewer as a plugin: its commands, and the pages that a live run's server mounts at /view."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightningrl.plugins import Plugin, hookimpl

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lightningrl_server.mounts import ServedRun

__all__ = ["create_pages", "lightningrl_commands", "lightningrl_pages"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_viewer.commands import COMMANDS

    yield from COMMANDS


@hookimpl
def lightningrl_pages() -> Iterable[Plugin]:
    yield Plugin(
        name="view", summary="a running run's pages: its curves, rollouts, credit and system", factory=create_pages
    )


def create_pages(*, run: ServedRun) -> ASGIApp:
    """The pages of one run, for whoever shows its view key."""
    from lightningrl_runs.reader import StoredRun
    from lightningrl_viewer.app import create_viewer
    from lightningrl_viewer.page import ViewedRun
    from lightningrl_viewer.pages import all_pages
    from lightningrl_viewer.runs import OneRun

    stored = StoredRun(run.store, run.tokenizer_of)
    viewed = ViewedRun(name=run.folder.name, folder=run.folder, run=stored, live=run.live)
    return create_viewer(OneRun(viewed), key=run.view_key, pages=all_pages())
