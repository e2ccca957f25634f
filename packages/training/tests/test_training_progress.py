"""What a person reads of a run while it goes on, and of what stays there when it is over."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from lightningrl_training.progress import LineProgress, LiveProgress, NotebookProgress

METRICS = {
    "reward": 0.5,
    "calls_per_rollout": 1.0,
    "groups_without_signal": 0.0,
    "groups": 4.0,
    "tokens_per_second": 9.0,
    "minutes": 1.0,
}


def test_time_left_is_that_of_the_steps_after_the_first_which_imports_what_all_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = io.StringIO()
    progress = LineProgress(Console(file=said, width=200))
    now[0] += 60.0  # a first validation
    for step, seconds in ((5, 40.0), (6, 3.0), (7, 3.0)):  # resumed after step 4
        now[0] += seconds
        progress.step(step, 14, {**METRICS, "seconds": seconds}, {"succeeded": 4})
    first, *later = said.getvalue().splitlines()
    assert "left" not in first
    assert [line.rpartition("left ")[2] for line in later] == ["0:24", "0:21"]


@pytest.mark.parametrize("kind", [LiveProgress, NotebookProgress])
@pytest.mark.parametrize("steps", [0, 1])
def test_no_bar_is_left_of_a_run_that_is_over(
    kind: type[LiveProgress], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(progress: LiveProgress, **_: object) -> Cell:
        page = Console(file=io.StringIO(), width=120)
        page.print(progress.__rich__())
        shown.append(page.file.getvalue())  # type: ignore[attr-defined]
        return Cell()

    class Cell:
        update = staticmethod(show)

    monkeypatch.setattr("IPython.display.display", show)
    progress = kind(Console(file=io.StringIO(), width=120, force_terminal=True))
    with progress:
        progress.phase("starting workers", 0, 0)
        for step in range(1, steps + 1):
            progress.phase("rollouts", 16, 16)
            progress.step(step, 1, {**METRICS, "seconds": 3.0}, {"succeeded": 16})
            progress.phase("rollouts", 16, 16)
    show(progress)
    assert "0/?" not in shown[-1] and "learning" not in shown[-1] and "start" not in shown[-1]
    assert ("steps" in shown[-1]) == bool(steps)
