"""Who may look at a run's pages: somebody on this machine with the view key, and nobody from elsewhere, whatever a
browser is told."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from lightningrl.keys import view_key, worker_key
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_viewer.guard import Guard
from lightningrl_viewer.plugin import create_pages

ROOT = Path(__file__).parents[3]
RUN_KEY = "the-run-key"
KEY = view_key(RUN_KEY)


@asynccontextmanager
async def browsing(
    folder: Path, *, host: str = "127.0.0.1:8000", client: str = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser before a live run's server."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    await store.create_rollouts([make_spec("a")])
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, folder=folder, mounts={"view": create_pages})
    transport = httpx.ASGITransport(app, client=(client, 5))
    try:
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as browser:
            yield browser
    finally:
        await store.close()


async def enter(browser: httpx.AsyncClient, path: str = "/view/") -> httpx.Response:
    return await browser.get(path, params={"key": KEY})


async def test_the_key_is_exchanged_once_for_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        answer = await browser.get("/view/rollouts", params={"key": KEY, "step": "3"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/view/rollouts?step=3")
        (cookie,) = answer.headers.get_list("set-cookie")
        assert {"HttpOnly", "SameSite=strict", "Path=/view"} <= set(cookie.split("; "))
        assert KEY not in cookie
        page = await browser.get(answer.headers["location"])
        assert page.status_code == 200 and KEY not in page.text


async def test_nothing_is_shown_without_the_key_or_with_another(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        for path in ("/view/", "/view/rollouts", "/view/static/x/style.css", "/view/nowhere"):
            refused = await browser.get(path)
            assert refused.status_code == 403 and "open the link" in refused.text
        for key in ("", "x", RUN_KEY, worker_key(RUN_KEY), "ü"):
            refused = await browser.get("/view/", params={"key": key})
            assert refused.status_code == 403 and "set-cookie" not in refused.headers
        forged = {"cookie": f"{Guard(Starlette(), key=KEY).cookie}=0; other=1"}
        assert (await browser.get("/view/", headers=forged)).status_code == 403


async def test_the_view_key_opens_pages_and_nothing_else(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        await enter(browser)
        for headers in ({}, {"authorization": f"Bearer {KEY}"}):
            assert (await browser.get("/api/v1/rollouts", headers=headers)).status_code == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_pages_only_show(tmp_path: Path, method: str) -> None:
    async with browsing(tmp_path) as browser:
        await enter(browser)
        assert (await browser.request(method, "/view/rollouts")).status_code == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7:8000", "localhost.evil.example:80"]
)
async def test_a_name_that_was_pointed_at_this_machine_is_refused(tmp_path: Path, host: str) -> None:
    async with browsing(tmp_path, host=host) as browser:
        refused = await enter(browser)
        assert refused.status_code == 403 and "this machine only" in refused.text


@pytest.mark.parametrize("host", ["localhost:8000", "[::1]:8000", "127.0.0.1"])
async def test_every_name_of_this_machine_is_answered(tmp_path: Path, host: str) -> None:
    async with browsing(tmp_path, host=host) as browser:
        assert (await enter(browser)).status_code == 303
        assert (await browser.get("/view/")).status_code == 200


async def test_a_run_whose_workers_are_elsewhere_shows_its_pages_here_alone(tmp_path: Path) -> None:
    async with browsing(tmp_path, client="10.0.0.9") as browser:
        assert (await enter(browser)).status_code == 403
    async with browsing(tmp_path, client="::ffff:127.0.0.1") as browser:
        assert (await enter(browser)).status_code == 303


async def test_a_page_of_another_site_can_not_ask(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        await enter(browser)
        strangers = (
            {"origin": "https://evil.example"},
            {"origin": "http://127.0.0.1:9999"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
            {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        )
        for headers in strangers:
            assert (await browser.get("/view/", headers=headers)).status_code == 403, headers
        own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
        assert (await browser.get("/view/", headers=own)).status_code == 200


async def test_every_answer_says_what_a_browser_may_do(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        answers = [
            await browser.get("/view/"),
            await enter(browser),
            await browser.get("/view/"),
            await browser.get("/view/nowhere"),
        ]
        style = re.search(r'href="(/view/static/\S+?style\.css)"', answers[2].text)
        assert style is not None
        answers.append(await browser.get(style[1]))
    assert [answer.status_code for answer in answers] == [403, 303, 200, 404, 200]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == (
            "nosniff",
            "same-origin",
        )
    assert answers[2].headers["cache-control"] == "no-store"
    for page in (answers[2].text, answers[3].text):
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style", page), "the policy would forbid it"


async def test_files_beside_the_static_ones_are_not_served(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        await enter(browser)
        for name in ("..%2ftemplates.py", "..%2f..%2fkeys.py", "style.css%00", "nothing"):
            assert (await browser.get(f"/view/static/1/{name}")).status_code == 404, name


async def test_two_runs_on_one_machine_do_not_share_a_cookie(tmp_path: Path) -> None:
    async with browsing(tmp_path) as browser:
        cookie = (await enter(browser)).headers["set-cookie"].partition("=")[0]
    assert cookie != Guard(Starlette(), key=view_key("another")).cookie


@pytest.mark.parametrize(
    ("mounts", "there"), [({"view": create_pages}, "its pages are at /view"), ({}, "it has no pages")]
)
async def test_the_server_answers_its_address_with_a_sentence_with_and_without_pages(
    mounts: Any, there: str, tmp_path: Path
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    transport = httpx.ASGITransport(
        create_app(store, EngineRegistry(), run_key=RUN_KEY, folder=tmp_path, mounts=mounts)
    )
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as browser:
            answer = await browser.get("/")
            assert (
                answer.text
                == f"This is the server of a LightningRL run: {there}, and its API is described at /openapi.json.\n"
            )
            assert (await browser.get("/openapi.json")).json()["openapi"] == "3.1.0"
            assert (await browser.get("/view/")).status_code == (403 if mounts else 404)
    finally:
        await store.close()


async def test_pages_of_another_package_are_mounted_beside_the_viewer(tmp_path: Path) -> None:
    blocks = (ROOT / "docs" / "how-to" / "plugins" / "pages.md").read_text(encoding="utf-8").split("```")
    plugin: dict[str, Any] = {"__name__": "lightningrl_states.plugin"}
    exec(next(block for block in blocks if block.startswith("python")).partition("\n")[2], plugin)
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    await store.create_rollouts([make_spec("a")])
    mounts = {page.name: page.build for page in plugin["lightningrl_pages"]()} | {"view": create_pages}
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, folder=tmp_path, mounts=mounts)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as browser:
            assert (await browser.get("/states", params={"key": KEY}, follow_redirects=True)).json() == {"queued": 1}
            assert (await browser.get("/states/", params={"key": RUN_KEY})).status_code == 403
            assert "pages are at /states, /view" in (await browser.get("/")).text
    finally:
        await store.close()
