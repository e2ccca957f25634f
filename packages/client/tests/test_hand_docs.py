"""Every fenced block of the pages about agents without a framework runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_hand_written_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/how-to/agents/hand-written.md")
    assert "succeeded" in said
    assert "writer" in said and "reviewer/sql" in said and "brief" in said


@pytest.mark.slow
def test_the_page_about_other_languages_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    assert "succeeded" in run_page("docs/how-to/agents/other-languages.md")


@pytest.mark.slow
def test_the_decision_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    assert "succeeded" in run_page("docs/how-to/agents/bring-your-own-agent.md")
