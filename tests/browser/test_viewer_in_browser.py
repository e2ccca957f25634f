"""The viewer in a real headless Chromium: every page, the keyboard walk, an interval dragged, axe, and the pictures of docs/viewing.md.

make test-browser             PICTURES=1 make test-browser   writes the pictures anew
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import LAUNCH, needs_chromium
from sizes import PATIENCE_S

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed: make test-browser")

pytestmark = needs_chromium
RUN_PAGES = (
    *("/", "/rollouts", "/rollouts?mode=validation&reward=0.0", "/rollouts?sort=newest&step=2", "/rollouts?peek=ROLLOUT"),
    *("/rollouts/ROLLOUT", "/rollouts/ROLLOUT?view=tokens", "/groups/GROUP"),
    *("/credit", "/credit?step=1", "/credit?group=GROUP", "/credit?rollout=ROLLOUT", "/system", "/recipe", "/nowhere"),
)


class Viewer:
    """`lightningrl view`, and the browser that looks."""

    def __init__(self, link: str, browser: Any) -> None:
        self.link = link
        self.url = link.partition("/?key=")[0]
        self._browser = browser
        self.problems: list[str] = []

    def open(self, path: str, *, dark: bool = False, width: int = 1280, height: int = 800, script: bool = True) -> Any:
        """A page in a window of its own, let in."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", java_script_enabled=script
        )
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._listen)
        page.goto(self.link)
        if path != "/":
            page.goto(self.url + path)
        return page

    def _listen(self, said: Any) -> None:
        if said.type in {"error", "warning"} and "404" not in said.text:
            self.problems.append(said.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(**LAUNCH)
        yield running
        running.close()


@pytest.fixture(scope="module")
def viewer(recorded_run: Path, browser: Any) -> Iterator[Viewer]:
    yield from serve(recorded_run, browser)


@pytest.fixture(scope="module")
def several(recorded_run: Path, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("several")
    for name in ("first-a", "first-b"):
        shutil.copytree(recorded_run, folder / name, ignore=shutil.ignore_patterns("checkpoints"))
    yield from serve(folder, browser)


def serve(folder: Path, browser: Any) -> Iterator[Viewer]:
    command = [sys.executable, "-m", "lightningrl.cli", "view", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = re.search(r"http://\S+", process.stdout.readline())
            assert link is not None
            viewer = Viewer(link[0], browser)
            yield viewer
            assert not viewer.problems
        finally:
            process.terminate()


def serious(page: Any) -> list[str]:
    """What axe finds that keeps somebody out."""
    found = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in {"serious", "critical"}]


def first_rollout(viewer: Viewer) -> str:
    page = viewer.open("/rollouts")
    name = str(page.locator("tr[data-row] a[data-open]").first.inner_text())
    page.context.close()
    return name


@pytest.mark.parametrize("path", RUN_PAGES)
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_a_page_has_no_serious_violation_and_fits_its_window(viewer: Viewer, path: str, look: str) -> None:
    if "ROLLOUT" in path or "GROUP" in path:
        rollout = first_rollout(viewer)
        path = path.replace("ROLLOUT", rollout).replace("GROUP", rollout.partition("-")[0])
    page = viewer.open(path, dark=look == "dark", width=390 if look == "phone" else 1280)
    assert serious(page) == []
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "the page is wider than its window"
    page.context.close()


def test_the_folder_of_runs_and_a_comparison(several: Viewer) -> None:
    page = several.open("/")
    assert serious(page) == []
    for box in page.locator("input[name=compare]").all():
        box.check()
    page.keyboard.press("c")
    page.wait_for_selector("svg.chart")
    assert page.url.count("compare=") == 2 and serious(page) == []
    page.get_by_role("link", name="first-a").first.click()
    page.wait_for_selector("h1:has-text('first-a')")
    page.keyboard.press("g")
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Runs')")


def test_the_key_leaves_the_address_bar(viewer: Viewer) -> None:
    page = viewer.open("/")
    assert page.url == viewer.url + "/" and "key" not in page.evaluate("document.cookie")


def test_the_keyboard_leads_through_the_rollouts(viewer: Viewer) -> None:
    page = viewer.open("/")
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_url("**/rollouts")
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    rows = page.locator("tr[data-row]")
    second = rows.nth(1).locator("a[data-open]").inner_text()
    assert page.locator("tr.at a[data-open]").inner_text() == second
    page.keyboard.press("Space")
    page.wait_for_selector(f"#peek h2:has-text('{second}')")
    assert f"peek={second}" in page.url
    third = rows.nth(2).locator("a[data-open]").inner_text()
    page.keyboard.press("j")
    page.wait_for_selector(f"#peek h2:has-text('{third}')")
    page.reload()
    page.wait_for_selector(f"#peek h2:has-text('{third}')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#peek [data-close]", state="detached")
    assert "peek=" not in page.url
    page.keyboard.press("/")
    page.keyboard.type("v000003")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=v000003**")
    page.keyboard.press("?")
    said = page.locator("#keys").inner_text()
    assert "next, previous" in said and "Search by id or task" in said
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_url("**/rollouts")


def test_every_key_has_something_to_click(viewer: Viewer) -> None:
    for path in ("/", "/rollouts?sort=newest&step=1"):
        page = viewer.open(path)
        for element in page.locator("[data-key]").all():
            assert element.is_visible() and (element.inner_text() or element.get_attribute("aria-label")), element
        page.context.close()


def test_an_interval_dragged_on_the_chart_leads_to_its_rollouts(viewer: Viewer) -> None:
    page = viewer.open("/")
    box = page.locator("svg.chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.9)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5, steps=4)
    page.mouse.up()
    page.wait_for_url("**/rollouts?mode=train&from=*&to=*")
    steps = re.search(r"from=(\d+)&to=(\d+)", page.url)
    assert steps is not None and (int(steps[1]), int(steps[2])) in {(1, 2), (2, 2)}
    assert page.locator("tr[data-row]").count()


def test_dark_and_light_are_kept(viewer: Viewer) -> None:
    page = viewer.open("/")
    before = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    page.get_by_role("button", name="Dark or light").click()
    page.goto(viewer.url + "/rollouts")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor") != before


def test_pages_work_without_a_script(viewer: Viewer) -> None:
    page = viewer.open("/", script=False)
    page.get_by_role("link", name="Rollouts", exact=True).click()
    page.locator("a.peek-link").first.click()
    assert page.locator("#peek h2").is_visible()
    page.locator("#peek [data-close]").click()
    assert not page.locator("#peek h2").count()
    page.locator(".facet a", has_text="validation").first.click()
    assert "mode=validation" in page.url and not page.get_by_role("button", name="Keys").is_visible()
