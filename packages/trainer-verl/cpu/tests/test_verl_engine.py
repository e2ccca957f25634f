"""verl's own FSDP2 engine learns on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_updates_raise_rows_with_positive_advantage_and_lower_the_others(
    run_process: Callable[..., str], make_policy: Callable[[bool], str], tmp_path: Path
) -> None:
    facts = json.loads(
        run_process("process_engine.py", make_policy(True), str(tmp_path / "checkpoint")).splitlines()[-1]
    )
    assert facts["gap"] < 1e-5, "logprobs are transformers' own"
    assert all(
        change * advantage > 0.1 for change, advantage in zip(facts["changes"], facts["advantages"], strict=True)
    ), facts
    assert facts["moved"] > 0.0
    assert facts["restored"] == 0.0, "a checkpoint brings back the same weights"
