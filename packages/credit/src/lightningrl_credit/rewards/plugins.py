"""The rewards that come with LightningRL, as plugin records."""

from __future__ import annotations

from lightningrl.plugins import Plugin
from lightningrl_credit.rewards.budgets import LatencyBudget, TokenBudget
from lightningrl_credit.rewards.execution import Execution
from lightningrl_credit.rewards.matching import F1, Exact, JsonSchema, Numeric, Pattern
from lightningrl_credit.rewards.reported import Reported, ReportedOfCalls
from lightningrl_credit.rewards.tool_arguments import RepeatedCalls, ValidArguments
from lightningrl_credit.rewards.tool_status import ExecutionErrors, ToolStatusReward, ToolStatusShaping

__all__ = ["INTERMEDIATE_PLUGINS", "PLUGINS"]

PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="exact", summary="1 for the task's answer, regardless of case, punctuation and articles", factory=Exact),
    Plugin(name="numeric", summary="1 for the task's number, within a tolerance", factory=Numeric),
    Plugin(name="f1", summary="words shared with the task's answer (token F1)", factory=F1),
    Plugin(name="pattern", summary="1 where a regular expression matches", factory=Pattern),
    Plugin(name="json_schema", summary="1 for JSON that fits a schema", factory=JsonSchema),
    Plugin(name="execution", summary="what a command of yours says of the output: exit status or stdout", factory=Execution),
    Plugin(name="reported", summary="the value that the agent or its telemetry reported under `name`", factory=Reported),
)
"""For `lightningrl_reward_functions`."""

INTERMEDIATE_PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="execution_errors", summary="charges for tools that fail while they run", factory=ExecutionErrors),
    Plugin(name="latency_budget", summary="charges calls that take longer than a budget", factory=LatencyBudget),
    Plugin(name="repeated_calls", summary="charges for a tool called again with the same arguments", factory=RepeatedCalls),
    Plugin(name="reported", summary="what the agent or its telemetry reported of its calls, under `name` or all", factory=ReportedOfCalls),
    Plugin(name="token_budget", summary="charges calls that sample more tokens than a budget", factory=TokenBudget),
    Plugin(name="tool_status", summary="pays for tools that work, charges for those that fail", factory=ToolStatusReward),
    Plugin(
        name="tool_status_shaping",
        summary="tool status as a potential: keeps the optimal policy; it helped in no game of our study",
        factory=ToolStatusShaping,
    ),
    Plugin(name="valid_arguments", summary="charges for arguments that fit no schema of the tool", factory=ValidArguments),
)
"""For `lightningrl_intermediate_rewards`."""
