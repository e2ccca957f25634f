"""An agent in a virtual environment of its own, without any of our packages: trained with a base URL and a key
alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from warm import WarmCommand

STARTER = Path(__file__).resolve().parents[3] / "examples" / "text_to_sql" / "starter"
PROGRAM = """
import importlib.util
import json
import sys

from openai import OpenAI

assert importlib.util.find_spec("lightningrl") is None, "this environment has our package"
client = OpenAI()
question = json.load(sys.stdin)
reply = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": question}])
print(json.dumps(reply.choices[0].message.content))
"""
AGENT = """
from lightningrl import command_agent

answer = command_agent("theirs/bin/python", "program.py")


def tasks():
    for number in range(4):
        yield {"id": f"t{number}", "input": f"Write one SQLite query: count {number}"}


def every_second(task, output, trajectory):
    return float(int(trajectory.rollout_id[-1]) % 2)
"""
RECIPE = """
agent = "agent.py:answer"
tasks.train = "agent.py:tasks"
policy.model = "starter"
rewards.every_second.use = "agent.py:every_second"
runtime = { workers = 1, concurrency = 2 }
loop = { steps = 2, tasks_per_step = 1, group_size = 4, checkpoint_every = 2 }
sampling.max_tokens = 8
"""


@pytest.fixture
def folder(tmp_path: Path, certificates: Mapping[str, str]) -> Path:
    """The recipe's folder, with the agent's own environment `theirs` in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "theirs"], cwd=tmp_path, check=True)
    if importlib.util.find_spec("uv"):
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", "theirs/bin/python", "openai"]
    else:
        pip = [sys.executable, "-m", "pip", "--python", "theirs/bin/python", "--disable-pip-version-check"]
        command = [*pip, "install", "--quiet", "--no-compile", "openai"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **certificates}, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        pytest.skip(f"pip could not install the package: {ran.stderr.strip()[-200:]}")
    for name, text in (("program.py", PROGRAM), ("agent.py", AGENT), ("recipe.toml", RECIPE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "starter").symlink_to(STARTER)
    return tmp_path


@pytest.mark.slow
def test_an_agent_in_its_own_virtual_environment_is_trained(
    folder: Path, warm: WarmCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("OPENAI_", "ANTHROPIC_", "PYTHONPATH"))]:
        monkeypatch.delenv(name)
    for command in (["train", "recipe.toml", "--run", "run"], ["export", "trained", "--run", "run"]):
        ran = warm.run("lightningrl", *command, cwd=folder)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rows" in line]
    assert [line["outcome/succeeded"] for line in steps] == [4, 4]
    assert all(line["rows"] > 0 for line in steps)
    before, after = load_file(STARTER / "model.safetensors"), load_file(folder / "trained" / "model.safetensors")
    assert any(not np.array_equal(before[name], after[name]) for name in after if name in before)
