"""The JavaScript agent runs for two steps: trained through the environment variables alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from certified import certified
from sizes import PATIENCE_S, sized
from teaching import OF_EVERY_OTHER
from warm import WarmCommand

EXAMPLES = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example beside what it refers to, with the npm package installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES / "node_agent", folder / "node_agent", ignore=shutil.ignore_patterns("node_modules"))
    for name in ("from_scratch", "text_to_sql"):
        (folder / name).symlink_to(EXAMPLES / name)
    installed = os.environ.get("LIGHTNINGRL_NODE_MODULES")
    if installed:
        (folder / "node_agent" / "node_modules").symlink_to(installed)
        return folder
    command = ["npm", "install", "--no-audit", "--no-fund"]
    ran = subprocess.run(
        command, cwd=folder / "node_agent", capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    if ran.returncode != 0:
        pytest.skip(f"npm could not install the package: {ran.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
def test_the_recipe_trains_for_two_steps(
    examples: Path, tmp_path: Path, warm: WarmCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, group = sized((2, 4), (4, 8))  # each rollout starts Node
    sizes = ["loop.steps=2", f"loop.tasks_per_step={tasks}", f"loop.group_size={group}", "validation.tasks=1"]
    sizes += [f"rewards.right_rows.use={OF_EVERY_OTHER}"]
    settings = [part for size in sizes for part in ("--set", size)]
    for name in [name for name in os.environ if name.startswith(("OPENAI_", "ANTHROPIC_"))]:
        monkeypatch.delenv(name)
    command = ["train", str(examples / "node_agent"), "--run", str(tmp_path / "run"), *settings]
    ran = warm.run("lightningrl", *command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "rows" in line]
    assert [line["outcome/succeeded"] for line in trained] == [tasks * group] * 2
    assert sum(line["rows"] for line in trained) > 0
    assert certified(tmp_path / "run", warm)["trained"] > 0


def test_the_agent_knows_nothing_of_us() -> None:
    assert "lightningrl" not in (EXAMPLES / "node_agent" / "agent.mjs").read_text().lower()
