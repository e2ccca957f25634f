"""Names of span attributes: the GenAI semantic conventions we use, and our own.

The GenAI conventions have the status *Development*, moved to the repository open-telemetry/semantic-conventions-genai, and the
constants in `opentelemetry-semantic-conventions` are marked deprecated; so the names live here, as of November 2026 (semconv 0.66b2).
No standard name exists for rollouts, attempts, token ids or a tool's status: those are in our own namespace.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "AGENT_NAME",
    "CHAT",
    "ERROR_TYPE",
    "EVALUATION_NAME",
    "EVALUATION_RESULT",
    "EVALUATION_SCORE_LABEL",
    "EVALUATION_SCORE_VALUE",
    "EXECUTE_TOOL",
    "INVOKE_AGENT",
    "INVOKE_WORKFLOW",
    "OPERATION_NAME",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "TOOL_CALL_ARGUMENTS",
    "TOOL_CALL_ID",
    "TOOL_CALL_RESULT",
    "TOOL_NAME",
    "TOOL_STATUS",
    "WORKFLOW_NAME",
]

OPERATION_NAME: Final = "gen_ai.operation.name"

CHAT: Final = "chat"
"""Operation: one call of a model."""
EXECUTE_TOOL: Final = "execute_tool"
"""Operation: one invocation of a tool."""
INVOKE_AGENT: Final = "invoke_agent"
"""Operation: one turn of a named agent or graph node."""
INVOKE_WORKFLOW: Final = "invoke_workflow"
"""Operation: the whole rollout; the root span of an attempt."""

AGENT_NAME: Final = "gen_ai.agent.name"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
REQUEST_MODEL: Final = "gen_ai.request.model"

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"

RESPONSE_ID: Final = "gen_ai.response.id"
EVALUATION_RESULT: Final = "gen_ai.evaluation.result"
"""Event: an evaluation of what a call, or all of the rollout, came to."""
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE_VALUE: Final = "gen_ai.evaluation.score.value"
EVALUATION_SCORE_LABEL: Final = "gen_ai.evaluation.score.label"

ERROR_TYPE: Final = "error.type"

TOOL_STATUS: Final = "lightningrl.tool.status"
"""A `lightningrl.types.ToolStatus` value."""
