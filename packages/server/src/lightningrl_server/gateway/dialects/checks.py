"""Checks that all dialects share: bodies, ranges, text parts, tools and their schemas, tool-call ids, answer formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from lightningrl.sanitize import is_deeper
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.request import ForcedCall
from lightningrl_server.rendering.arguments import MAX_DEPTH, parse_arguments

__all__ = [
    "DOCUMENTS",
    "Choice",
    "Flag",
    "Number",
    "check_count",
    "check_tool_call_ids",
    "decode_body",
    "format_instruction",
    "function_tool",
    "hosted_hint",
    "is_nothing",
    "join_text",
    "place_tools",
    "read_arguments",
    "read_asked",
    "read_choice",
    "read_stop",
    "read_tools",
    "read_whole",
    "with_instruction",
]

T = TypeVar("T")

Number = int | float | None
"""A whole number as clients send it: `256`, `256.0`, nothing."""
Flag = bool | int | None
"""Yes or no as clients send it: `true`, `1`, nothing."""
DOCUMENTS = ("document", "search_result")
"""Parts that hold a text with a title or an origin."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_HOSTED = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp", "tool_search"),
    *("programmatic_tool_calling", "builtin_function"),
)
"""Prefixes of the types of tools that a provider's servers run."""
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf")
_PLAIN = frozenset({"type", "description", "title", "default", "enum"})
_MAX_SCHEMA_DEPTH = 64
_MOST_MESSAGES = 4096
_MOST_TOOLS = 1024
_MOST_STOPS = 16
_LONGEST_STOP = 1024


def decode_body(decode: Callable[[bytes], T], data: bytes, what: str) -> T:
    """The body as a struct. `what` it should be, for the sentence."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise Refusal(f"the request is no {what}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the request body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise Refusal("the request body is nested too deeply; flatten it", code="invalid_json") from error


def is_nothing(value: Any) -> bool:
    """True for a field that asks for no more than one that is left out: nothing, no, zero, empty, or only such values."""
    if isinstance(value, Mapping):
        return all(map(is_nothing, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_nothing, value))
    return not value


def read_whole(name: str, value: Number, low: int, high: int | None = None) -> int | None:
    """A whole number within bounds, also where it is written as a float; None where nobody says one."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise Refusal(f"{name} is {value}; it must be a whole number", param=name)
        value = int(value)
    if value < low or (high is not None and value > high):
        raise Refusal(f"{name} is {value}; it must be at least {low}" + (f" and at most {high}" if high is not None else ""), param=name)
    return value


def check_count(name: str, items: Sequence[Any] | None, most: int = _MOST_MESSAGES) -> None:
    """No more than can be read in a moment."""
    if items is not None and len(items) > most:
        raise Refusal(f"{name} has {len(items)} entries; send at most {most}", param=name)


def read_stop(name: str, stop: str | Sequence[str | None] | None) -> tuple[str, ...]:
    """Stop strings, without empty ones."""
    stops = [stop] if isinstance(stop, str) else [text for text in stop or () if text]
    check_count(name, stops, _MOST_STOPS)
    for text in stops:
        if len(text.encode()) > _LONGEST_STOP:
            raise Refusal(f"{name} has a text of {len(text.encode())} bytes; stop at one of at most {_LONGEST_STOP}", param=name)
    return tuple(text for text in stops if text)


def read_asked(**settings: Any) -> dict[str, float]:
    """Those of the settings that are numbers; the recipe decides them, so it is no matter if one is none."""
    numbers = {name: value for name, value in settings.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: float(value) for name, value in numbers.items() if -1e9 <= value <= 1e9}


def read_arguments(arguments: Any, where: str) -> Any:
    """A tool call's arguments as a value; empty ones in any spelling are an empty object, text that is no JSON stays text."""
    try:
        value = parse_arguments(arguments.strip()) if isinstance(arguments, str) else arguments
        if value is None or value == [] or (isinstance(value, str) and value.strip() in ("", "null")):
            return {}
        if not is_deeper(value, MAX_DEPTH):
            return value
    except RecursionError:
        pass
    raise Refusal(f"{where} has a tool call whose arguments are nested more than {MAX_DEPTH} deep; flatten them", param=where)


