"""Translations between an OpenEnv environment and a chat: observations to text, tools to functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.errors import ConfigError
from lightningrl.types import ToolStatus
from lightningrl_tasks_openenv.wire import SCHEMAS, Observation

__all__ = ["Tool", "opening_messages", "read_action_tool", "read_tools", "tool_result"]

ACT: Final = "act"
"""Name of the one function of an environment without tools: its arguments are the environment's own action."""
PROMPT_FIELDS: Final = ("prompt", "question", "instruction", "task", "message", "text")
"""Fields of a first observation that hold what is asked, the first that is there; its own fields, then its metadata."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
STATUSES: Final = {
    "invalid_args": ToolStatus.INVALID_ARGUMENTS,
    "tool_not_found": ToolStatus.UNKNOWN_TOOL,
    "timeout": ToolStatus.TIMEOUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One function that the model is offered, and the action of the environment that a call of it is."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    is_action: bool = False
    """Its arguments are the environment's own action."""

    @property
    def schema(self) -> dict[str, Any]:
        """Function schema, as chat completions take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def action(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Action of a call."""
        if self.is_action:
            return dict(arguments)
        return {"type": "call_tool", "tool_name": self.name, "arguments": dict(arguments)}


def read_tools(listed: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools of MCP's `tools/list`."""
    return [
        Tool(
            name=str(tool["name"]),
            description=str(tool.get("description") or ""),
            parameters=next(filter(None, map(tool.get, SCHEMAS)), {"type": "object", "properties": {}}),
        )
        for tool in listed
    ]


def read_action_tool(schema: Mapping[str, Any]) -> Tool:
    """The one function of an environment without tools, from the schema of its actions."""
    properties = {name: value for name, value in (schema.get("properties") or {}).items() if name != "metadata"}
    rest = {name: schema[name] for name in ("required", "$defs") if name in schema}
    parameters = {"type": "object", "properties": properties, **rest}
    return Tool(name=ACT, description=str(schema.get("description") or ""), parameters=parameters, is_action=True)


def opening_messages(observation: Observation, *, prompt: str | None, longest: int) -> list[dict[str, Any]]:
    """Messages that an episode begins with: what the first observation asks, or all of it as JSON.

    `prompt`: field that holds it, a text or a list of messages. Raises ConfigError where it is not there."""
    places = (observation.fields, observation.metadata)
    for name in PROMPT_FIELDS if prompt is None else (prompt,):
        values = [place[name] for place in places if place.get(name)]
        if values:
            return _as_messages(values[0], longest)
    if prompt is not None:
        there = ", ".join(sorted({*observation.fields, *observation.metadata})) or "nothing"
        raise ConfigError(
            f"openenv: the first observation has no field {prompt!r}, but {there}; name one of them as prompt"
        )
    return [{"role": "user", "content": shorten(_as_text(observation.fields or observation.metadata), longest)}]


def tool_result(observation: Observation, *, longest: int) -> tuple[str, ToolStatus]:
    """Text of a step's observation, as the tool's result, and what became of the call."""
    fields = observation.fields
    error = fields.get("error")
    if isinstance(error, Mapping) and "tool_name" in fields:
        status = STATUSES.get(str(error.get("error_type")), ToolStatus.ERROR)
        return shorten(f"error: {error.get('message')}", longest), status
    result = fields.get("result") if "tool_name" in fields else (fields or observation.metadata)
    failed = isinstance(result, Mapping) and bool(result.get("is_error"))
    return shorten(_as_text(result), longest), ToolStatus.ERROR if failed else ToolStatus.OK


def shorten(text: str, longest: int) -> str:
    """The text's beginning, and how much of it was left out."""
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest} characters left out)"


def _as_messages(value: Any, longest: int) -> list[dict[str, Any]]:
    if (
        isinstance(value, Sequence)
        and value
        and all(isinstance(message, Mapping) and message.get("role") in ROLES for message in value)
    ):
        return [{**message, "content": shorten(_as_text(message.get("content")), longest)} for message in value]
    return [{"role": "user", "content": shorten(_as_text(value), longest)}]


def _as_text(value: Any) -> str:
    """Plain text where it is one: a text, blocks of text, a tool's result with either; else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        for name in ("content", "blocks"):
            if isinstance(value.get(name), Sequence) and value[name]:
                return _as_text(value[name])
    if (
        isinstance(value, Sequence)
        and value
        and all(isinstance(b, Mapping) and isinstance(b.get("text"), str) for b in value)
    ):
        return "\n".join(block["text"] for block in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
