"""Reads a model's spans: the tools that it was offered, and the calls that its answer asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightningrl.conventions import AskedCall, parse_attribute
from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus

__all__ = ["asked_calls", "offered_tools", "output_tools", "read_execution"]

FLAT_ANSWERS: Final = {
    "llm.output_messages.": ("tool_call.id", "tool_call.function.name", "tool_call.function.arguments"),
    "gen_ai.completion.": ("id", "name", "arguments"),
}
"""Answers as numbered attributes: `llm.output_messages.0.message.tool_calls.0.tool_call.id`,
`gen_ai.completion.0.tool_calls.0.id`."""


def read_execution(attributes: Mapping[str, Any]) -> ToolStatus | None:
    """Outcome of the tool of the span around: Claude Code says it in a span of its own. None = this is no such span."""
    if attributes.get("span.type") != "tool.execution" or "success" not in attributes:
        return None
    return ToolStatus.OK if str(attributes["success"]).lower() == "true" else ToolStatus.ERROR


def asked_calls(attributes: Mapping[str, Any]) -> list[AskedCall]:
    """The tool calls that the answer in a model's span asks for."""
    messages = parse_attribute(attributes.get("gen_ai.output.messages"))
    if isinstance(messages, list):
        parts = [part for message in messages if isinstance(message, dict) for part in message.get("parts") or ()]
        calls = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_call"]
        return [_asked_call(call.get("id"), call.get("name"), call.get("arguments", "")) for call in calls]
    asked: list[AskedCall] = []
    for prefix, (call_id, name, arguments) in FLAT_ANSWERS.items():
        for key in attributes:
            if key.startswith(prefix) and key.endswith(f".{name}"):
                stem = key.removesuffix(name)
                call = attributes.get(stem + call_id), attributes[key], attributes.get(stem + arguments, "")
                asked.append(_asked_call(*call))
    return asked


def offered_tools(attributes: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of the tools that a model was offered; None = the span does not say."""
    definitions = parse_attribute(attributes.get("gen_ai.tool.definitions"))
    if not isinstance(definitions, list):
        keys = [key for key in attributes if key.startswith("llm.tools.") and key.endswith(".tool.json_schema")]
        definitions = [parse_attribute(attributes[key]) for key in keys]
    functions = [tool.get("function", tool) for tool in definitions if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(map(str, names)) if names else None


def output_tools(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Names of those tools that are the type of an agent's answer (Pydantic AI)."""
    parameters = parse_attribute(attributes.get("model_request_parameters"))
    tools = parameters.get("output_tools") if isinstance(parameters, dict) else None
    return (
        frozenset(str(tool.get("name")) for tool in tools if isinstance(tool, dict))
        if isinstance(tools, list)
        else frozenset()
    )


def _asked_call(call_id: Any, name: Any, arguments: Any) -> AskedCall:
    return AskedCall(id=str(call_id or ""), name=str(name or ""), arguments=as_text(arguments))
