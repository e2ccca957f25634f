"""Automatic intermediate rewards from the arguments that a call's tools are called with.

ValidArguments    ok where the arguments are an object that fits the schema that the call was offered, else error
RepeatedCalls     -charge for the tool and arguments of an earlier call of the episode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightningrl.tool_schemas import build_check, canonical, fits, load_jsonschema, offered_check
from lightningrl.types import ToolCall, ToolStatus, Trajectory
from lightningrl_credit.rewards.tools import mean_over_tools, tools_of_calls, value_over_tools

__all__ = ["RepeatedCalls", "ValidArguments"]

_REFUSED = frozenset({ToolStatus.INVALID_ARGUMENTS, ToolStatus.UNKNOWN_TOOL})


class ValidArguments:
    """Gives each call the mean over its tools; None without tools, or where nobody told arguments or status.

    Not valid are arguments that the framework refused (invalid_arguments, unknown_tool), that are no JSON object, or
    that do not fit the schema that the call's own request gave for the tool.
    """

    def __init__(
        self,
        *,
        ok: float = 0.0,
        error: float = -0.1,
        offered: bool = True,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`schemas`: JSON schema of the arguments by the tool's name, in place of the one that was offered; `offered`
        False = no other ones. A tool without one may be called with any object.
        """
        self.ok = ok
        self.error = error
        self.offered = offered
        self._checks: dict[str, Callable[[Any], bool]] = {
            name: build_check(schema, what=f"the schema of tool {name!r}") for name, schema in (schemas or {}).items()
        }
        if offered:
            load_jsonschema("what tools are called with ('offered' of 'valid_arguments')")

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        of_calls = zip(trajectory.transitions, tools_of_calls(trajectory), strict=True)
        return [
            value_over_tools(call, tools, partial(self._value, offered=call.offered if self.offered else ""))
            for call, tools in of_calls
        ]

    def _value(self, tool: ToolCall, offered: str) -> float | None:
        if tool.status in _REFUSED:
            return self.error
        if not tool.arguments:  # nobody told; a call without arguments has {}
            return None if tool.status is ToolStatus.UNKNOWN else self.ok
        is_valid = fits(tool.arguments, self._checks.get(tool.name) or offered_check(tool.name, offered))
        return self.ok if is_valid else self.error


class RepeatedCalls:
    """Charges a call for its tools that were called before in the episode, by any call, with the same arguments.

    The mean of -`charge` and 0.0 over its tools; None without tools whose arguments are known.
    """

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
