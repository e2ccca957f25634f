"""Every fenced block of the pages about agents without a framework runs; the decision table leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("hand-written.md", "other-languages.md", "bring-your-own-agent.md", "langchain.md")


@pytest.mark.slow
def test_the_hand_written_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/hand-written.md")
    assert "succeeded" in said
    assert "writer" in said and "reviewer/sql" in said and "brief" in said


@pytest.mark.slow
def test_the_page_about_other_languages_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    assert "succeeded" in run_page("docs/other-languages.md")


@pytest.mark.slow
def test_the_decision_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    assert "succeeded" in run_page("docs/bring-your-own-agent.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_page_and_its_heading(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        target = (ROOT / "docs" / path).resolve() if path else ROOT / "docs" / page
        assert target.is_file(), link
        titles = [line.lstrip("# ").lower() for line in target.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        headings = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
        assert not heading or heading in headings, link
