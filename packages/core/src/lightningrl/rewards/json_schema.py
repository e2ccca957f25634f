"""JSON schemas, checked with the library `jsonschema`, which comes with the extra `server`.

JsonSchema    1.0 where the text at `field` is JSON that fits the schema, else 0.0
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.rewards.fields import Extract, pick, text_of
from lightningrl.types import Task, Trajectory

__all__ = ["JsonSchema", "build_check", "load_jsonschema"]


def load_jsonschema(what: str) -> Any:
    """The library. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module("jsonschema")
    except ImportError:
        raise ConfigError(f"{what} cannot be checked: jsonschema is not installed; pip install 'lightningrl[server]'") from None


def build_check(schema: Mapping[str, Any], *, what: str) -> Callable[[Any], bool]:
    """Whether a value fits. Raises ConfigError where the library is missing, or the schema is none."""
    jsonschema = load_jsonschema(what)
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{what} is no JSON schema: {error.message}; mend it") from None
    validator = kind(schema, registry=importlib.import_module("jsonschema_specifications").REGISTRY)  # a reference fetches nothing

    def check(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except RecursionError:
            return False

    return check


class JsonSchema:
    """1.0 where the output, or the text of it that `field` and `extract` take, is JSON that fits `schema`."""

    def __init__(self, *, schema: Mapping[str, Any], field: str | None = None, extract: str | None = None) -> None:
        self.field = field
        self._extract = Extract(extract)
        self._check = build_check(schema, what="reward 'json_schema': `schema`")

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        value = pick(output, self.field)
        if isinstance(value, str):
            try:
                value = json.loads(self._extract(text_of(value)), parse_constant=_refuse)
            except (ValueError, RecursionError):
                return 0.0
        return float(self._check(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")  # Python's own reader takes NaN and Infinity
