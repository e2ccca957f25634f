"""Rewards: terminal ones of an episode, by name and weight, and automatic intermediate ones (AIR) of its calls."""

from lightningrl.rewards.reported import Reported, ReportedOfCalls
from lightningrl.rewards.reward_set import NamedReward, RewardResult, RewardSet
from lightningrl.rewards.tool_status import ToolStatusReward, ToolStatusShaping

__all__ = ["NamedReward", "Reported", "ReportedOfCalls", "RewardResult", "RewardSet", "ToolStatusReward", "ToolStatusShaping"]
