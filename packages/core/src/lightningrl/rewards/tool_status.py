"""Automatic intermediate rewards (AIR) from what became of a call's tool invocations (Agent Lightning, arXiv 2508.03680).

ToolStatusReward     mean over the call's tools of (ok | error)             pays for tools that work
ToolStatusShaping    the change of the last share of successes             keeps the optimal policy
ExecutionErrors      -charge for each tool that failed while it ran        charges for tools that break
"""

from __future__ import annotations

from lightningrl.rewards.potential import shape
from lightningrl.rewards.tools import mean_over_tools
from lightningrl.types import ToolStatus, Trajectory

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


class ToolStatusShaping:
    """Potential-based shaping (Ng, Harada & Russell, ICML 1999): the potential is `scale` times the share of successes (+1) and failures
    (-1) in the last call that used tools. `form = "potential"` does the same with any reward, and with the credit's own `gamma`."""

    def __init__(self, *, scale: float = 0.1, gamma: float = 1.0) -> None:
        self._status = ToolStatusReward(ok=scale, error=-scale)
        self.gamma = gamma

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return list(shape(trajectory.transitions, self._status(trajectory), gamma=self.gamma))


class ExecutionErrors:
    """Charges a call for its tools that ran and failed, or took too long: the mean of -`charge` and 0.0. None without a known status."""

    def __init__(self, *, charge: float = 0.1) -> None:
        failed = {ToolStatus.ERROR, ToolStatus.TIMEOUT}
        self._values: dict[ToolStatus, float] = {
            status: -charge if status in failed else 0.0 for status in ToolStatus if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))