def join_text(content: str | Sequence[Mapping[str, Any] | str] | None, where: str) -> str:
    """The text of a message's content, documents and search results with their titles in paragraphs of their own; parts that are no text
    are refused, as the policy reads text only."""
    if isinstance(content, str):
        return content
    joined, gap = "", ""
    for part in content or ():
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if not isinstance(part, str) and kind in DOCUMENTS:
            joined, gap = "\n\n".join(filter(None, (joined.rstrip(), _document(part, where)))), "\n\n"
            continue
        text = part if isinstance(part, str) else part.get("refusal" if kind == "refusal" else "text")
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise Refusal(f"{where} has a part of type {kind!r}; the policy reads text only", param=f"{where}.content")
        joined, gap = (joined + gap + text.lstrip("\n"), "") if gap and text else (joined + text, gap)
    return joined


def _document(part: Mapping[str, Any], where: str) -> str:
    """Title, origin or context, and text."""
    if part["type"] == "search_result":
        heads, body = (part.get("title"), part.get("source")), part.get("content")
    else:
        source = part.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        key = {"text": "data", "content": "content"}.get(str(kind))
        heads, body = (part.get("title"), part.get("context")), source.get(key) if isinstance(source, Mapping) and key else None
    if not isinstance(body, str | list) or not all(isinstance(inner, str | dict) for inner in body):
        raise Refusal(
            f"{where} has a part of type {part['type']!r} that holds no text; the policy reads text only: send the document's text",
            param=f"{where}.content",
        )
    return "\n\n".join([head for head in heads if isinstance(head, str) and head] + [join_text(body, where)])


