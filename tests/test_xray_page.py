"""docs/how-to/xray.md, run from top to bottom beside a recorded run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from recorded_runs import make_recipe, record_run


def test_the_pages_commands_say_what_it_shows(run_page: Callable[..., str], tmp_path: Path) -> None:
    settings = {"credit.use": "turns", "credit.options.gamma": 0.9, "intermediate_rewards.turn.use": "tool_status"}
    asyncio.run(record_run(tmp_path / "runs" / "mine", make_recipe(tmp_path, settings)))
    said = run_page("docs/how-to/xray.md")
    assert "the run's own method gives exactly what the run used" in said
    assert re.search(r"^run by role .* on these rollouts equal to run", said, re.MULTILINE)
    assert "g000001-002, task" in said and "turns by methods" not in said
    assert re.search(r"^mine +\d+%", said, re.MULTILINE) and re.search(r"^steep +", said, re.MULTILINE)
    assert re.search(r"mean reward [\d.]+ ± [\d.]+ was, [\d.]+ ± [\d.]+ would be", said)
