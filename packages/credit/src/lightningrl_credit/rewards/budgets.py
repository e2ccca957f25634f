"""Automatic intermediate rewards that charge calls for going over a budget, of each call or of the whole rollout.

LatencyBudget    seconds of a call and its tools; of the rollout, from its first call's start to the call's end
TokenBudget      completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

from lightningrl.errors import ConfigError
from lightningrl.types import Trajectory
from lightningrl_credit.rewards.tools import tools_of_calls

__all__ = ["LatencyBudget", "Per", "TokenBudget"]

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
