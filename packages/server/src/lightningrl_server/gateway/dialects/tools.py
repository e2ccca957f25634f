"""Tools of a request: which functions the policy is offered, and what the request wants of it (`tool_choice`).

A responses request has more kinds than functions:

{"type": "function", "name": "look"}                               look
{"type": "custom", "name": "exec", "format": …}                    exec, with one argument, its `input`
{"type": "namespace", "name": "team", "tools": [look, ask]}        team.look, as there is another look; ask
{"type": "additional_tools", "tools": […]}, an item of the input   as if they were offered with the others
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar

from lightningrl_server.gateway.dialects.checks import check_count, check_schema, is_nothing
from lightningrl_server.gateway.request import ForcedCall, Refusal

__all__ = [
    "OfferedTools",
    "ToolName",
    "function_tool",
    "hosted_hint",
    "place_tools",
    "read_choice",
    "read_input",
    "read_offer",
    "read_offered",
    "read_tools",
]

T = TypeVar("T")

_HOSTED = re.compile(
    "web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|tool_search|"
    "programmatic_tool_calling|builtin_function"
)
"""Prefixes of the types of tools that a provider's servers run."""
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_MOST_TOOLS = 1024
_FREE, _MUST = ("auto", "validated"), ("required", "any")
_CHOICES = "'auto', 'none', 'required' or a function by its name"


class ToolChoice(NamedTuple):
    """A `tool_choice`, read."""

    forced: ForcedCall | None = None
    """None = the policy is free to call a tool or not."""
    allow_tools: bool = True
    """False = what looks like a call stays text."""


class ToolOffer(TypedDict, total=False):
    """Fields of a `CallRequest` that its tools decide; none where it offers none and wants none."""

    tools: tuple[dict[str, Any], ...] | None
    left_out: tuple[str, ...]
    forced: ForcedCall | None
    allow_tools: bool


def read_offer(
    tools: Sequence[dict[str, Any]] | None,
    read: Callable[[dict[str, Any], str], dict[str, Any]],
    wanted: Any,
    *,
    drops_hosted: bool,
    choices: str = _CHOICES,
) -> ToolOffer:
    """The tools of a request, each by `read`, and the `wanted` choice of them. Raises Refusal."""
    if not tools and not wanted and wanted != {}:
        return {}
    places, left_out = place_tools({"tools": tools or ()}, drops_hosted=drops_hosted)
    functions = read_tools(places, read)
    forced, allow_tools = read_choice(wanted, functions, choices=choices)
    return {"tools": functions, "left_out": left_out, "forced": forced, "allow_tools": allow_tools}


