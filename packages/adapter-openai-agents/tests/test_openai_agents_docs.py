"""Every fenced block of docs/how-to/agents/openai-agents.md runs, in the order in which a reader meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_openai_agents_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/how-to/agents/openai-agents.md", OPENAI_AGENTS_DISABLE_TRACING="1")
    assert "succeeded" in said
    assert "triage" in said
