"""Which tools a call asked for: the one place where intermediate rewards find the call that they are of (docs/credit/intermediate.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightningrl.types import ToolCall, Trajectory, Transition

__all__ = ["mean_over_tools", "tools_of_calls", "value_over_tools"]


def tools_of_calls(trajectory: Trajectory) -> list[list[ToolCall]]:
    """For each transition the invocations that it asked for, in order of time. One that nobody asked for is in none. The model's tool-call
    id says who asked; where it says nothing, whoever told the invocation."""
    of_call: dict[str, list[ToolCall]] = {transition.id: [] for transition in trajectory.transitions}
    asked_by = {call_id: transition.id for transition in trajectory.transitions for call_id in transition.tool_call_ids}
    for tool in trajectory.tool_calls:
        asker = asked_by.get(tool.id) or tool.transition_id
        if asker in of_call:
            of_call[asker].append(tool)
    return [of_call[transition.id] for transition in trajectory.transitions]


def mean_over_tools(trajectory: Trajectory, value_of: Callable[[ToolCall], float | None]) -> list[float | None]:
    """For each transition `value_over_tools`. None where it asked for none, or none has a value."""
    return [value_over_tools(call, tools, value_of) for call, tools in zip(trajectory.transitions, tools_of_calls(trajectory), strict=True)]


def value_over_tools(call: Transition, tools: Sequence[ToolCall], value_of: Callable[[ToolCall], float | None]) -> float | None:
    """The mean over the tools that the call's answer asked for by id, so that several in one call pay no more than one. Those that were
    only told to be of the call, however many, may lower that and never raise it; without an asked one's value, the worst of them counts."""
    # Asked and failed: -0.1. An agent that tells 99 more of the call, all of them ok, still has -0.1.
    asked = [value for tool in tools if tool.id in call.tool_call_ids and (value := value_of(tool)) is not None]
    unasked = [value for tool in tools if tool.id not in call.tool_call_ids and (value := value_of(tool)) is not None]
    of_asked = mean(asked)
    if not unasked:
        return of_asked
    worst = min(unasked)
    return worst if of_asked is None else min(of_asked, (sum(asked) + worst) / (len(asked) + 1))


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are not None; exactly the value where all are equal. None of none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
