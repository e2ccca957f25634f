"""The page about critics is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_the_critic_page_runs_from_top_to_bottom(run_page: Callable[..., str]) -> None:
    said = run_page("docs/explanation/credit/critic.md")
    assert "[True, True]" in said
    assert "[3.0, 6.0]" in said
