"""Tasks that take longer than others have their share of what an asynchronous run learns from."""

from __future__ import annotations

import shutil
from pathlib import Path

import lightningrl
from lightningrl.records import RolloutFilter

TASKS = """
def train():
    names = ["slow" if number % 6 == 0 else "quick" for number in range(24)]
    return [{"id": f"{name}-{number}", "input": name, "answer": "2"} for number, name in enumerate(names)]
"""
AGENT = """
import time
from openai import OpenAI

def answer(name):
    messages = [{"role": "user", "content": f"Write this date in words: 2024-03-03 {name}"}]
    reply = OpenAI().chat.completions.create(model="any", messages=messages)
    time.sleep(3.2 if name == "slow" else 0.8)  # a tool
    return reply.choices[0].message.content
"""
REWARD = """
def letters(task, output, trajectory):
    return float(len(output or "") % 7)
"""


def test_tasks_with_tools_that_are_four_times_as_slow_have_their_share_of_training(
    first_agent: Path, tmp_path: Path
) -> None:
    """Their groups were left out for their age: 0.063 of what was trained was theirs."""
    folder = tmp_path / "first"
    shutil.copytree(first_agent, folder)
    for name, text in {"slow_tasks": TASKS, "slow_agent": AGENT, "slow_reward": REWARD}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    run = lightningrl.train(
        str(folder),
        run=tmp_path / "run",
        settings={
            "agent": "slow_agent.py:answer",
            "tasks.train": "slow_tasks.py:train",
            "tasks.validation": None,
            "rewards.right.use": "slow_reward.py:letters",
            "validation.every": 0,
            "runtime.workers": 1,
            "runtime.concurrency": 24,
            "loop.steps": 12,
            "loop.tasks_per_step": 4,
            "loop.group_size": 2,
            "loop.max_staleness": 1,
            "loop.asynchronous": True,
        },
    )
    trained = [rollout for rollout in run.rollouts(RolloutFilter(limit=1000)) if rollout.trained_step is not None]
    assert len(trained) == 12 * 4 * 2
    slow = [rollout for rollout in trained if rollout.task.input == "slow"]
    assert len(slow) / len(trained) >= 0.15, "1/6 of the stream"
    steps = [row for row in run.metrics if "learn/staleness_max" in row]
    assert max(row["learn/staleness_max"] for row in steps) == 1, "steps were collected while others were learned"
    assert max(row["staleness_slow"] for row in steps) <= 1
