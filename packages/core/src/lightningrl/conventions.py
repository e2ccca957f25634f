"""Names of span attributes, and a reader of anybody's spans: an agent's turn, a model's call, a tool's outcome.

Vocabularies: the GenAI conventions (current and older names), OpenInference, OpenLLMetry (`traceloop.*`), Haystack's.

    gen_ai.operation.name    openinference.span.kind    traceloop.span.kind    ─►  Kind
    gen_ai.agent.name        agent.name, graph.node.*   traceloop.entity.name  ─►  agent
    gen_ai.tool.*            tool.*, input/output.value traceloop.entity.*     ─►  tool, id, arguments, result
    span status, error.type, exception events                                  ─►  ToolStatus

The GenAI conventions have the status *Development*, moved to the repository open-telemetry/semantic-conventions-genai,
and the constants in `opentelemetry-semantic-conventions` are marked deprecated; so the names live here, as of November
2026 (semconv 0.66b2). No standard name exists for a tool's status: it is in our own namespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from lightningrl.call_origin import LONGEST_ROLE
from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus

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
    "PROVIDER_NAME",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "SCHEMA_URL",
    "TOOL_CALL_ARGUMENTS",
    "TOOL_CALL_ID",
    "TOOL_CALL_RESULT",
    "TOOL_NAME",
    "TOOL_STATUS",
    "WORKFLOW_NAME",
    "AskedCall",
    "Kind",
    "SpanReading",
    "SpanState",
    "parse_attribute",
    "read_agent",
    "read_kind",
    "read_span",
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
PROVIDER_NAME: Final = "gen_ai.provider.name"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Schema of the names here, which spans of ours declare."""
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


class Kind(StrEnum):
    """The subject of a span."""

    AGENT = "agent"
    MODEL = "model"
    TOOL = "tool"
    OTHER = "other"
    """Something else: a chain, a retriever, an HTTP request."""
    UNSAID = "unsaid"
    """No attribute says so (yet: some instrumentations say it when the span ends)."""


class SpanState(StrEnum):
    """A span's own status."""

    UNSET = "unset"
    OK = "ok"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanReading:
    """A span in our words."""

    kind: Kind
    agent: str | None = None
    """The agent that the span itself names; None = it names none."""
    tool: str = ""
    tool_call_id: str = ""
    arguments: str = ""
    result: str = ""
    status: ToolStatus = ToolStatus.UNKNOWN
    error_type: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedCall:
    """A tool call that a model's answer asks for, as the model's span tells."""

    id: str
    name: str
    arguments: str


KINDS: Final[Mapping[str, Mapping[str, Kind]]] = {
    OPERATION_NAME: {
        CHAT: Kind.MODEL,
        "text_completion": Kind.MODEL,
        "generate_content": Kind.MODEL,
        INVOKE_AGENT: Kind.AGENT,
        "run_agent": Kind.AGENT,
        EXECUTE_TOOL: Kind.TOOL,
    },
    "openinference.span.kind": {"AGENT": Kind.AGENT, "LLM": Kind.MODEL, "TOOL": Kind.TOOL},
    "traceloop.span.kind": {"agent": Kind.AGENT, "tool": Kind.TOOL},
    "llm.request.type": {"chat": Kind.MODEL, "completion": Kind.MODEL},
}
"""Kinds by the attribute that says it. The first that a span has counts; a value that is not listed is OTHER."""

AGENT_NAMES: Final = (
    AGENT_NAME,
    "agent.name",
    "agent_name",
    "graph.node.name",
    "graph.node.id",
    "haystack.component.name",
)
"""On any span."""
TITLES: Final = ("invoke_agent ", "execute_tool ", "running tool: ", "agent run ")
"""Words before the name in a span's title."""
TOOL_NAMES: Final = (TOOL_NAME, "tool.name", "traceloop.entity.name", "haystack.tool.name", "tool_name")
TOOL_CALL_IDS: Final = (TOOL_CALL_ID, "tool_call.id", "tool.id")
TOOL_ARGUMENTS: Final = (
    TOOL_CALL_ARGUMENTS,
    "tool_arguments",
    "input.value",
    "traceloop.entity.input",
    "tool.parameters",
    "haystack.agent.step.tool.input",
    "gen_ai.tool.message content",
)
TOOL_RESULTS: Final = (
    TOOL_CALL_RESULT,
    "tool_response",
    "output.value",
    "traceloop.entity.output",
    "haystack.agent.step.tool.output",
    "gen_ai.choice message",
)
TOOL_EVENTS: Final = frozenset({"gen_ai.tool.message", "gen_ai.choice"})
"""Events of a tool's span: the older way of the GenAI conventions, and Strands'."""


