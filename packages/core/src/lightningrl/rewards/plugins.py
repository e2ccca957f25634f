"""The rewards that come with LightningRL, as plugin records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightningrl.plugins import Plugin

if TYPE_CHECKING:
    from lightningrl.rewards import Reported, ReportedOfCalls, ToolStatusReward, ToolStatusShaping

__all__ = ["INTERMEDIATE_PLUGINS", "PLUGINS"]


def _reported(*, name: str) -> Reported:
    from lightningrl.rewards import Reported

    return Reported(name=name)


def _reported_of_calls(*, name: str | None = None) -> ReportedOfCalls:
    from lightningrl.rewards import ReportedOfCalls

    return ReportedOfCalls(name=name)


def _tool_status(*, ok: float = 0.1, error: float = -0.1) -> ToolStatusReward:
    from lightningrl.rewards import ToolStatusReward

    return ToolStatusReward(ok=ok, error=error)


def _tool_status_shaping(*, scale: float = 0.1, gamma: float = 1.0) -> ToolStatusShaping:
    from lightningrl.rewards import ToolStatusShaping

    return ToolStatusShaping(scale=scale, gamma=gamma)


PLUGINS: tuple[Plugin, ...] = (Plugin(name="reported", summary="the value that the agent reported under `name`", factory=_reported),)
"""For `lightningrl_reward_functions`."""

INTERMEDIATE_PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="reported", summary="what the agent reported of its calls, under `name` or all of it", factory=_reported_of_calls),
    Plugin(name="tool_status", summary="pays for tools that work, charges for those that fail", factory=_tool_status),
    Plugin(name="tool_status_shaping", summary="tool status as a potential: keeps the optimal policy", factory=_tool_status_shaping),
)
"""For `lightningrl_intermediate_rewards`."""
