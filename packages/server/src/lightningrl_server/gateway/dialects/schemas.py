"""Answer formats, and the JSON schemas of them and of tools, as far as a template or an agent would stumble."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightningrl_server.gateway.dialects.checks import is_nothing
from lightningrl_server.gateway.request import AnswerFormat, Refusal

__all__ = ["check_schema", "read_format", "with_instruction"]

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf")
_PLAIN = frozenset({"type", "description", "title", "default", "enum"})
_MAX_SCHEMA_DEPTH = 64
_OF_FORMATS = ("type", "schema", "json_schema", "name", "description", "strict")
"""Keys of an answer's format, in any of the APIs."""


def check_schema(schema: Any, where: str, *, param: str | None = None, depth: int = 0) -> None:
    """Raise Refusal for a schema that is none. Each call sends its schemas, so this is quick and takes older drafts;
    `jsonschema` needs milliseconds, and would refuse draft 4's `"exclusiveMinimum": true`."""
    if isinstance(schema, dict) and schema.keys() <= _PLAIN and isinstance(schema.get("type"), str):
        if schema["type"] in _TYPES:
            return  # most of them
    elif isinstance(schema, bool) and depth <= _MAX_SCHEMA_DEPTH:
        return
    problem = f"is nested more than {_MAX_SCHEMA_DEPTH} deep" if depth > _MAX_SCHEMA_DEPTH else _problem(schema)
    if problem is not None:
        raise Refusal(f"{where}: its JSON schema {problem}", param=param or where)
    for inner in _inner(schema):
        check_schema(inner, where, param=param, depth=depth + 1)


def _problem(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return f"has {schema!r:.80} where a schema belongs"
    types = schema.get("type")
    for kind in types if isinstance(types, list) else [types]:
        if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
            return f"has the type {kind!r:.80}; known are {', '.join(sorted(_TYPES))}"
    for key in _BY_NAME:
        if not isinstance(schema.get(key) or {}, dict):
            return f"has {key} that are no object"
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        return "has 'required' that is no list of names"
    for key in _IN_LISTS:
        if not isinstance(schema.get(key) or [], list):
            return f"has {key} that is no list"
    return None


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas within a schema."""
    for key in _BY_NAME:
        yield from (schema.get(key) or {}).values()
    for key in _IN_LISTS:
        yield from schema.get(key) or ()
    items = schema.get("items")
    if items is not None and not isinstance(items, list):
        yield items


def read_format(wanted: Mapping[str, Any], param: str) -> AnswerFormat | None:
    """The format that a request asks its answer in. The policy reads it in its prompt, because a policy that expects
    its format loses less to being bound to it, and because not every engine binds. None = plain text."""
    kind, named = wanted.get("type"), wanted.get("json_schema")
    parts = {**wanted, **named} if isinstance(named, dict) else wanted
    schema, about = parts.get("schema"), parts.get("description")
    if kind in (None, "text"):
        return None
    if kind == "json_object" and schema not in (None, {}):  # as Together, Fireworks and llama.cpp have it
        kind = "json_schema"
    unread = sorted(key for key, value in wanted.items() if key not in _OF_FORMATS and not is_nothing(value))
    if kind in ("json_object", "json_schema") and unread:
        raise Refusal.at(param, f"has {unread[0]!r}, which is not read; give a JSON schema as its 'schema'")
    if kind == "json_object":
        sentence = "Answer with one JSON object only, without any text around it."
        return AnswerFormat(param=param, schema={"type": "object"}, instruction=sentence)
    if kind != "json_schema":
        raise Refusal(f"the format {kind!r} is not supported; use 'text', 'json_object' or 'json_schema'", param=param)
    if not isinstance(schema, dict):
        raise Refusal.at(param, "has no schema; give a JSON schema as an object")
    check_schema(schema, param)
    shown = json.dumps(schema, ensure_ascii=False)
    sentence = f"Answer with JSON only, without any text around it, that fits this JSON schema:\n{shown}"
    if isinstance(about, str) and about:
        sentence = f"{sentence}\nDescription of the answer: {about}"
    return AnswerFormat(param=param, schema=schema, instruction=sentence)


def with_instruction(messages: Sequence[dict[str, Any]], wanted: AnswerFormat) -> tuple[dict[str, Any], ...]:
    """The conversation with the instruction of a format at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return ({**first, "content": f"{first['content']}\n\n{wanted.instruction}".lstrip("\n")}, *messages[1:])
    return ({"role": "system", "content": wanted.instruction}, *messages)
