"""The methods that are compared: what a recipe would say for each, the same for every game.

A new one is a new line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightningrl.types import Trajectory
from lightningrl_credit.rewards.tools import ToolStatusReward

__all__ = ["BROADCAST", "METHODS", "Method", "tool_status_at_the_end"]

BROADCAST: Final = "tool_status, broadcast"
"""The denser reward alone."""
ENDPOINT: Final = {"base_url": "http://127.0.0.1:9/v1", "model": "oracle"}
"""Nobody is asked there: the oracle's verdicts are put in as evidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the tables."""

    name: str
    family: str
    """`identical`, `denser` (a denser reward, the same for all calls) or `turn`."""
    use: str
    """The credit assigner's plugin."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    intermediate: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    judge_error: float | None = None
    """How often the oracle's verdict of a turn is turned round; None = there is no judge."""
    has_critic: bool = False
    learns: bool = True
    """False = its agreement alone is measured."""
    games: tuple[str, ...] | None = None
    """Games that it can be used in; None = all."""

    @property
    def settings(self) -> dict[str, Any]:
        """Tables of the recipe."""
        tables: dict[str, Any] = {"credit": {"use": self.use, "options": dict(self.options)}}
        if self.intermediate:
            tables["intermediate_rewards"] = {name: dict(part) for name, part in self.intermediate.items()}
        if self.judge_error is not None:
            tables["judge"] = ENDPOINT
        if self.has_critic:
            tables["learner"] = {"critic": {}}
        return tables


def tool_status_at_the_end(trajectory: Trajectory) -> list[float | None]:
    """Pay the sum of `tool_status` over a rollout's tools at its last call: with γ = 1 every call is credited with all
    of it. So it is the same denser reward without credit by call."""
    total = sum(value for value in ToolStatusReward()(trajectory) if value is not None)
    return [*[0.0] * (len(trajectory.transitions) - 1), total]


STATUS: Final = {"tools": {"use": "tool_status"}}
AT_THE_END: Final = {"tools": {"use": tool_status_at_the_end}}
SHAPING: Final = {"tools": {"use": "tool_status", "form": "potential"}}

METHODS: Final[tuple[Method, ...]] = (
    Method(name="reinforce", family="identical", use="reinforce"),
    Method(name="rloo", family="identical", use="rloo"),
    Method(name="dr_grpo", family="identical", use="dr_grpo"),
    Method(name="grpo", family="identical", use="grpo"),
    Method(name="air: tool_status", family="turn", use="turns", intermediate=STATUS),
    Method(
        name="air: tool_status, γ = 0",
        family="turn",
        use="turns",
        options={"gamma": 0.0, "outcome_gamma": 1.0},
        intermediate=STATUS,
    ),
    Method(name=BROADCAST, family="denser", use="turns", intermediate=AT_THE_END),
    Method(name="air: tool_status_shaping", family="turn", use="turn_gae", intermediate=SHAPING, has_critic=True),
    Method(
        name="turns: MT-GRPO",
        family="turn",
        use="turns",
        options={"gamma": 0.0, "outcome_gamma": 1.0, "turn_baseline": "grpo"},
        intermediate=STATUS,
    ),
    Method(name="states: GiGPO", family="turn", use="states"),
    Method(name="states: ECPO", family="turn", use="states", options={"shrinkage": 2.0, "gate": 4.0}),
    Method(name="turn_gae", family="turn", use="turn_gae", has_critic=True),
    Method(name="branches: 4", family="turn", use="branches", options={"samples": 4}, learns=False),
    Method(
        name="branches: few",
        family="turn",
        use="branches",
        options={"samples": 4, "points": 2, "rollouts": 2, "train": True},
    ),
    *(
        Method(
            name=f"{name}: {wrong}",
            family="turn",
            use="judge",
            options=options,
            judge_error=error,
            learns=not options,
        )
        for name, options in (("judge", {}), ("judge, min", {"aggregate": "min"}))
        for wrong, error in (("right", 0.0), ("20 % wrong", 0.2), ("40 % wrong", 0.4))
        if not options or error < 0.4
    ),
)