def read_kind(attributes: Mapping[str, Any]) -> Kind:
    """The kind that the span names."""
    for key, kinds in KINDS.items():
        if key in attributes:
            return kinds.get(str(attributes[key]), Kind.OTHER)
    if attributes.get(TOOL_NAME) or attributes.get("haystack.tool.name"):
        return Kind.TOOL
    if attributes.get("span.type") == "tool" and attributes.get("tool_name"):  # Claude Code
        return Kind.TOOL
    return Kind.MODEL if attributes.get(REQUEST_MODEL) or attributes.get("llm.model_name") else Kind.UNSAID


def read_agent(name: str, attributes: Mapping[str, Any]) -> str | None:
    """Agent or graph node that the span itself names; an id drawn anew for each run is no name (Agent Framework)."""
    agent = _named_agent(name, attributes)
    return None if agent is None or _UUID.fullmatch(agent) else agent


def _named_agent(name: str, attributes: Mapping[str, Any]) -> str | None:
    node = _graph_node(attributes.get("metadata"))
    if node is not None:
        return node
    for key in AGENT_NAMES:
        if attributes.get(key):
            return str(attributes[key])
    if name.endswith(".run_agent_step"):  # LlamaIndex: no span is the agent's own
        step = _LLAMA_INDEX_AGENT.search(str(attributes.get("input.value") or ""))
        return None if step is None else step[1]
    if read_kind(attributes) is not Kind.AGENT:
        return None
    # smolagents: web_agent.run
    return str(attributes.get("traceloop.entity.name") or "") or _untitled(name).removesuffix(".run") or None


def read_span(
    name: str, attributes: Mapping[str, Any], state: SpanState, events: Sequence[tuple[str, Mapping[str, Any]]] = ()
) -> SpanReading:
    """A span that has ended. `events`: by name, with their attributes."""
    of_tool = [(event, values) for event, values in events if event in TOOL_EVENTS]
    added = {f"{event} {key}": value for event, values in of_tool for key, value in values.items()}
    attributes = {**attributes, **added}
    exceptions = [str(values.get("exception.type", "")) for event, values in events if event == "exception"]
    kind, agent = read_kind(attributes), (read_agent(name, attributes) or "")[:LONGEST_ROLE] or None
    if kind is not Kind.TOOL:
        return SpanReading(kind=kind, agent=agent)
    tool = _first(attributes, TOOL_NAMES) or _untitled(name)
    if _NO_TOOL.fullmatch(tool):
        return SpanReading(kind=Kind.OTHER, agent=agent)
    result, call_id, message_failed = _unwrap(_first(attributes, TOOL_RESULTS))
    error_type = str(attributes.get(ERROR_TYPE) or "")
    message_failed = message_failed or attributes.get("haystack.tool.error") is True
    failed = state is SpanState.ERROR or message_failed or (state is SpanState.UNSET and bool(error_type or exceptions))
    if failed and not error_type and exceptions:
        error_type = exceptions[-1].rpartition(".")[2]
    return SpanReading(
        kind=kind,
        agent=agent,
        tool=tool,
        tool_call_id=_NO_ID.sub("", _first(attributes, TOOL_CALL_IDS)) or call_id,
        arguments=_bare_arguments(_first(attributes, TOOL_ARGUMENTS)),
        result=result,
        status=_status(attributes, error_type, failed=failed),
        error_type=error_type,
    )


_METHOD: Final = re.compile(r"\.(?:__call__|_?a?(?:call|run|invoke|forward|execute)(?:_core|_async)?|tool)$")
"""The wrapped method in a span's name that holds nothing else: `search.acall`, `Add._execute_core`."""
_NO_TOOL: Final = re.compile(r"\(.*\)|\[.*\]")
"""Placeholder for a name, in a span that is about no tool or several: `(merged tools)` (Google ADK)."""
_NO_ID: Final = re.compile(r"^<.*>$")
"""Placeholder for an id: `<not specified>`."""
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LLAMA_INDEX_AGENT: Final = re.compile(r"current_agent_name='([^']{1,200})'\)\"\}$")
MOST_VALUES: Final = 1_000_000
"""Values of JSON that is in a text. Each takes 100 bytes or so once read."""
_PYTHON_CALL: Final = frozenset({"args", "kwargs", "sanitize_inputs_outputs"})


