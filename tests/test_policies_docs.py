"""Every fenced block of docs/how-to/agents/policies.md runs, in the order in which a reader meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_policies_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/how-to/agents/policies.md")
    assert all(f"{policy} (" in said for policy in ("writer", "critic", "clerk")) and ", frozen)" in said
    for call in ("call 0 · writer · writer", "call 1 · critic · critic", "call 2 · clerk · clerk"):
        assert call in said
    assert "wrote critic-weights" in said
