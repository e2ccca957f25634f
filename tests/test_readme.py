"""Every fenced block of the README runs, in the order in which a reader meets them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("target", "what"), [("quickstart", "train examples/text_to_sql"), ("test", "-m pytest")])
def test_the_two_commands_are_what_the_makefile_does(target: str, what: str) -> None:
    assert re.search(rf"^```bash\nmake {target}\n```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    planned = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert what in planned


def test_the_readme_is_short_and_its_first_command_within_the_first_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 600  # code, addresses and all
    assert text.splitlines().index("```bash") < 10


@pytest.mark.slow
def test_the_blocks_run_from_top_to_bottom(run_page: Callable[..., str], tmp_path: Path) -> None:
    said = run_page("README.md")
    assert (tmp_path / "runs" / "first" / "curve.png").is_file()
    assert (tmp_path / "my-weights" / "model.safetensors").is_file()
    assert "succeeded" in said
    assert re.search(r"^reward +(0\.000 · right 0\.000|1\.000 · right 1\.000) *$", said, re.MULTILINE)
    (last,) = re.findall(r"validation after step 15: score ([\d.]+)", said)
    assert float(last) > 0.9
