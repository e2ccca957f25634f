"""Every fenced block of docs/how-to/agents/opentelemetry.md runs, in the order in which a reader meets them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from lightningrl_client.recipe_file import load_recipe


@pytest.mark.slow
def test_the_opentelemetry_page_runs_from_top_to_bottom(tmp_path: Path, run_page: Callable[..., str]) -> None:
    said = run_page("docs/how-to/agents/opentelemetry.md")
    assert "succeeded" in said
    assert "writer" in said
    assert "reviewer" in said
    assert callable(runpy.run_path(str(tmp_path / "roles.py"))["ask"])
    whole = "".join((tmp_path / name).read_text(encoding="utf-8") for name in ("recipe.toml", "telemetry.toml"))
    (tmp_path / "whole.toml").write_text(whole, encoding="utf-8")
    telemetry = load_recipe(tmp_path / "whole.toml").telemetry
    assert telemetry is not None and telemetry.headers_env == {"Authorization": "COLLECTOR_AUTHORIZATION"}