def _status(attributes: Mapping[str, Any], error_type: str, *, failed: bool) -> ToolStatus:
    status = attributes.get(TOOL_STATUS)
    if status is not None:
        return ToolStatus(status) if status in {member.value for member in ToolStatus} else ToolStatus.UNKNOWN
    if not failed:
        # Claude Code says it in another span: `read_execution`
        return ToolStatus.UNKNOWN if attributes.get("span.type") == "tool" else ToolStatus.OK
    if attributes.get("pydantic_ai.tool.failure_stage") == "validation":
        return ToolStatus.INVALID_ARGUMENTS
    if error_type in {ToolStatus.INVALID_ARGUMENTS, ToolStatus.UNKNOWN_TOOL}:
        return ToolStatus(error_type)
    kind = error_type.rpartition(".")[2]
    if kind in {"CancelledError", "GeneratorExit"}:  # it was ended, as where the rollout's time is over
        return ToolStatus.UNKNOWN
    is_timeout = kind in {"timeout", "Timeout", "TimeoutError"}
    return ToolStatus.TIMEOUT if is_timeout else ToolStatus.ERROR


def _first(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((as_text(attributes[key]) for key in keys if attributes.get(key) not in (None, "")), "")


def _untitled(name: str) -> str:
    title = next((title for title in TITLES if name.startswith(title)), "")
    return name.removeprefix(title) if title else _METHOD.sub("", name).strip()


def _graph_node(metadata: Any) -> str | None:
    """LangGraph node in a span's metadata: a named agent, else the path of nodes (as by the `langchain` adapter)."""
    fields = parse_attribute(metadata)
    if not isinstance(fields, dict) or not isinstance(fields.get("langgraph_node"), str):
        return None
    if fields.get("lc_agent_name"):
        return str(fields["lc_agent_name"])
    namespace = str(fields.get("langgraph_checkpoint_ns") or "")
    return "/".join(part.partition(":")[0] for part in namespace.split("|") if part) or str(fields["langgraph_node"])


def _bare_arguments(arguments: str) -> str:
    """Unwrap a Python call: `{"args": [], "sanitize_inputs_outputs": true, "kwargs": {…}}` (smolagents),
    `{"kwargs": {…}}` (LlamaIndex, whose tools may also get a `ctx` that is no argument of the model's)."""
    call = parse_attribute(arguments) if '"kwargs"' in arguments else None
    if not isinstance(call, dict) or call.get("args") or not call.keys() <= _PYTHON_CALL:
        return arguments
    kwargs = call.get("kwargs")
    if not isinstance(kwargs, dict):
        return arguments
    return as_text({name: value for name, value in kwargs.items() if name != "ctx" or not str(value).startswith("<")})


def _unwrap(result: str) -> tuple[str, str, bool]:
    """Split a tool message of LangChain's, or a ToolOutput of LlamaIndex's, into content, tool call's id and `failed`.

    Any other result is the content.
    """
    output = parse_attribute(result) if '"is_error"' in result else None
    if isinstance(output, dict) and output.keys() >= {"tool_name", "raw_output", "is_error"}:
        return as_text(output["raw_output"]), "", output["is_error"] is True
    message = parse_attribute(result) if "tool_call_id" in result else None
    message = message.get("output", message) if isinstance(message, dict) else None
    message = message.get("data", message.get("kwargs", message)) if isinstance(message, dict) else None
    if not isinstance(message, dict) or "content" not in message or "tool_call_id" not in message:
        return result, "", False
    return as_text(message["content"]), str(message["tool_call_id"] or ""), message.get("status") == "error"


def parse_attribute(text: Any) -> Any:
    """The JSON in an attribute that holds some; None for a text that is none, or of more than `MOST_VALUES` values."""
    if not isinstance(text, str):
        return text
    if len(text) > MOST_VALUES and sum(map(text.count, "[{,")) > MOST_VALUES:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
