"""Automatic intermediate rewards from what a call's tools are called with.

ValidArguments    ok where the arguments are an object that fits the tool's schema, else error
RepeatedCalls     -charge for the tool and arguments of an earlier call of the episode
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lightningrl.rewards.json_schema import build_check
from lightningrl.rewards.tools import canonical, mean_over_tools
from lightningrl.types import ToolCall, ToolStatus, Trajectory

__all__ = ["RepeatedCalls", "ValidArguments"]

_REFUSED = frozenset({ToolStatus.INVALID_ARGUMENTS, ToolStatus.UNKNOWN_TOOL})


class ValidArguments:
    """Each call gets the mean over its tools. Not valid: what the framework refused (invalid_arguments, unknown_tool), what is no JSON
    object, what does not fit the tool's schema. None without tools, or where nobody told arguments or status."""

    def __init__(self, *, ok: float = 0.0, error: float = -0.1, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`schemas`: JSON schema of the arguments by the tool's name; a tool without one may be called with any object."""
        self.ok = ok
        self.error = error
        self._checks: dict[str, Callable[[Any], bool]] = {
            name: build_check(schema, what=f"the schema of tool {name!r}") for name, schema in (schemas or {}).items()
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, self._value)

    def _value(self, tool: ToolCall) -> float | None:
        if tool.status in _REFUSED:
            return self.error
        if not tool.arguments:  # nobody told; a call without arguments has {}
            return None if tool.status is ToolStatus.UNKNOWN else self.ok
        try:
            arguments = json.loads(tool.arguments)
        except (ValueError, RecursionError):
            return self.error
        check = self._checks.get(tool.name)
        is_valid = isinstance(arguments, dict) and (check is None or check(arguments))
        return self.ok if is_valid else self.error


class RepeatedCalls:
    """Charges a call for each of its tools that was called before in the episode, by any call, with the same arguments: the mean of
    -`charge` and 0.0. None without tools whose arguments are known."""

    def __init__(self, *, charge: float = 0.1) -> None:
        self.charge = charge

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        first: dict[tuple[str, str], ToolCall] = {}
        for tool in trajectory.tool_calls:
            first.setdefault(_key(tool), tool)

        def value_of(tool: ToolCall) -> float | None:
            if not tool.arguments:
                return None
            return 0.0 if first[_key(tool)] is tool else -self.charge

        return mean_over_tools(trajectory, value_of)


def _key(tool: ToolCall) -> tuple[str, str]:
    return tool.name, canonical(tool.arguments)
