"""Which tools a call asked for: the one place where intermediate rewards find the call that they are of (docs/credit/intermediate.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from lightningrl.types import ToolCall, Trajectory

__all__ = ["canonical", "mean", "mean_over_tools", "tools_of_calls"]


def tools_of_calls(trajectory: Trajectory) -> list[list[ToolCall]]:
    """For each transition the invocations that it asked for, in order of time. One that nobody asked for is in none."""
    of_call: dict[str, list[ToolCall]] = {transition.id: [] for transition in trajectory.transitions}
    asked_by = {call_id: transition.id for transition in trajectory.transitions for call_id in transition.tool_call_ids}
    for tool in trajectory.tool_calls:
        asker = tool.transition_id or asked_by.get(tool.id)
        if asker in of_call:
            of_call[asker].append(tool)
    return [of_call[transition.id] for transition in trajectory.transitions]


def mean_over_tools(trajectory: Trajectory, value_of: Callable[[ToolCall], float | None]) -> list[float | None]:
    """For each transition the mean of its tools' values, so that several tools in one call pay no more than one. None where it asked for
    none, or none has a value."""
    return [mean(map(value_of, tools)) for tools in tools_of_calls(trajectory)]


def canonical(arguments: str) -> str:
    """The same text for the same arguments: JSON with sorted keys and no spaces; other text as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are not None; exactly the value where all are equal. None of none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
