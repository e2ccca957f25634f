"""Arguments of a tool call: JSON text ⇄ value, and the texts among them in markup that puts no quotes around text.

The schema of the tool says which arguments are text:

<parameter=order>\\n0123\\n</parameter>          a string     ─► "0123", not 123
<parameter=code>\\n    x = 1\\n</parameter>      a string     ─► "    x = 1", with its indentation
<parameter=count>\\n3\\n</parameter>            an integer   ─► 3
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lightningrl.sanitize import is_deeper

__all__ = ["MAX_DEPTH", "TooDeep", "is_utf8", "parse_arguments", "with_texts", "write_arguments"]

MAX_DEPTH = 64
"""Lists and objects within each other in a tool call's arguments; beyond it, what a policy says is no tool call."""

_VALUES = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>"  # Qwen3.5, Nemotron
    r'|<parameter name="([^"]+)">(.*?)</parameter>'  # MiniMax
    r"|<arg_key(?::\w+)?>(.*?)</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>(.*?)</arg_value(?::\w+)?>",  # GLM, Laguna, Hy3
    re.DOTALL,
)
_KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    str: "string",
}


class TooDeep(ValueError):
    """Arguments nested beyond `MAX_DEPTH`."""

    def __init__(self) -> None:
        super().__init__(f"arguments nested more than {MAX_DEPTH} deep; flatten them")


def parse_arguments(arguments: str) -> Any:
    """A tool call's arguments as a value; text that is no JSON, or that no UTF-8 can carry, stays text. Raises
    TooDeep."""
    try:
        value = json.loads(arguments)
    except RecursionError:
        raise TooDeep from None
    except ValueError:
        return arguments
    if arguments.count("{") + arguments.count("[") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise TooDeep
    return value if "\\" not in arguments or is_utf8(value) else arguments


def write_arguments(arguments: dict[str, Any]) -> str | None:
    """A tool call's arguments as JSON text; None for numbers JSON lacks (NaN, Infinity), or nested too deeply."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if text.count("{") + text.count("[") > MAX_DEPTH and is_deeper(arguments, MAX_DEPTH):
        return None
    return text if text.isascii() or is_utf8(arguments) else json.dumps(arguments)


def is_utf8(value: Any) -> bool:
    """True for a value whose texts UTF-8 can carry: no lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def with_texts(arguments: dict[str, Any], markup: str, schema: Any) -> dict[str, Any]:
    """Arguments as the tool takes them, where its schema has a text for what a parser took for JSON or trimmed."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return arguments
    typed = dict(arguments)
    for match in _VALUES.finditer(markup):
        key, text = (part for part in match.groups() if part is not None)
        kinds = _kinds(properties.get(key))
        if key in typed and "string" in kinds:
            value = typed[key]
            is_text = value == text.strip() if isinstance(value, str) else not _fits(value, kinds)
            typed[key] = text if is_text else value
    return typed


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    kind = _KINDS.get(type(value), "null")
    return (
        kind in kinds
        or (kind == "integer" and "number" in kinds)
        or (kind == "number" and "integer" in kinds and value.is_integer())
    )


def _kinds(schema: Any) -> frozenset[str]:
    """The types that a schema names; empty = it names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    kinds: set[str] = {declared} if isinstance(declared, str) else set(declared or ())
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {_KINDS.get(type(value), "null") for value in schema["enum"]}
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(branch)
    return frozenset(kinds)