def function_tool(where: str, name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A function that the policy is offered, in the one form that all dialects render."""
    if not isinstance(name, str):
        raise Refusal(f"{where} is no function with a name; only functions are supported", param=where)
    parts = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in parts.items() if value is not None}}


def place_tools(lists: Mapping[str, Sequence[dict[str, Any]]], *, drops_hosted: bool) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """A request's tools by where they stand (`tools[0]`), and the types of those left out: tools that the provider's servers run, where the
    recipe says so and others are offered."""
    places = {f"{name}[{index}]": tool for name, tools in lists.items() for index, tool in enumerate(tools)}
    check_count("tools", list(places), _MOST_TOOLS)
    own = {where: tool for where, tool in places.items() if not str(tool.get("type")).startswith(_HOSTED)}
    if not drops_hosted or not own:
        return places, ()
    return own, tuple(dict.fromkeys(str(tool["type"]) for where, tool in places.items() if where not in own))


def hosted_hint(kind: Any) -> str:
    """One more remedy for a tool that a provider's servers run; empty for other types."""
    return ', or set policy.hosted_tools = "drop", where others are offered' if str(kind).startswith(_HOSTED) else ""


def read_tools(tools: Sequence[T] | Mapping[str, T] | None, read: Callable[[T, str], dict[str, Any]]) -> tuple[dict[str, Any], ...] | None:
    """All tools of a request, each read and checked; None where there are none. In a mapping they are named by where they stand."""
    if not tools:
        return None
    if not isinstance(tools, Mapping):
        tools = {f"tools[{index}]": tool for index, tool in enumerate(tools)}
    check_count("tools", list(tools), _MOST_TOOLS)
    found: list[dict[str, Any]] = []
    names: set[str] = set()
    for where, tool in tools.items():
        one = read(tool, where)
        name = one["function"]["name"]
        if not _NAME.fullmatch(name):
            raise Refusal(f"{where} has the name {name!r}; use up to 128 letters, digits, '_' and '-'", param=where)
        if name in names:
            raise Refusal(f"{where} has the name {name!r} of an earlier tool; name each tool once", param=where)
        names.add(name)
        _check_parameters(one["function"].get("parameters"), where, name)
        found.append(one)
    return tuple(found)


class Choice(NamedTuple):
    """A `tool_choice`, read."""

    forced: ForcedCall | None = None
    """None = the policy is free to call a tool or not."""
    allow_tools: bool = True
    """False = what looks like a call stays text."""


_FREE, _MUST = ("auto", "validated"), ("required", "any")
_KNOWN_CHOICES = "'auto', 'none', 'required' or a function by its name"


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]] | None, *, known: str = _KNOWN_CHOICES) -> Choice:
    """A `tool_choice` in the spelling of any API, of the `tools` that are offered. `known`: the choices, for the sentence.

    "auto"  {"type": "auto"}  {}  None      the policy is free
    "none"  {"type": "none"}                no call is read
    "required"  "any"  {"type": "any"}      a call of any tool
    {"type": "function", "function": {"name": …}}  {"type": "function", "name": …}  {"type": "tool", "name": …}      of this one
    {"type": "allowed_tools", "mode": "auto" | "required", "tools": […]}      all of those offered, or the one
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if is_nothing(choice) or (isinstance(kind, str) and kind in _FREE):
        return Choice()
    if kind == "none":
        return Choice(allow_tools=False)
    if isinstance(kind, str) and kind in _MUST:
        return Choice(_force_call(None, tools))
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools") or choice, tools, known)
    name = _named_tool(choice) if isinstance(choice, dict) and kind in (None, "function", "tool") else None
    if name is None:
        raise Refusal(f"tool_choice {choice!r} is not supported; use {known}", param="tool_choice")
    return Choice(_force_call(name, tools))


def _named_tool(tool: Mapping[str, Any]) -> str | None:
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _allowed(choice: Any, tools: Sequence[Mapping[str, Any]] | None, known: str) -> Choice:
    """A choice among some of the tools: nothing is asked for where these are all, and one that is required is a named one."""
    mode, listed = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    names = {_named_tool(tool) for tool in listed if isinstance(tool, dict)} if isinstance(listed, list) else set[str | None]()
    if mode not in ("auto", "required") or not names or None in names:
        raise Refusal(f"tool_choice {choice!r} is not supported; use {known}", param="tool_choice")
    if names >= {tool["function"]["name"] for tool in tools or ()}:
        return read_choice(mode, tools, known=known)
    if mode == "required" and len(names) == 1:
        return Choice(_force_call(names.pop(), tools))
    raise Refusal(
        f"tool_choice allows {', '.join(sorted(map(str, names)))} alone of the tools that the policy reads; offer those tools alone",
        param="tool_choice",
    )


def _force_call(name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> ForcedCall:
    """The call that a `tool_choice` asks for, of the tool `name` or (None) of any that is offered."""
    offered = [tool["function"]["name"] for tool in tools or ()]
    if not offered:
        raise Refusal("tool_choice asks for a tool call, but no tools are offered; send tools, or leave it out", param="tool_choice")
    if name is not None and name not in offered:
        raise Refusal(f"tool_choice names the tool {name!r}, which is not offered; offered: {', '.join(offered)}", param="tool_choice")
    return ForcedCall(name if name is not None or len(offered) > 1 else offered[0])


def check_tool_call_ids(messages: Sequence[Mapping[str, Any]], *, goes_on: bool = False, once: bool = False) -> None:
    """Open calls have ids of their own, and a call has one result; else nobody can tell which result belongs to which call. An id may come
    back after its result, as some servers number the calls of each answer anew; with `once` it may not. Empty ids are none.
    `goes_on`: the calls may stand in an earlier answer that these messages follow."""
    open_calls: set[str] = set()
    asked: set[str] = set()
    answered: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                call_id = call.get("id")
                if not call_id:
                    continue
                if call_id in open_calls or (once and call_id in asked):
                    raise Refusal(
                        f"the tool-call id {call_id!r} is used by two calls of the conversation; give each its own", param="messages"
                    )
                open_calls.add(call_id)
                asked.add(call_id)
        elif message["role"] == "tool" and (call_id := message.get("tool_call_id")):
            if call_id not in open_calls and call_id in answered and (goes_on or call_id in asked):
                raise Refusal(f"the tool call {call_id!r} has two results; send one", param="messages")
            open_calls.discard(call_id)
            answered.add(call_id)


def format_instruction(kind: Any, schema: Any, param: str) -> str | None:
    """A sentence for the policy about the format of its answer. Its sampling is not constrained, so that the recorded logprobs hold;
    it reads the format in its prompt, and learns to keep it. None = plain text."""
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return "Answer with one JSON object only, without any text around it."
    if kind != "json_schema":
        raise Refusal(f"the format {kind!r} is not supported; use 'text', 'json_object' or 'json_schema'", param=param)
    if not isinstance(schema, dict):
        raise Refusal(f"{param} has no schema; give a JSON schema as an object", param=param)
    _check_schema(schema, param)
    return f"Answer with JSON only, without any text around it, that fits this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"


def with_instruction(messages: Sequence[dict[str, Any]], instruction: str | None) -> tuple[dict[str, Any], ...]:
    """The conversation with a further instruction at the end of its system message."""
    if instruction is None:
        return tuple(messages)
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return ({**first, "content": f"{first['content']}\n\n{instruction}".lstrip("\n")}, *messages[1:])
    return ({"role": "system", "content": instruction}, *messages)


def _check_parameters(schema: Any, where: str, name: str) -> None:
    """A tool takes an object; the schema says which."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise Refusal(f"{where} ({name!r}): its parameters are no JSON schema but a {type(schema).__name__}; give an object", param=where)
    if schema.get("type", "object") != "object":
        raise Refusal(f"{where} ({name!r}): its parameters have the type {schema['type']!r}; a tool takes an 'object'", param=where)
    _check_schema(schema, f"{where} ({name!r})", param=where)


