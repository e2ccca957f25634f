"""The viewer of a run that trains, in a real Chromium, while its server is killed; and a rollout whose texts attack the
page."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import LAUNCH, needs_chromium
from processes import TrainRun
from recorded import RECIPE, RecordedRun, play_rollout, write_recipe
from sizes import PATIENCE_S
from viewing import KEY
from warm import WarmCommand

from lightningrl_client.control.client import ServerClient
from lightningrl_runs.reader import open_run
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.runs import OneRun, RunsFolder

axe = pytest.importorskip(
    "axe_playwright_python.async_playwright", reason="axe-playwright-python is not installed: make test-browser"
)
async_api = pytest.importorskip(
    "playwright.async_api", reason="playwright is not installed: make test-browser installs it"
)

pytestmark = needs_chromium
LISTEN = "window.heard = []; document.addEventListener('news', (event) => window.heard.push(...event.detail.steps));"
SHOWS_STEPS = """(count) => [...document.querySelectorAll('.stat')].some(
    (stat) => stat.textContent.includes('Steps') && parseInt(stat.querySelector('.stat-value').textContent) >= count)"""
HIDDEN_ASIDE = """[...document.querySelectorAll('.scroll, main')]
    .filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => part.className || part.tagName)"""
ATTACK = (
    "</bdi></pre><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'><svg onload=window.hurt=3>"
    "\u202egnp.exe\x1b]0;mine\x07 \u0645\u0631\u062d\u0628\u0627 "
)


@asynccontextmanager
async def look_at(folder: Path) -> AsyncIterator[str]:
    """The folder's viewer, served on a loopback port."""
    async with open_run(folder) as run:
        viewed = ViewedRun(name="run", folder=folder, run=run)
        try:
            async with serving(create_viewer(OneRun(viewed), key=KEY)) as url:
                yield url
        finally:
            viewed.credit.close()


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(**LAUNCH)
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        yield page
        await browser.close()


@pytest.fixture
def training(warm: WarmCommand, first_agent: Path, tmp_path: Path) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    run.start(str(first_agent), "--steps", "24", "--set", "loop.tasks_per_step=4")
    yield run
    run.close()


async def test_a_page_hears_of_each_step_once_although_the_server_is_killed(page: Any, training: TrainRun) -> None:
    def link() -> str:
        found = re.search(r"look on: (http\S+)", training.console.read_text())
        return found[1] if found else ""

    await asyncio.to_thread(training.wait_for, lambda: bool(link()))
    await page.add_init_script(LISTEN)
    await page.goto(link())
    begun = await page.evaluate("Number(document.body.dataset.place.split('.')[0])")
    for count in (1, 2):
        await page.wait_for_function("(count) => window.heard.length >= count", arg=count)
        await asyncio.to_thread(
            training.wait_for, lambda: bool(training.children("server"))
        )  # it may be starting again
        (server,) = training.children("server")
        training.kill(server)
    await page.wait_for_function(SHOWS_STEPS, arg=3)  # while the server is there to ask
    assert await asyncio.to_thread(training.wait) == 0, training.describe()
    heard = await page.evaluate("window.heard")
    assert len(heard) > 2 and heard == list(range(begun + 1, begun + 1 + len(heard))), (
        "in order, none twice, none left out"
    )


async def test_what_a_policy_writes_runs_nothing_and_breaks_nothing(page: Any, tmp_path: Path) -> None:
    write_recipe(tmp_path, RECIPE)
    async with live_gateway(tmp_path) as server, ServerClient(server.url, server.run_key) as control:
        server.engine.tokenizer.save_pretrained(tmp_path / "policy")
        task = ATTACK + "A" * 1_000_000
        await play_rollout(
            server, control, "g000000-000", ("shopper", ATTACK + "A" * 5000), ("shopper", "fine"), task=task
        )
    async with look_at(tmp_path) as url:
        await page.goto(f"{url}/?key={KEY}")
        rollout = "/rollouts/g000000-000"
        for address in (rollout, f"{rollout}?view=tokens", f"{rollout}/text?part=task", "/groups/g000000"):
            await page.goto(url + address)
            assert await page.evaluate("[window.hurt ?? null, document.querySelectorAll('script').length]") == [None, 1]
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), (
                f"{address} is wider than its window"
            )
            assert await page.locator("main").count() == 1 and await page.locator("img").count() == 0
        await page.goto(url + rollout)
        assert r"\u202egnp.exe\x1b]0;mine\x07" in await page.locator(".turn.sampled .body").first.inner_text()


async def test_pages_of_failures_breaks_and_judges_have_no_serious_violation(
    page: Any, played_run: RecordedRun
) -> None:
    found = {}
    async with look_at(played_run.folder) as url:
        await page.goto(f"{url}/?key={KEY}")
        for address in (
            "/system",
            "/rollouts/g000000-000",
            "/rollouts/g000000-002",
            "/rollouts/g000003-000",
            "/groups/g000003",
            "/credit",
        ):
            await page.goto(url + address)
            violations = (await axe.Axe().run(page)).response["violations"]
            found[address] = [one["nodes"][0]["html"] for one in violations if one["impact"] in {"serious", "critical"}]
    assert not any(found.values()), found


async def test_on_a_phone_runs_and_recipe_show_all_they_say_without_scrolling_aside(
    page: Any, played_run: RecordedRun, tmp_path: Path
) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    shutil.copytree(played_run.folder, tmp_path / ("baseline-" * 4))
    runs = RunsFolder(tmp_path)
    try:
        async with serving(create_viewer(runs, key=KEY, may_write=True)) as url:
            await page.goto(f"{url}/?key={KEY}")
            for address in ("/", f"/runs/{'baseline-' * 4}/recipe"):
                await page.goto(url + address)
                assert await page.evaluate(HIDDEN_ASIDE) == [], address
            await page.goto(f"{url}/")
            edit = await page.locator("td.change a").bounding_box()
            assert edit["x"] + edit["width"] <= 390
    finally:
        await runs.close()


async def test_keys_lead_through_a_rollout(page: Any, played_run: RecordedRun) -> None:
    async with look_at(played_run.folder) as url:
        await page.goto(f"{url}/?key={KEY}")
        await page.goto(f"{url}/rollouts/g000000-000")
        for key, address in (
            ("]", "g000000-000?call=0#call-0"),
            ("]", "g000000-000?call=1#call-1"),
            ("[", "g000000-000?call=0#call-0"),
            ("t", "g000000-000?view=tokens&call=0"),
            ("]", "g000000-000?view=tokens&call=1#call-1"),
            ("t", "g000000-000?call=1#call-1"),
            ("p", "g000000-000?call=0#call-0"),
            ("n", "g000000-002"),
            ("h", "g000000-001"),
            ("l", "g000000-002"),
            ("x", "credit?rollout=g000000-002"),
        ):
            await page.keyboard.press(key)
            await page.wait_for_url(lambda url, address=address: url.endswith(f"/{address}"))
        await page.goto(f"{url}/rollouts/g000000-000?view=tokens")
        token = page.locator(".tokens .tok").first
        await token.focus()
        said = await token.evaluate("(element) => getComputedStyle(element, '::after').content")
        assert "mask 1" in json.loads(said)
