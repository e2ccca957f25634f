"""Every fenced block of docs/opentelemetry.md runs, in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightningrl.config import load_recipe

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in FENCE.finditer((ROOT / "docs" / "opentelemetry.md").read_text(encoding="utf-8"))]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.slow
def test_the_opentelemetry_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "starter").symlink_to(ROOT / "examples" / "text_to_sql" / "starter")
    said = ""
    for language, title, body in BLOCKS:
        assert title or language in {"bash", "text"}
        if title:
            (tmp_path / title).write_text(body, encoding="utf-8")
        elif language == "bash":
            for line in body.strip().splitlines():
                said += run(shlex.split(line), tmp_path)
    assert "succeeded" in said
    assert "writer" in said
    assert "reviewer" in said
    assert callable(runpy.run_path(str(tmp_path / "roles.py"))["ask"])
    whole = "".join((tmp_path / name).read_text(encoding="utf-8") for name in ("recipe.toml", "telemetry.toml"))
    (tmp_path / "whole.toml").write_text(whole, encoding="utf-8")
    telemetry = load_recipe(tmp_path / "whole.toml").telemetry
    assert telemetry is not None and telemetry.headers_env == {"Authorization": "COLLECTOR_AUTHORIZATION"}
