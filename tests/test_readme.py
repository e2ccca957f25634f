"""Every fenced block of the README runs, in the order in which a reader meets them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in FENCE.finditer((ROOT / "README.md").read_text(encoding="utf-8"))]
SHOWN_ONLY = {"text"}
"""Diagrams and output."""


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_every_block_says_what_it_is() -> None:
    assert {language for language, _, _ in BLOCKS} <= {"bash", "python", "toml"} | SHOWN_ONLY
    for language, title, _ in BLOCKS:
        assert title or language not in {"python", "toml"}, "a file in the README has a title"


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_the_two_commands_are_what_the_makefile_does(target: str) -> None:
    assert any(language == "bash" and body.strip() == f"make {target}" for language, _, body in BLOCKS)
    planned = run(["make", "--dry-run", target], ROOT)
    assert {"quickstart": "train examples/text_to_sql", "test": "-m pytest"}[target] in planned


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_blocks_run_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "starter").symlink_to(ROOT / "examples" / "text_to_sql" / "starter")
    said = ""
    for language, title, body in BLOCKS:
        if title:
            (tmp_path / title).write_text(body, encoding="utf-8")
        elif language == "bash" and not body.startswith("make "):
            for line in body.strip().splitlines():
                said += run(shlex.split(line), tmp_path)
    assert (tmp_path / "runs" / "mine" / "curve.png").is_file()
    assert (tmp_path / "my-weights" / "model.safetensors").is_file()
    assert "succeeded" in said
    assert "langchain" in said
