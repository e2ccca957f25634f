"""Examples with an agent framework train for a step, and each token was trained as it was sampled.

The others are certified where they are trained: from_scratch, node_agent and two_policies in their own tests,
text_to_sql by workers that join from elsewhere (test_cli_whole.py), and on verl in
packages/trainer-verl/tests/test_verl_runs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from certified import certified
from teaching import OF_EVERY_OTHER
from warm import WarmCommand

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ("loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=4", "validation.tasks=1", "runtime.workers=1")


@pytest.mark.slow
@pytest.mark.parametrize(("example", "reward"), [("rag", "answer"), ("math_tools", "answer_match")])
def test_an_example_is_trained_on_what_was_sampled(
    example: str, reward: str, tmp_path: Path, warm: WarmCommand, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = [word for setting in (*SMALL, f"rewards.{reward}.use={OF_EVERY_OTHER}") for word in ("--set", setting)]
    cache = {"LIGHTNINGRL_CACHE": str(tmp_path_factory.getbasetemp() / "cache")}
    ran = warm.run(
        "lightningrl",
        "train",
        str(EXAMPLES / example),
        "--run",
        str(tmp_path / "run"),
        *settings,
        cwd=tmp_path,
        environment=cache,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = certified(tmp_path / "run", warm)
    assert found["recomputed"] == found["tokens"] and found["trained"] > 0
