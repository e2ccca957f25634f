"""Automatic intermediate rewards (AIR) from what became of a call's tool invocations (Agent Lightning, arXiv 2508.03680).

ToolStatusReward     mean over the call's tools of (ok | error)             pays for tools that work
ToolStatusShaping    the same of ±scale, always in the potential form      keeps the optimal policy
ExecutionErrors      -charge for each tool that failed while it ran        charges for tools that break
"""

from __future__ import annotations

from lightningrl.types import ToolStatus, Trajectory
from lightningrl_credit.rewards.tools import mean_over_tools

__all__ = ["ExecutionErrors", "ToolStatusReward", "ToolStatusShaping"]


class ToolStatusReward:
    """Each call gets the mean of its tools' values. A call without tools, or whose tools' status nobody knows, gets None."""

    def __init__(self, *, ok: float = 0.1, error: float = -0.1) -> None:
        """`ok` above 0 pays for calling tools, needed or not; where that is exploited, set it to 0 or take the potential form.
        `error` is for error, unknown_tool, invalid_arguments and timeout."""
        self._values: dict[ToolStatus, float] = {
            status: ok if status is ToolStatus.OK else error for status in ToolStatus if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))


class ToolStatusShaping(ToolStatusReward):
    """`tool_status` by the name that its potential form had: a `TurnReward` of it pays the change of its values, whatever its `form` is."""

    def __init__(self, *, scale: float = 0.1) -> None:
        super().__init__(ok=scale, error=-scale)


class ExecutionErrors:
    """Charges a call for its tools that ran and failed, or took too long: the mean of -`charge` and 0.0. None without a known status."""

    def __init__(self, *, charge: float = 0.1) -> None:
        failed = {ToolStatus.ERROR, ToolStatus.TIMEOUT}
        self._values: dict[ToolStatus, float] = {
            status: -charge if status in failed else 0.0 for status in ToolStatus if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))
