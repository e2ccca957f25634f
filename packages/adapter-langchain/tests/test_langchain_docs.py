"""Every fenced block of docs/how-to/agents/langchain.md runs, in the order in which a reader meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_langchain_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/how-to/agents/langchain.md")
    assert "succeeded" in said
    assert "writer" in said and "review" in said
