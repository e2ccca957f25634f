"""The viewer in a real headless Chromium (`make test-browser`): every page of a run that has ended and of one that
trains, the keyboard walk, an interval dragged, axe. `scripts/draw_pages.py` draws the pictures of docs/how-to/viewing.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from chromium import LAUNCH, needs_chromium
from processes import TrainRun
from sizes import PATIENCE_S
from warm import WarmCommand

from lightningrl_runs.metrics import read_metrics

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser installs it"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed: make test-browser"
)

pytestmark = needs_chromium
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text_to_sql"
RUN_PAGES = (
    *(
        "/",
        "/rollouts",
        "/rollouts?mode=validation&reward=0.0",
        "/rollouts?sort=newest&step=2",
        "/rollouts?peek=ROLLOUT",
    ),
    *("/rollouts/ROLLOUT", "/rollouts/ROLLOUT?view=tokens", "/groups/GROUP"),
    *("/?smooth=much", "/rollouts?sort=task", "/recipe?show=all"),
    *("/credit", "/credit?step=1", "/credit?group=GROUP", "/credit?rollout=ROLLOUT", "/system", "/recipe", "/nowhere"),
)


class Viewer:
    """`lightningrl view`, and the browser that looks."""

    def __init__(self, link: str, browser: Any, folder: Path) -> None:
        self.link = link
        self.metrics = folder / "metrics.jsonl"
        self.url = link.partition("/?key=")[0]
        self._browser = browser
        self._cookies: Any = None
        self.problems: list[str] = []

    def open(self, path: str, *, dark: bool = False, width: int = 1280, height: int = 800, script: bool = True) -> Any:
        """A page in a window of its own, let in: the first page by the link, others by the cookie that it gave."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
            storage_state=None if path == "/" else self._cookies,
        )
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._listen)
        if path == "/" or self._cookies is None:
            page.goto(self.link)
            self._cookies = context.storage_state()
        if path != "/":
            page.goto(self.url + path)
        return page

    @cached_property
    def rollout(self) -> str:
        """One that was trained."""
        page = self.open("/rollouts?step=1&mode=train")
        name = str(page.locator("tr[data-row] a[data-open]").first.inner_text())
        page.context.close()
        return name

    def pages(self) -> Iterator[str]:
        """The addresses of all pages."""
        for path in RUN_PAGES:
            yield self.fill(path)

    def fill(self, path: str) -> str:
        if "ROLLOUT" not in path and "GROUP" not in path:
            return path
        return path.replace("ROLLOUT", self.rollout).replace("GROUP", self.rollout.partition("-")[0])

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


@pytest.fixture(scope="module")
def text_to_sql(warm: WarmCommand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainRun]:
    """The example, small, after its second step; it goes on until it is killed."""
    folder = tmp_path_factory.mktemp("text_to_sql")
    run = TrainRun(warm, folder / "run", folder / "journal")
    try:
        settings = {"loop.tasks_per_step": 4, "loop.group_size": 4, "validation.tasks": 16, "runtime.workers": 1}
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        run.start(str(EXAMPLE), "--steps", "10000", *given)
        metrics = run.folder / "metrics.jsonl"
        run.wait_for(lambda: metrics.is_file() and any(row["step"] == 2 for row in read_metrics(metrics)))
        yield run
    finally:
        run.close()


def serve(folder: Path, browser: Any) -> Iterator[Viewer]:
    command = [sys.executable, "-m", "lightningrl", "view", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = re.search(r"http://\S+", process.stdout.readline())
            assert link is not None
            viewer = Viewer(link[0], browser, folder)
            yield viewer
            assert not viewer.problems
        finally:
            process.terminate()


def serious(page: Any) -> list[str]:
    """What axe finds that keeps somebody out."""
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in {"serious", "critical"}
    ]


@pytest.mark.parametrize("path", RUN_PAGES)
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_a_page_has_no_serious_violation_and_fits_its_window(viewer: Viewer, path: str, look: str) -> None:
    page = viewer.open(viewer.fill(path), dark=look == "dark", width=390 if look == "phone" else 1280)
    assert serious(page) == []
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "the page is wider than its window"
    page.context.close()


def test_text_to_sql_while_it_trains_and_after_it_was_killed(text_to_sql: TrainRun, browser: Any) -> None:
    link = re.search(r"look on: (http\S+)", text_to_sql.console.read_text())
    assert link is not None
    live = Viewer(link[1], browser, text_to_sql.folder)
    assert_all_pages_are_well(live, says="live")
    text_to_sql.wait_for(lambda: True)  # it trained all the while
    text_to_sql.close()
    for dead in serve(text_to_sql.folder, browser):
        assert_all_pages_are_well(dead, says="ended")


def assert_all_pages_are_well(viewer: Viewer, *, says: str) -> None:
    found: dict[str, Any] = {}
    for path in viewer.pages():
        page = viewer.open(path)
        is_there = path == "/nowhere" or page.title().partition(" ·")[0] not in {"Not found", "Not readable"}
        found[path] = serious(page) if is_there else page.locator("main").inner_text()
        if path == "/":
            assert page.locator("main .badge").first.inner_text() == says
            assert_run_page_tells(page, is_live=says == "live")
        page.context.close()
    assert {path: problem for path, problem in found.items() if problem} == {}
    assert not viewer.problems


