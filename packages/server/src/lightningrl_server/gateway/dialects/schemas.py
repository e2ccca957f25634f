"""JSON schemas of tools and answer formats, as far as a template or an agent would stumble over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightningrl_server.gateway.request import Refusal

__all__ = ["check_schema"]

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf")
_PLAIN = frozenset({"type", "description", "title", "default", "enum"})
_MAX_SCHEMA_DEPTH = 64


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