def _check_schema(schema: Any, where: str, *, param: str | None = None, depth: int = 0) -> None:
    """The parts of JSON schema that a template or an agent would stumble over."""
    if isinstance(schema, dict) and schema.keys() <= _PLAIN and isinstance(schema.get("type"), str) and schema["type"] in _TYPES:
        return  # most of them, and every call sends them again
    problem: str | None = None
    if depth > _MAX_SCHEMA_DEPTH:
        problem = f"is nested more than {_MAX_SCHEMA_DEPTH} deep"
    elif isinstance(schema, bool):
        return
    elif not isinstance(schema, dict):
        problem = f"has {schema!r:.80} where a schema belongs"
    if problem is None:
        problem = _problem(schema)
    if problem is not None:
        raise Refusal(f"{where}: its JSON schema {problem}", param=param or where)
    for inner in _inner(schema):
        _check_schema(inner, where, param=param, depth=depth + 1)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas within a schema."""
    for key in _BY_NAME:
        if key in schema:
            yield from (schema[key] or {}).values()
    for key in _IN_LISTS:
        if key in schema:
            yield from schema[key] or ()
    items = schema.get("items")
    if items is not None and not isinstance(items, list):
        yield items


def _problem(schema: Mapping[str, Any]) -> str | None:
    types = schema.get("type")
    for one in types if isinstance(types, list) else [types]:
        if one is not None and (not isinstance(one, str) or one not in _TYPES):
            return f"has the type {one!r:.80}; known are {', '.join(sorted(_TYPES))}"
    for key in _BY_NAME:
        if not isinstance(schema.get(key) or {}, dict):
            return f"has {key} that are no object"
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(one, str) for one in required)):
        return "has 'required' that is no list of names"
    for key in _IN_LISTS:
        if not isinstance(schema.get(key) or [], list):
            return f"has {key} that is no list"
    return None
