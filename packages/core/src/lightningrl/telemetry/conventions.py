"""Reads spans of somebody else's instrumentation: an agent's turn, a model's call, a tool's outcome.

Three vocabularies: the GenAI conventions (current and older names), OpenInference, and OpenLLMetry (`traceloop.*`); and Haystack's own.

    gen_ai.operation.name    openinference.span.kind    traceloop.span.kind    ─►  Kind
    gen_ai.agent.name        agent.name, graph.node.*   traceloop.entity.name  ─►  agent
    gen_ai.tool.*            tool.*, input/output.value traceloop.entity.*     ─►  tool, id, arguments, result
    span status, error.type, exception events                                  ─►  ToolStatus
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from lightningrl.roles import LONGEST_ROLE
from lightningrl.sanitize import as_text
from lightningrl.telemetry import semconv
from lightningrl.types import ToolStatus

__all__ = [
    "AskedCall",
    "Kind",
    "SpanReading",
    "SpanState",
    "asked_calls",
    "offered_tools",
    "output_tools",
    "read_agent",
    "read_execution",
    "read_kind",
    "read_span",
    "with_events",
]


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
    semconv.OPERATION_NAME: {
        semconv.CHAT: Kind.MODEL,
        "text_completion": Kind.MODEL,
        "generate_content": Kind.MODEL,
        semconv.INVOKE_AGENT: Kind.AGENT,
        "run_agent": Kind.AGENT,
        semconv.EXECUTE_TOOL: Kind.TOOL,
    },
    "openinference.span.kind": {"AGENT": Kind.AGENT, "LLM": Kind.MODEL, "TOOL": Kind.TOOL},
    "traceloop.span.kind": {"agent": Kind.AGENT, "tool": Kind.TOOL},
    "llm.request.type": {"chat": Kind.MODEL, "completion": Kind.MODEL},
}
"""By the attribute that says it, the first of them that a span has; a value that is not listed is another kind of thing."""

AGENT_NAMES: Final = (semconv.AGENT_NAME, "agent.name", "agent_name", "graph.node.name", "graph.node.id", "haystack.component.name")
"""On any span."""
TITLES: Final = ("invoke_agent ", "execute_tool ", "running tool: ", "agent run ")
"""What goes before the name in a span's title."""
TOOL_NAMES: Final = (semconv.TOOL_NAME, "tool.name", "traceloop.entity.name", "haystack.tool.name", "tool_name")
TOOL_CALL_IDS: Final = (semconv.TOOL_CALL_ID, "tool_call.id", "tool.id")
TOOL_ARGUMENTS: Final = (
    semconv.TOOL_CALL_ARGUMENTS,
    "tool_arguments",
    "input.value",
    "traceloop.entity.input",
    "tool.parameters",
    "haystack.agent.step.tool.input",
    "gen_ai.tool.message content",
)
TOOL_RESULTS: Final = (
    semconv.TOOL_CALL_RESULT,
    "tool_response",
    "output.value",
    "traceloop.entity.output",
    "haystack.agent.step.tool.output",
    "gen_ai.choice message",
)
TOOL_EVENTS: Final = frozenset({"gen_ai.tool.message", "gen_ai.choice"})
"""Events of a tool's span: the older way of the GenAI conventions, and Strands'."""


