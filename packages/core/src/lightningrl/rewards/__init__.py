"""Rewards: terminal ones of an episode, by name and weight, and automatic intermediate ones (AIR) of its calls."""

from lightningrl.rewards.budgets import LatencyBudget, TokenBudget
from lightningrl.rewards.execution import Execution
from lightningrl.rewards.matching import F1, Exact, JsonSchema, Numeric, Pattern
from lightningrl.rewards.reported import Reported, ReportedOfCalls
from lightningrl.rewards.reward_set import NamedReward, RewardResult, RewardSet
from lightningrl.rewards.tool_arguments import RepeatedCalls, ValidArguments
from lightningrl.rewards.tool_status import ExecutionErrors, ToolStatusReward, ToolStatusShaping
from lightningrl.rewards.turn_reward import TurnReward
from lightningrl.rewards.weights import RewardWeights, WeightedReward

__all__ = [
    "F1",
    "Exact",
    "Execution",
    "ExecutionErrors",
    "JsonSchema",
    "LatencyBudget",
    "NamedReward",
    "Numeric",
    "Pattern",
    "RepeatedCalls",
    "Reported",
    "ReportedOfCalls",
    "RewardResult",
    "RewardSet",
    "RewardWeights",
    "TokenBudget",
    "ToolStatusReward",
    "ToolStatusShaping",
    "TurnReward",
    "ValidArguments",
    "WeightedReward",
]
