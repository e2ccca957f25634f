"""Tools of a call: where all intermediate rewards find the call that they pay (docs/credit/intermediate.md), and those
that pay for how tools ended and what they were called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lightningrl.tool_schemas import build_check, canonical, fits, load_jsonschema, offered_check
from lightningrl.types import ToolCall, ToolStatus, Trajectory, Transition

__all__ = [
    "ExecutionErrors",
    "RepeatedCalls",
    "ToolStatusReward",
    "ToolStatusShaping",
    "ValidArguments",
    "mean_over_tools",
    "tools_of_calls",
    "value_over_tools",
]


def tools_of_calls(trajectory: Trajectory) -> list[list[ToolCall]]:
    """Invocations that each transition asked for, in order of time; one that nobody asked for is in none.

    The model's tool-call id says who asked; where it says nothing, whoever told the invocation.
    """
    of_call: dict[str, list[ToolCall]] = {transition.id: [] for transition in trajectory.transitions}
    asked_by = {call_id: transition.id for transition in trajectory.transitions for call_id in transition.tool_call_ids}
    for tool in trajectory.tool_calls:
        asker = asked_by.get(tool.id) or tool.transition_id
        if asker in of_call:
            of_call[asker].append(tool)
    return [of_call[transition.id] for transition in trajectory.transitions]


def mean_over_tools(trajectory: Trajectory, value_of: Callable[[ToolCall], float | None]) -> list[float | None]:
    """Value of each transition over its tools (`value_over_tools`); None where none of them has a value."""
    return [
        value_over_tools(call, tools, value_of)
        for call, tools in zip(trajectory.transitions, tools_of_calls(trajectory), strict=True)
    ]


def value_over_tools(
    call: Transition, tools: Sequence[ToolCall], value_of: Callable[[ToolCall], float | None]
) -> float | None:
    """Mean over the tools that the call's answer asked for by id, so that several in one call pay no more than one.

    Tools that were only told to be of the call, however many, may lower that and never raise it; without a value of an
    asked one, the worst of them counts.
    """
    # Asked and failed: -0.1. An agent that tells 99 more of the call, all of them ok, still has -0.1.
    asked = [value for tool in tools if tool.id in call.tool_call_ids and (value := value_of(tool)) is not None]
    unasked = [value for tool in tools if tool.id not in call.tool_call_ids and (value := value_of(tool)) is not None]
    of_asked = mean(asked)
    if not unasked:
        return of_asked
    worst = min(unasked)
    return worst if of_asked is None else min(of_asked, (sum(asked) + worst) / (len(asked) + 1))


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None; exactly the value where all are equal, None where there is none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers)


class ToolStatusReward:
    """Gives each call the mean of its tools' values; None without tools, or where nobody knows their status."""

    def __init__(self, *, ok: float = 0.1, error: float = -0.1) -> None:
        """`ok` above 0 pays for calling tools, needed or not; where that is exploited, set it to 0 or take the
        potential form. `error` is for error, unknown_tool, invalid_arguments and timeout.
        """
        self._values: dict[ToolStatus, float] = {
            status: ok if status is ToolStatus.OK else error
            for status in ToolStatus
            if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))


class ToolStatusShaping(ToolStatusReward):
    """`tool_status` in the potential form: a `TurnReward` of it pays the change of its values, whatever its `form`."""

    def __init__(self, *, scale: float = 0.1) -> None:
        super().__init__(ok=scale, error=-scale)


class ExecutionErrors(ToolStatusReward):
    """Charges a call for its tools that ran and failed, or took too long.

    The mean of -`charge` and 0.0 over its tools; None without a known status.
    """

    def __init__(self, *, charge: float = 0.1) -> None:
        super().__init__(ok=0.0, error=0.0)
        self._values |= {ToolStatus.ERROR: -charge, ToolStatus.TIMEOUT: -charge}


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
