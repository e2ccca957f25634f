"""The public names and where each is defined: type checkers read this list, and `__init__.py` imports from it."""

from lightningrl_credit.rewards.execution import Execution as Execution
from lightningrl_credit.rewards.matching import F1 as F1
from lightningrl_credit.rewards.matching import Exact as Exact
from lightningrl_credit.rewards.matching import JsonSchema as JsonSchema
from lightningrl_credit.rewards.matching import Numeric as Numeric
from lightningrl_credit.rewards.matching import Pattern as Pattern
from lightningrl_credit.rewards.recorded import Overlong as Overlong
from lightningrl_credit.rewards.recorded import ReportedReward as ReportedReward
from lightningrl_credit.rewards.recorded import ReportedTurnReward as ReportedTurnReward
from lightningrl_credit.rewards.reward_set import NamedReward as NamedReward
from lightningrl_credit.rewards.reward_set import RewardResult as RewardResult
from lightningrl_credit.rewards.reward_set import RewardSet as RewardSet
from lightningrl_credit.rewards.tools import ExecutionErrors as ExecutionErrors
from lightningrl_credit.rewards.tools import LatencyBudget as LatencyBudget
from lightningrl_credit.rewards.tools import MalformedCalls as MalformedCalls
from lightningrl_credit.rewards.tools import RepeatedCalls as RepeatedCalls
from lightningrl_credit.rewards.tools import TokenBudget as TokenBudget
from lightningrl_credit.rewards.tools import ToolStatusReward as ToolStatusReward
from lightningrl_credit.rewards.tools import ValidArguments as ValidArguments
from lightningrl_credit.rewards.turn_reward import TurnReward as TurnReward
from lightningrl_credit.rewards.value import RewardWeights as RewardWeights
from lightningrl_credit.rewards.value import WeightedReward as WeightedReward

__all__: list[str]