def function_tool(where: str, name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A function that the policy is offered, in the one form that all dialects render."""
    if not isinstance(name, str):
        raise Refusal.at(where, "is no function with a name; only functions are supported")
    parts = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in parts.items() if value is not None}}


def place_tools(
    lists: Mapping[str, Sequence[dict[str, Any]]], *, drops_hosted: bool
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """A request's tools by where they stand (`tools[0]`), and the types of those left out: tools that the provider's
    servers run, where the recipe says so and others are offered."""
    places = {f"{name}[{index}]": tool for name, tools in lists.items() for index, tool in enumerate(tools)}
    check_count("tools", list(places), _MOST_TOOLS)
    own = {where: tool for where, tool in places.items() if not _HOSTED.match(str(tool.get("type")))}
    if not drops_hosted or not own:
        return places, ()
    return own, tuple(dict.fromkeys(str(tool["type"]) for where, tool in places.items() if where not in own))


def hosted_hint(kind: Any) -> str:
    """One more remedy for a tool that a provider's servers run; empty for other types."""
    return ', or set policy.hosted_tools = "drop", where others are offered' if _HOSTED.match(str(kind)) else ""


def read_tools(
    tools: Sequence[T] | Mapping[str, T] | None, read: Callable[[T, str], dict[str, Any]]
) -> tuple[dict[str, Any], ...] | None:
    """All tools of a request, read and checked; None where there are none. A mapping names them by place."""
    if not tools:
        return None
    if not isinstance(tools, Mapping):
        tools = {f"tools[{index}]": tool for index, tool in enumerate(tools)}
    check_count("tools", list(tools), _MOST_TOOLS)
    functions: list[dict[str, Any]] = []
    names: set[str] = set()
    for where, tool in tools.items():
        function = read(tool, where)
        name = function["function"]["name"]
        if not _NAME.fullmatch(name):
            raise Refusal.at(where, f"has the name {name!r}; use up to 128 letters, digits, '_' and '-'")
        if name in names:
            raise Refusal.at(where, f"has the name {name!r} of an earlier tool; name each tool once")
        names.add(name)
        _check_parameters(function["function"].get("parameters"), where, name)
        functions.append(function)
    return tuple(functions)


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]] | None, *, choices: str = _CHOICES) -> ToolChoice:
    """A `tool_choice` in the spelling of any API, of the `tools` that are offered. `choices` stand in the refusal.

    "auto"  {"type": "auto"}  None          the policy is free
    "none"  {"type": "none"}                no call is read
    "required"  "any"  {"type": "any"}      a call of any tool
    {"type": "function", "function": {"name": …}}  {"type": "function", "name": …}  {"type": "tool", "name": …}    this
    {"type": "allowed_tools", "mode": "auto" | "required", "tools": […]}      all of those offered, or the one
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if choice == {}:
        raise Refusal.at("tool_choice", f"is empty; use {choices}, or leave it out")
    if is_nothing(choice) or (isinstance(kind, str) and kind in _FREE):
        return ToolChoice()
    if kind == "none":
        return ToolChoice(allow_tools=False)
    if isinstance(kind, str) and kind in _MUST:
        return ToolChoice(_force_call(None, tools))
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools") or choice, tools, choices)
    name = _named_tool(choice) if isinstance(choice, dict) and kind in (None, "function", "tool") else None
    if name is None:
        raise Refusal.at("tool_choice", f"{choice!r} is not supported; use {choices}")
    return ToolChoice(_force_call(name, tools))


def _named_tool(tool: Mapping[str, Any]) -> str | None:
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _allowed(choice: Any, tools: Sequence[Mapping[str, Any]] | None, choices: str) -> ToolChoice:
    """A choice among some of the tools: nothing is asked for where these are all; one that is required is named."""
    mode, listed = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    tools_of = listed if isinstance(listed, list) else ()
    names = {_named_tool(tool) for tool in tools_of if isinstance(tool, dict)}
    if mode not in ("auto", "required") or not names or None in names:
        raise Refusal.at("tool_choice", f"{choice!r} is not supported; use {choices}")
    if names >= {tool["function"]["name"] for tool in tools or ()}:
        return read_choice(mode, tools, choices=choices)
    if mode == "required" and len(names) == 1:
        return ToolChoice(_force_call(names.pop(), tools))
    allowed = f"allows {', '.join(sorted(map(str, names)))} alone of the tools that the policy reads"
    raise Refusal.at("tool_choice", f"{allowed}; offer those tools alone")


def _force_call(name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> ForcedCall:
    """The call that a `tool_choice` asks for, of the tool `name` or (None) of any that is offered."""
    offered = [tool["function"]["name"] for tool in tools or ()]
    if not offered:
        raise Refusal.at("tool_choice", "asks for a tool call, but no tools are offered; send tools, or leave it out")
    if name is not None and name not in offered:
        raise Refusal.at("tool_choice", f"names the tool {name!r}, which is not offered; offered: {', '.join(offered)}")
    return ForcedCall(name if name is not None or len(offered) > 1 else offered[0])


def _check_parameters(schema: Any, where: str, name: str) -> None:
    """A tool takes an object; the schema says which."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise Refusal.at(
            where, f"({name!r}): its parameters are no JSON schema but a {type(schema).__name__}; give an object"
        )
    if schema.get("type", "object") != "object":
        raise Refusal.at(
            where, f"({name!r}): its parameters have the type {schema['type']!r}; a tool takes an 'object'"
        )
    check_schema(schema, f"{where} ({name!r})", param=where)


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