def with_events(attributes: Mapping[str, Any], events: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The attributes, with what the events say of a tool beside them, as `{event} {attribute}`."""
    told = {f"{name} {key}": value for name, said in events if name in TOOL_EVENTS for key, value in said.items()}
    return {**attributes, **told}


def read_kind(attributes: Mapping[str, Any]) -> Kind:
    """The kind that the span names."""
    for key, kinds in KINDS.items():
        if key in attributes:
            return kinds.get(str(attributes[key]), Kind.OTHER)
    if attributes.get(semconv.TOOL_NAME) or attributes.get("haystack.tool.name"):
        return Kind.TOOL
    if attributes.get("span.type") == "tool" and attributes.get("tool_name"):  # Claude Code
        return Kind.TOOL
    return Kind.MODEL if attributes.get(semconv.REQUEST_MODEL) or attributes.get("llm.model_name") else Kind.UNSAID


def read_agent(name: str, attributes: Mapping[str, Any]) -> str | None:
    """The agent or graph node that the span itself names; an id that is drawn anew for each run is no name (Agent Framework)."""
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
    return str(attributes.get("traceloop.entity.name") or "") or _untitled(name).removesuffix(".run") or None  # smolagents: web_agent.run


def read_span(name: str, attributes: Mapping[str, Any], state: SpanState, exceptions: Sequence[str] = ()) -> SpanReading:
    """A span that has ended; `exceptions` are the types that its events name."""
    kind, agent = read_kind(attributes), (read_agent(name, attributes) or "")[:LONGEST_ROLE] or None
    if kind is not Kind.TOOL:
        return SpanReading(kind=kind, agent=agent)
    tool = _first(attributes, TOOL_NAMES) or _untitled(name)
    if _NO_TOOL.fullmatch(tool):
        return SpanReading(kind=Kind.OTHER, agent=agent)
    result, call_id, message_failed = _unwrap(_first(attributes, TOOL_RESULTS))
    error_type = str(attributes.get(semconv.ERROR_TYPE) or "")
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


def read_execution(attributes: Mapping[str, Any]) -> ToolStatus | None:
    """How the tool of the span around this one went: Claude Code says it in a span of its own. None = this is none."""
    if attributes.get("span.type") != "tool.execution" or "success" not in attributes:
        return None
    return ToolStatus.OK if str(attributes["success"]).lower() == "true" else ToolStatus.ERROR


def asked_calls(attributes: Mapping[str, Any]) -> list[AskedCall]:
    """The tool calls that the answer in a model's span asks for."""
    messages = _parse(attributes.get("gen_ai.output.messages"))
    if isinstance(messages, list):
        parts = [part for message in messages if isinstance(message, dict) for part in message.get("parts") or ()]
        return [
            AskedCall(id=str(part.get("id") or ""), name=str(part.get("name") or ""), arguments=as_text(part.get("arguments", "")))
            for part in parts
            if isinstance(part, dict) and part.get("type") == "tool_call"
        ]
    found: list[AskedCall] = []
    for prefix, (call_id, name, arguments) in FLAT_ANSWERS.items():
        for key in attributes:
            if key.startswith(prefix) and key.endswith(f".{name}"):
                stem = key.removesuffix(name)
                found.append(
                    AskedCall(
                        id=str(attributes.get(stem + call_id) or ""),
                        name=str(attributes[key]),
                        arguments=as_text(attributes.get(stem + arguments, "")),
                    )
                )
    return found


def offered_tools(attributes: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of the tools that a model was offered; None = the span does not say."""
    definitions = _parse(attributes.get("gen_ai.tool.definitions"))
    if not isinstance(definitions, list):
        schemas = [value for key, value in attributes.items() if key.startswith("llm.tools.") and key.endswith(".tool.json_schema")]
        definitions = [_parse(schema) for schema in schemas]
    functions = [one.get("function", one) for one in definitions if isinstance(one, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(map(str, names)) if names else None


def output_tools(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Names of those tools that are the type of an agent's answer (Pydantic AI)."""
    parameters = _parse(attributes.get("model_request_parameters"))
    tools = parameters.get("output_tools") if isinstance(parameters, dict) else None
    return frozenset(str(tool.get("name")) for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else frozenset()


_METHOD: Final = re.compile(r"\.(?:__call__|_?a?(?:call|run|invoke|forward|execute)(?:_core|_async)?|tool)$")
"""The method that an instrumentation wraps, in a span that it names for nothing else: `search.acall`, `Add._execute_core`."""
_NO_TOOL: Final = re.compile(r"\(.*\)|\[.*\]")
"""What an instrumentation writes where a name belongs, of a span that is about no tool or several: `(merged tools)` (Google ADK)."""
_NO_ID: Final = re.compile(r"^<.*>$")
"""The same for an id: `<not specified>`."""
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LLAMA_INDEX_AGENT: Final = re.compile(r"current_agent_name='([^']{1,200})'\)\"\}$")
_PYTHON_CALL: Final = frozenset({"args", "kwargs", "sanitize_inputs_outputs"})
FLAT_ANSWERS: Final = {
    "llm.output_messages.": ("tool_call.id", "tool_call.function.name", "tool_call.function.arguments"),
    "gen_ai.completion.": ("id", "name", "arguments"),
}
"""Answers as numbered attributes: `llm.output_messages.0.message.tool_calls.0.tool_call.id`, `gen_ai.completion.0.tool_calls.0.id`."""


def _status(attributes: Mapping[str, Any], error_type: str, *, failed: bool) -> ToolStatus:
    said = attributes.get(semconv.TOOL_STATUS)
    if said is not None:
        return ToolStatus(said) if said in {one.value for one in ToolStatus} else ToolStatus.UNKNOWN
    if not failed:
        return ToolStatus.UNKNOWN if attributes.get("span.type") == "tool" else ToolStatus.OK  # Claude Code: `read_execution` says
    if attributes.get("pydantic_ai.tool.failure_stage") == "validation":
        return ToolStatus.INVALID_ARGUMENTS
    if error_type in {ToolStatus.INVALID_ARGUMENTS, ToolStatus.UNKNOWN_TOOL}:
        return ToolStatus(error_type)
    return ToolStatus.TIMEOUT if error_type.rpartition(".")[2] in {"timeout", "Timeout", "TimeoutError"} else ToolStatus.ERROR


def _first(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((as_text(attributes[key]) for key in keys if attributes.get(key) not in (None, "")), "")


def _untitled(name: str) -> str:
    title = next((title for title in TITLES if name.startswith(title)), "")
    return name.removeprefix(title) if title else _METHOD.sub("", name).strip()


def _graph_node(metadata: Any) -> str | None:
    """The LangGraph node in a span's metadata: a named agent, else the path of nodes, as the `langchain` adapter names it."""
    found = _parse(metadata)
    if not isinstance(found, dict) or not isinstance(found.get("langgraph_node"), str):
        return None
    if found.get("lc_agent_name"):
        return str(found["lc_agent_name"])
    namespace = str(found.get("langgraph_checkpoint_ns") or "")
    return "/".join(part.partition(":")[0] for part in namespace.split("|") if part) or str(found["langgraph_node"])


def _bare_arguments(arguments: str) -> str:
    """Without the wrapping of a Python call: `{"args": [], "sanitize_inputs_outputs": true, "kwargs": {…}}` (smolagents),
    `{"kwargs": {…}}` (LlamaIndex, whose tools may also get a `ctx` that is no argument of the model's)."""
    call = _parse(arguments) if '"kwargs"' in arguments else None
    if not isinstance(call, dict) or not isinstance(call.get("kwargs"), dict) or call.get("args") or not call.keys() <= _PYTHON_CALL:
        return arguments
    kwargs = call["kwargs"]
    return as_text({name: value for name, value in kwargs.items() if name != "ctx" or not str(value).startswith("<")})


def _unwrap(result: str) -> tuple[str, str, bool]:
    """Content, tool call's id, and whether it says that it failed: of a tool message of LangChain's, or a ToolOutput of LlamaIndex's. Any
    other result is as it is."""
    output = _parse(result) if '"is_error"' in result else None
    if isinstance(output, dict) and output.keys() >= {"tool_name", "raw_output", "is_error"}:
        return as_text(output["raw_output"]), "", output["is_error"] is True
    message = _parse(result) if "tool_call_id" in result else None
    message = message.get("output", message) if isinstance(message, dict) else None
    message = message.get("data", message.get("kwargs", message)) if isinstance(message, dict) else None
    if not isinstance(message, dict) or "content" not in message or "tool_call_id" not in message:
        return result, "", False
    return as_text(message["content"]), str(message["tool_call_id"] or ""), message.get("status") == "error"


def _parse(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
