"""Rewards that read what was recorded of a rollout: a harness's check of the work, its length, what was reported.

Check: a command in a coding harness's folder, run by the worker before the folder goes.
    agent = { harness = "pi", check = "pytest -q" }
    output["check"] = {"status": 1, "passed": 3, "failed": 1}  ─► 0.75

Overlong: answers that come near the limit of their tokens are charged, in proportion.
    R(y) = 0                           |y| ≤ L - C
    ((L - C) - |y|) / C         L - C < |y| ≤ L        (soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13)
    -1                          L < |y|, and so at L itself, where the engine cuts off
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from lightningrl.errors import ConfigError
from lightningrl.types import Task, Trajectory, Transition

__all__ = ["Check", "Overlong", "ReportedReward", "ReportedTurnReward"]

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


class Overlong:
    """Gives 0.0 down to -1.0 by the longest call of a rollout, as the limit is one of calls."""

    def __init__(self, *, tokens: int, margin: int) -> None:
        """Take `sampling.max_tokens` for `tokens`, L; `margin` is C, its last part, in which the charge grows. DAPO
        has 20480 and 4096."""
        if not 0 < margin <= tokens:
            raise ConfigError(
                f"reward 'overlong': margin {margin!r} is not from 1 to tokens, which is {tokens!r}; take a fifth of it"
            )
        self.tokens = tokens
        self.margin = margin

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        longest = max((len(call.completion_ids) for call in trajectory.transitions if call.trainable), default=0)
        return min(0.0, max(-1.0, (self.tokens - self.margin - longest) / self.margin))


class ReportedReward:
    """The value reported under `name`; None where nobody reported it."""

    range: Final = (0.0, 1.0)
    """Where the recipe declares none: whoever reports holds the attempt's key, and so may the agent."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        return trajectory.reported.get(self.name)


class ReportedTurnReward:
    """The sum of what was reported of each call, or the value under `name` alone; None where nobody reported any."""

    range: Final = (-1.0, 1.0)
    """Where the recipe declares none."""

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return [self._of(call) for call in trajectory.transitions]

    def _of(self, call: Transition) -> float | None:
        names = call.reported if self.name is None else (self.name,)
        values = [value for name in names if (value := call.reported.get(name)) is not None]
        return sum(values) if values else None
