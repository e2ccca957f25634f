"""Pages of the viewer that other packages bring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.errors import PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl
from lightningrl.records import RolloutFilter
from lightningrl_viewer import pages
from lightningrl_viewer.app import viewer_of


class Brings:
    """A package that brings one page."""

    def __init__(self, name: str, show: Callable[[Any], Any]) -> None:
        self._record = Plugin(name=name, summary="My tasks", factory=lambda: show)

    @hookimpl
    def lightningrl_view_pages(self) -> list[Plugin]:
        return [self._record]


@asynccontextmanager
async def browsing(folder: Path, plugin: Brings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    manager = PluginManager()
    manager.register(plugin, distribution="mine 0.1")
    monkeypatch.setattr(pages, "load_plugins", lambda: manager)
    async with viewer_of(folder, "key", is_run=True) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", follow_redirects=True
        ) as browser:
            assert (await browser.get("/?key=key")).status_code == 200
            yield browser


async def test_a_page_of_another_package_is_in_the_navigation_and_shows_the_run(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def show(run: Any) -> str:
        rollouts = await run.list_rollouts(RolloutFilter(limit=3))
        return f"<p>{len(rollouts)} rollouts</p>"

    async with browsing(recorded_run, Brings("my-tasks", show), monkeypatch) as browser:
        page = await browser.get("/my-tasks")
        assert page.status_code == 200
        assert "<p>3 rollouts</p>" in page.text
        assert '<a href="/my-tasks">My tasks</a>' in (await browser.get("/")).text


async def test_a_page_that_raises_is_named_with_its_distribution(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def show(run: Any) -> str:
        raise ValueError("no such column")

    async with browsing(recorded_run, Brings("broken", show), monkeypatch) as browser:
        page = await browser.get("/broken")
        assert page.status_code == 503
        assert "mine 0.1 raised ValueError: no such column" in page.text
        assert (await browser.get("/")).status_code == 200


@pytest.mark.parametrize("path", ["rollouts", "Rollouts!", "a/b", "system"])
async def test_a_path_that_is_taken_or_none_is_refused(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def show(run: Any) -> str:
        return ""

    with pytest.raises(PluginError, match="cannot be the path of a page of the viewer; use another"):
        async with browsing(recorded_run, Brings(path, show), monkeypatch):
            pass
