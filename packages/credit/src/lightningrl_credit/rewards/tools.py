"""Tools of a call, where all intermediate rewards find the call that they pay (docs/reference/intermediate-rewards.md),
and the automatic ones: how tools ended, what they were called with, and budgets of a call or of the whole rollout.

LatencyBudget    seconds of a call and its tools; of the rollout, from its first call's start to the call's end
TokenBudget      completion tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, get_args

from lightningrl.errors import ConfigError
from lightningrl.tool_schemas import build_check, canonical, fits, load_jsonschema, offered_check
from lightningrl.types import ToolCall, ToolStatus, Trajectory, Transition

__all__ = [
    "ExecutionErrors",
    "LatencyBudget",
    "MalformedCalls",
    "Per",
    "RepeatedCalls",
    "TokenBudget",
    "ToolStatusReward",
    "ValidArguments",
    "tools_of_calls",
]


def tools_of_calls(trajectory: Trajectory) -> list[list[ToolCall]]:
    """Invocations that each transition asked for, in order of time; one that nobody asked for is in none. The model's
    tool-call id says who asked; where it says nothing, whoever told the invocation."""
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

    Tools only told to be of the call may lower that, never raise it; without an asked one's value, their worst counts.
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
        """`ok` above 0 pays for calling tools, needed or not; where that is exploited, set it to 0. `error` is for
        error, unknown_tool, invalid_arguments and timeout."""
        self._values: dict[ToolStatus, float] = {
            status: ok if status is ToolStatus.OK else error
            for status in ToolStatus
            if status is not ToolStatus.UNKNOWN
        }

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return mean_over_tools(trajectory, lambda tool: self._values.get(tool.status))


class ExecutionErrors(ToolStatusReward):
    """Charges a call for its tools that ran and failed, or took too long. The mean of -`charge` and 0.0 over its tools;
    None without a known status."""

    def __init__(self, *, charge: float = 0.1) -> None:
        super().__init__(ok=0.0, error=0.0)
        self._values |= {ToolStatus.ERROR: -charge, ToolStatus.TIMEOUT: -charge}


_REFUSED = frozenset({ToolStatus.INVALID_ARGUMENTS, ToolStatus.UNKNOWN_TOOL})


@dataclass(kw_only=True, eq=False)
class ValidArguments:
    """Gives each call the mean over its tools; None without tools, or where nobody told arguments or status.

    Not valid are arguments that the framework refused (invalid_arguments, unknown_tool), that are no JSON object, or
    that do not fit the schema that the call's own request gave for the tool.
    """

    ok: float = 0.0
    error: float = -0.1
    offered: bool = True
    """False = no schemas but `schemas`. A tool without one may be called with any object."""
    schemas: InitVar[Mapping[str, Mapping[str, Any]] | None] = None
    """JSON schema of the arguments by the tool's name, in place of the one that was offered."""

    def __post_init__(self, schemas: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._checks: dict[str, Callable[[Any], bool]] = {
            name: build_check(schema, what=f"the schema of tool {name!r}") for name, schema in (schemas or {}).items()
        }
        if self.offered:
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


class MalformedCalls:
    """Charges an answer that begins a tool call which cannot be read: -`charge`, else 0.0; None where its request
    offered no tools."""

    def __init__(self, *, charge: float = 0.1) -> None:
        self.charge = charge

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return [-self.charge if call.malformed else 0.0 if call.offered else None for call in trajectory.transitions]


class RepeatedCalls:
    """Charges a call for its tools that were called before in the episode, by any call, with the same arguments. The
    mean of -`charge` and 0.0 over its tools; None without tools whose arguments are known."""

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


Per = Literal["call", "rollout"]


class _Budget:
    """Gives -`charge` to a call over the budget, 0.0 to one within."""

    def __init__(self, name: str, key: str, budget: float, charge: float, per: Per) -> None:
        if not budget > 0:
            raise ConfigError(f"intermediate reward {name!r}: {key} {budget!r} is not positive; give it a budget")
        if per not in get_args(Per):
            kinds = ", ".join(map(repr, get_args(Per)))
            raise ConfigError(f"intermediate reward {name!r}: per {per!r} is none of {kinds}")
        self.budget = budget
        self.charge = charge
        self.per = per

    def _pay(self, used: Sequence[float]) -> list[float | None]:
        return [-self.charge if amount > self.budget else 0.0 for amount in used]


class LatencyBudget(_Budget):
    """Wall time depends on the load: leave room."""

    def __init__(self, *, seconds: float, charge: float = 0.1, per: Per = "call") -> None:
        super().__init__("latency_budget", "seconds", seconds, charge, per)

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        calls = trajectory.transitions
        if self.per == "call":
            tools = tools_of_calls(trajectory)
            used = [
                call.duration_s + sum(tool.duration_s for tool in asked)
                for call, asked in zip(calls, tools, strict=True)
            ]
        else:
            start = min((call.started_at for call in calls), default=0.0)
            used = [call.started_at + call.duration_s - start for call in calls]
        return self._pay(used)


class TokenBudget(_Budget):
    """Counts tokens that were sampled."""

    def __init__(self, *, tokens: int, charge: float = 0.1, per: Per = "call") -> None:
        super().__init__("token_budget", "tokens", tokens, charge, per)

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        used = [len(call.completion_ids) for call in trajectory.transitions]
        return self._pay(used if self.per == "call" else list(accumulate(used)))
