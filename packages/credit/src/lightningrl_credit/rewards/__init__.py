"""Rewards: terminal ones of an episode, by name and weight, and automatic intermediate ones (AIR) of its calls."""

from lightningrl_credit.rewards.budgets import LatencyBudget, TokenBudget
from lightningrl_credit.rewards.execution import Execution
from lightningrl_credit.rewards.matching import F1, Exact, JsonSchema, Numeric, Pattern
from lightningrl_credit.rewards.reported import Reported, ReportedOfCalls
from lightningrl_credit.rewards.reward_set import NamedReward, RewardResult, RewardSet
from lightningrl_credit.rewards.tool_arguments import RepeatedCalls, ValidArguments
from lightningrl_credit.rewards.tool_status import ExecutionErrors, ToolStatusReward, ToolStatusShaping
from lightningrl_credit.rewards.turn_reward import TurnReward
from lightningrl_credit.rewards.weights import RewardWeights, WeightedReward

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
