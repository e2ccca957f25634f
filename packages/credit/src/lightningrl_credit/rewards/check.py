"""Reward by the check of a coding harness: a command in the rollout's folder, run by the worker before the folder goes.

agent = { harness = "pi", check = "pytest -q" }  ─► output["check"] = {"status": 1, "passed": 3, "failed": 1}  ─► 0.75
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from lightningrl.errors import ConfigError
from lightningrl.types import Task, Trajectory

__all__ = ["Check"]

Score = Literal["share", "status"]


class Check:
    """The check's verdict on the work.

    score = "share"    1.0 for exit status 0; else the share of tests that passed, where the output says it, or 0.0
    score = "status"   1.0 for exit status 0, else 0.0

    A check that ran too long is 0.0, and so is one whose tests all passed and whose exit status says otherwise.
    """

    range: Final = (0.0, 1.0)

    def __init__(self, *, score: Score = "share") -> None:
        if score not in get_args(Score):
            raise ConfigError(f"reward 'check': score {score!r} is none of {', '.join(map(repr, get_args(Score)))}")
        self.score: Score = score

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        """Raises ConfigError where the output has no check."""
        if output is None:  # the harness failed, and `[outcomes]` trains on that
            return 0.0
        check = output.get("check") if isinstance(output, Mapping) else None
        if not isinstance(check, Mapping):
            raise ConfigError(
                "reward 'check': the output has no check; it is a coding harness's: "
                'agent = { harness = "pi", check = "pytest -q" }, or the task\'s, by from_task = ["check"]'
            )
        if check.get("status") == 0:
            return 1.0
        passed, failed = check.get("passed"), check.get("failed")
        if self.score == "status" or check.get("status") is None or not passed or not failed:
            return 0.0
        return float(passed / (passed + failed))
