"""Automatic intermediate rewards (AIR) from the status of a call's tools (Agent Lightning, arXiv 2508.03680).

ToolStatusReward     mean over the call's tools of (ok | error)             pays for tools that work
ToolStatusShaping    the same of ±scale, always in the potential form      keeps the optimal policy
ExecutionErrors      -charge for each tool that failed while it ran        charges for tools that break
"""

from __future__ import annotations

from lightningrl.types import ToolStatus, Trajectory
from lightningrl_credit.rewards.tools import mean_over_tools

__all__ = ["ExecutionErrors", "ToolStatusReward", "ToolStatusShaping"]


class ToolStatusReward:
    """Gives each call the mean of its tools' values; None without tools, or where nobody knows their status."""

    def __init__(self, *, ok: float = 0.1, error: float = -0.1) -> None:
        """`ok` above 0 pays for calling tools, needed or not; where that is exploited, set it to 0 or take the
        potential form. `error` is for error, unknown_tool, invalid_arguments and timeout.
        """
        self._values: dict[ToolStatus, float] = {
            status: ok if status is ToolStatus.OK else error
            for status in ToolStatus
            if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))


class ToolStatusShaping(ToolStatusReward):
    """`tool_status` in the potential form: a `TurnReward` of it pays the change of its values, whatever its `form`."""

    def __init__(self, *, scale: float = 0.1) -> None:
        super().__init__(ok=scale, error=-scale)


class ExecutionErrors:
    """Charges a call for its tools that ran and failed, or took too long.

    The mean of -`charge` and 0.0 over its tools; None without a known status.
    """

    def __init__(self, *, charge: float = 0.1) -> None:
        failed = {ToolStatus.ERROR, ToolStatus.TIMEOUT}
        self._values: dict[ToolStatus, float] = {
            status: -charge if status in failed else 0.0 for status in ToolStatus if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))
