"""What a person reads of a run while it goes on."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from lightningrl.training.progress import LineProgress, LiveProgress


def test_time_left_is_that_of_the_steps_whatever_starting_and_the_first_validation_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = io.StringIO()
    progress = LineProgress(Console(file=said, width=200))
    metrics = {"reward": 0.5, "calls_per_rollout": 1.0, "groups_without_signal": 0.0, "groups": 4.0, "tokens_per_second": 9.0}
    now[0] += 60.0  # a first validation
    for step in (5, 6):  # resumed after step 4
        now[0] += 3.0
        progress.step(step, 14, {**metrics, "seconds": 3.0, "minutes": 1.0}, {"succeeded": 4})
    assert [line.rpartition("left ")[2] for line in said.getvalue().splitlines()] == ["0:27", "0:24"]


def test_the_panel_that_stays_has_no_bar_of_something_that_goes_on() -> None:
    with LiveProgress(Console(file=io.StringIO(), force_terminal=True)) as progress:
        progress.phase("rollouts", 4, 4)
    left = io.StringIO()
    Console(file=left, width=100).print(progress)
    assert "steps" in left.getvalue() and "learning" not in left.getvalue()