def assert_run_page_tells(page: Any, *, is_live: bool) -> None:
    """The page of a run has curves, hints, progress, and what is left of it where it is live."""
    drawn = page.locator(".mini-card figcaption").all_inner_texts()
    for title in ("Loss", "KL to the sampler", "Gradient norm", "Learning rate", "Entropy", "Tokens of a rollout"):
        assert any(title in caption for caption in drawn), title
    for title in ("Tokens a second", "Memory"):
        assert any(title in caption for caption in drawn), title
    progress = page.locator(".progress").inner_text()
    assert "of 10,000 steps" in progress and (" left" in progress) is is_live
    assert ("--resume" in progress) is not is_live


def test_curves_are_smoothed_say_the_value_below_the_pointer_and_what_they_mean(viewer: Viewer) -> None:
    page = viewer.open("/")
    card = page.locator(".mini-card", has_text="Entropy")
    tip = card.locator(".tip")
    assert not tip.is_visible()
    card.locator(".hinted").hover()
    assert tip.is_visible() and "learn/entropy" in tip.inner_text() and "Healthy:" in tip.inner_text()
    before = card.locator("output").inner_text()
    card.locator("svg").hover()
    said = card.locator("output").inner_text()
    entropies = {row["step"]: row["learn/entropy"] for row in read_metrics(viewer.metrics) if "learn/entropy" in row}
    number, value = re.fullmatch(r"step (\d+): ([\d.]+)", said).groups()  # type: ignore[union-attr]
    assert float(value) == pytest.approx(entropies[int(number)], rel=0.02)
    page.mouse.move(0, 0)
    assert card.locator("output").inner_text() == before
    page.get_by_role("group", name="Smoothing").get_by_role("link", name="much").click()
    page.wait_for_url("**/?smooth=much*")
    assert page.locator("path.raw").count() > 5
    page.keyboard.press("Tab")
    page.context.close()


def test_a_group_and_a_table_fit_a_phone_with_what_matters(viewer: Viewer) -> None:
    page = viewer.open("/rollouts", width=390)
    row = page.locator("tr[data-row]").first
    for part in ("output", "answer", "reward"):
        cell = row.locator(f"td.{part}").bounding_box()
        assert cell["width"] > 20 and cell["x"] + cell["width"] <= 390, part
    page.goto(viewer.url + viewer.fill("/groups/GROUP"))
    boxes = [card.bounding_box() for card in page.locator(".column").all()]
    assert all(box["x"] + box["width"] <= 390 for box in boxes) and len({box["y"] for box in boxes}) == len(boxes)
    page.set_viewport_size({"width": 1280, "height": 800})
    boxes = [card.bounding_box() for card in page.locator(".column").all()]
    assert 1 < len({box["x"] for box in boxes}) <= 4 and all(box["x"] + box["width"] <= 1280 for box in boxes)
    assert "right answer" in page.locator(".asked").inner_text()


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
    facets = page.locator(".facet").first
    for is_shown in (False, True):
        page.keyboard.press("f")
        assert facets.is_visible() is is_shown
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    rows = page.locator("tr[data-row]")
    first = rows.nth(0).locator("a[data-open]").inner_text()
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
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/rollouts/{first}")


def test_every_key_has_something_to_click(viewer: Viewer) -> None:
    for path in ("/", "/rollouts?sort=newest&step=1"):
        page = viewer.open(path)
        for element in page.locator("[data-key]").all():
            assert element.is_visible() and (element.inner_text() or element.get_attribute("aria-label")), element
        page.context.close()


def test_an_interval_dragged_on_the_chart_leads_to_its_rollouts(viewer: Viewer) -> None:
    page = viewer.open("/")
    box = page.locator("svg.chart:not(.mini)").bounding_box()
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


def test_a_run_is_tagged_found_by_its_tag_and_deleted(several: Viewer) -> None:
    page = several.open("/")
    page.get_by_role("link", name="Tags, note and deletion of first-b").click()
    assert serious(page) == []
    page.get_by_label("Tags").fill("baseline")
    page.get_by_label("Note").fill("<i>not markup</i>")
    page.get_by_role("button", name="Save").click()
    page.wait_for_selector("h1:has-text('Runs')")
    assert "<i>not markup</i>" in page.locator("tr", has_text="first-b").inner_text() and serious(page) == []
    page.locator(".tag-row a", has_text="baseline").click()
    page.wait_for_url("**tag=baseline*")
    assert page.locator("tr[data-row]").count() == 1
    page.get_by_role("link", name="Tags, note and deletion of first-b").click()
    page.get_by_role("link", name="Delete this run").click()
    assert serious(page) == []
    page.get_by_role("button", name="Delete it for good").click()
    page.wait_for_selector("h1:has-text('Runs')")
    assert page.locator("tr[data-row]").count() == 1 and "first-b" not in page.locator("main").inner_text()
