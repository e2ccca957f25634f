"""Tools of a call: where all intermediate rewards find the call that they pay (docs/credit/intermediate.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightningrl.types import ToolCall, Trajectory, Transition

__all__ = ["mean_over_tools", "tools_of_calls", "value_over_tools"]


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
