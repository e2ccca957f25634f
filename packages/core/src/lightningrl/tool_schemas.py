"""Arguments of tools: the text that equal ones share, and the JSON schemas that tools are offered with.

`jsonschema`, which checks them, comes with the extra `server`; it is loaded where the first schema is.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lightningrl.conventions import parse_attribute
from lightningrl.errors import ConfigError

__all__ = [
    "build_check",
    "canonical",
    "fit_offered",
    "fits",
    "is_offered",
    "load_jsonschema",
    "offered_check",
    "without_fill",
]

logger = logging.getLogger(__name__)


def canonical(arguments: str) -> str:
    """Write equal arguments as equal texts: JSON with sorted keys and no spaces; other text as it is."""
    value = parse_attribute(arguments)
    try:
        return arguments if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return arguments


def load_jsonschema(what: str) -> Any:
    """Import the library. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module("jsonschema")
    except ImportError:
        raise ConfigError(
            f"{what} cannot be checked: jsonschema is not installed; pip install 'lightningrl[server]'"
        ) from None


def build_check(schema: Mapping[str, Any], *, what: str) -> Callable[[Any], bool]:
    """Build a check of values. Raises ConfigError where the library is missing, or the schema is none."""
    jsonschema = load_jsonschema(what)
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{what} is no JSON schema: {error.message}; mend it") from None
    registry = importlib.import_module("jsonschema_specifications").REGISTRY  # a reference fetches nothing
    validator = kind(schema, registry=registry)

    def check(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except RecursionError:
            return False

    return check


def is_offered(name: str, offered: str) -> bool:
    """True for a tool of `Transition.offered`, and for any where that was not recorded."""
    return not offered or name in _offered_schemas(offered)


def fit_offered(name: str, arguments: str, offered: str) -> bool:
    """True for arguments that are an object and fit the tool's schema in `Transition.offered`, if it has one."""
    return fits(arguments, offered_check(name, offered))


def fits(text: str, check: Callable[[Any], bool] | None) -> bool:
    """True for the JSON of an object that passes the check."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and (check is None or check(arguments))


@lru_cache(maxsize=64)
def _offered_schemas(offered: str) -> Mapping[str, Mapping[str, Any] | None]:
    """Schemas of `Transition.offered`, by the tool's name."""
    schemas: dict[str, Mapping[str, Any] | None] = json.loads(offered or "{}")
    return schemas


@lru_cache(maxsize=1024)
def offered_check(name: str, offered: str) -> Callable[[Any], bool] | None:
    """Check of a tool of `Transition.offered`; None where it came without a schema."""
    schema = _offered_schemas(offered).get(name)
    return None if schema is None else _check_offered(name, schema)


def _check_offered(name: str, schema: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Check by an agent's schema; any object fits one that is broken or has patterns of another language."""
    try:
        check = build_check(schema, what=f"the schema that was offered for tool {name!r}")
    except ConfigError as error:
        logger.warning("valid_arguments: %s; any object is taken", error)
        return lambda _: True

    is_warned = False

    def fits(arguments: Any) -> bool:
        nonlocal is_warned
        try:
            return check(arguments)
        except Exception as error:  # noqa: BLE001 — whatever the library makes of it
            if not is_warned:
                logger.warning(
                    "valid_arguments: the schema offered for tool %r cannot be used (%s); any object is taken",
                    name,
                    error,
                )
            is_warned = True
            return True

    return fits


def without_fill(messages: Sequence[Any], tools: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Take out the nulls that Arrow writes into a row for keys of other rows: those in schemas, and those in a call's
    arguments (an object, not JSON text) that its tool's schema has no place for. Returns messages and tools."""
    offered = [_plain(tool) for tool in tools]
    functions = [tool.get("function", tool) for tool in offered if isinstance(tool, Mapping)]
    schemas = {each.get("name"): each.get("parameters") for each in functions if isinstance(each, Mapping)}

    def mend(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        arguments = _fitting(function["arguments"], schemas.get(function.get("name")))
        return {**call, "function": {**function, "arguments": arguments}}

    calls = [message.get("tool_calls") if isinstance(message, Mapping) else None for message in messages]
    return [
        {**message, "tool_calls": [mend(call) for call in listed]} if isinstance(listed, list) else message
        for message, listed in zip(messages, calls, strict=True)
    ], offered


def _plain(schema: Any) -> Any:
    """A schema without nulls, but for a default or a constant that is one."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("default", "const", "enum") else _plain(value)
        for key, value in schema.items()
        if value is not None or key in ("default", "const")
    }


def _fitting(value: Any, schema: Any) -> Any:
    """A value without the nulls of objects whose schema has no place for them."""
    of = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_fitting(item, of.get("items")) for item in value]
    properties = of.get("properties")
    if not isinstance(value, Mapping) or not isinstance(properties, Mapping):
        return value
    return {
        key: _fitting(inner, properties.get(key))
        for key, inner in value.items()
        if inner is not None or _may_be_null(properties.get(key))
    }


def _may_be_null(schema: Any) -> bool:
    """False for a property that there is not, and for one of other types."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    ways = [way for key in ("anyOf", "oneOf") for way in schema.get(key) or ()]
    if schema.get("nullable") or kinds == "null" or (isinstance(kinds, list) and "null" in kinds):
        return True
    return any(map(_may_be_null, ways)) if ways else kinds is None
