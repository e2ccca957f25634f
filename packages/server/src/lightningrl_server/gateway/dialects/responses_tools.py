"""Tools of a responses request, as the functions that the policy is offered.

{"type": "function", "name": "look"}                               look
{"type": "custom", "name": "exec", "format": …}                    exec, with one argument, its `input`
{"type": "namespace", "name": "team", "tools": [look, ask]}        team.look, as there is another look; ask
{"type": "additional_tools", "tools": […]}, an item of the input   as if they were offered with the others
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from lightningrl_server.gateway.dialects.tools import function_tool, hosted_hint, place_tools, read_tools
from lightningrl_server.gateway.request import Refusal

__all__ = ["OfferedTools", "ToolName", "read_input", "read_offered"]


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the agent knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Its input is text, where a function's is JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTools:
    """The tools of a request."""

    functions: tuple[dict[str, Any], ...] | None
    """None = there are none."""
    left_out: tuple[str, ...]
    """Types of the provider's own tools that the policy is not offered."""
    _names: Mapping[str, ToolName] = field(default_factory=dict[str, ToolName])

    def known_as(self, name: str) -> ToolName:
        """The tool that the policy calls by this name."""
        return self._names.get(name, ToolName(name))

    def name_of(self, name: str, namespace: Any) -> str:
        """The name of an agent's tool for the policy."""
        if not isinstance(namespace, str) or not namespace:
            return name
        same = (own for own, tool in self._names.items() if (tool.name, tool.namespace) == (name, namespace))
        return next(same, f"{namespace}.{name}")


class _Entry(NamedTuple):
    tool: Mapping[str, Any]
    namespace: str | None


def read_offered(
    tools: Sequence[dict[str, Any]] | None, items: Sequence[Mapping[str, Any]], *, drops_hosted: bool
) -> OfferedTools:
    """Tools of the request and those of its `additional_tools` items. Raises Refusal."""
    places, left_out = place_tools({"tools": tools or (), **_additional(items)}, drops_hosted=drops_hosted)
    listed = {where: entry for place, tool in places.items() for where, entry in _flatten(tool, place, None)}
    counts = Counter(str(entry.tool.get("name")) for entry in listed.values())
    names: dict[str, ToolName] = {}

    def read(entry: _Entry, where: str) -> dict[str, Any]:
        function = _function(entry.tool, where)
        name = function["function"]["name"]
        own = name if entry.namespace is None or counts[name] == 1 else f"{entry.namespace}.{name}"
        names[own] = ToolName(name, entry.namespace, entry.tool.get("type") == "custom")
        return {**function, "function": {**function["function"], "name": own}}

    return OfferedTools(functions=read_tools(listed, read), left_out=left_out, _names=names)


def _additional(items: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[dict[str, Any]]]:
    """Lists of tools within the input, by their place; of those that are offered again the last."""
    offered: dict[str, Sequence[dict[str, Any]]] = {}
    for index, item in enumerate(items):
        if item.get("type") != "additional_tools":
            continue
        tools, place = item.get("tools"), f"input[{index}].tools"
        if not _are_tools(tools):
            raise Refusal(f"{place} is no list of tools", param=f"input[{index}]")
        labels = [*map(_label, tools)]
        for where, earlier in offered.items():
            offered[where] = [tool for tool in earlier if _label(tool) not in labels]
        offered[place] = tools
    return offered


def _are_tools(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(tool, dict) for tool in value)


def _label(tool: Mapping[str, Any]) -> tuple[str, str]:
    return str(tool.get("type")), str(tool.get("name"))


def _flatten(tool: Mapping[str, Any], where: str, namespace: str | None) -> Iterator[tuple[str, _Entry]]:
    if tool.get("type") != "namespace":
        yield where, _Entry(tool, namespace)
        return
    name, inner = tool.get("name"), tool.get("tools") or []
    if namespace is not None or not isinstance(name, str) or not _are_tools(inner):
        raise Refusal.at(where, "is no namespace with a name and a list of functions")
    for index, function in enumerate(inner):
        yield from _flatten(function, f"{where}.tools[{index}]", name)


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        text = {"type": "string", "description": "The tool's input, as it is."}
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return function_tool(where, tool.get("name"), _with_format(tool), parameters)
    if kind != "function":
        remedy = f"give the agent a function tool for it{hosted_hint(kind)}"
        raise Refusal.at(where, f"is of type {kind!r}; only functions are supported: {remedy}")
    return function_tool(where, tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _with_format(tool: Mapping[str, Any]) -> str | None:
    """The description, and the grammar of the input, which is shown: sampling is not constrained."""
    description, wanted = tool.get("description"), tool.get("format")
    if not isinstance(wanted, Mapping) or wanted.get("type") != "grammar":
        return description
    grammar = f"Its input follows this {wanted.get('syntax')} grammar:\n{wanted.get('definition')}"
    return f"{description or ''}\n\n{grammar}".lstrip()


def read_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments that the policy wrote; these themselves where they name none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
