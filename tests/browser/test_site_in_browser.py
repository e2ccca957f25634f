"""The documentation's site in a real Chromium, opened as files: axe, a phone's width, the search, nothing asked of the
network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import LAUNCH, needs_chromium

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser installs it"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed: make test-browser"
)

pytestmark = needs_chromium
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index.html", "tutorials/small-model.html", "how-to/tasks.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        yield browser
        browser.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_pages_have_no_serious_finding_fit_and_ask_the_network_for_nothing(
    chromium: Any, site: Path, scheme: Any, width: int
) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        found = axe.Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in {"serious", "critical"}] == [], name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    assert [url for url in asked if url.startswith(("http:", "https:"))] == []
    context.close()


def test_the_search_finds_a_page_in_files_without_a_server(chromium: Any, site: Path) -> None:
    page = chromium.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").press_sequentially("ollama", delay=30)
    result = page.locator(".md-search-result__item h1", has_text="Deploy what you trained").first
    result.wait_for(state="attached")
    page.close()
