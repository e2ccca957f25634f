"""Per-agent normalisation: an agent's calls are compared with its own calls only (Dr. MAS, arXiv 2602.08847).

A_{i,t} = (G_{i,t} - μ_k) / (σ_k + ε)     over the calls t in which agent k acted
"""

from __future__ import annotations

from typing import Literal

from lightningrl.credit.spread import ReturnBased, spread
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, TrajectoryGroup

__all__ = ["PerAgent"]


class PerAgent:
    """Another assigner's returns, with its baseline taken within each agent. Calls that name no agent form a set of their own."""

    def __init__(self, inner: CreditAssigner, *, over: Literal["trajectories", "steps"] = "trajectories") -> None:
        """`over="trajectories"`: every episode in which the agent acted counts once; `"steps"`: every call does, as in the paper."""
        if not isinstance(inner, ReturnBased):
            raise ConfigError(
                f"credit assigner {type(inner).__name__!r} cannot be normalised per agent: it has no `returns(trajectory)`; "
                "add `returns`, `baseline` and `epsilon` to it, or set credit.per_agent = false"
            )
        if over not in ("trajectories", "steps"):
            raise ConfigError(f"credit: per-agent normalisation over {over!r}; choose 'trajectories' or 'steps'")
        self._inner = inner
        self._by_step = over == "steps"

    @property
    def requires(self) -> frozenset[str]:
        return self._inner.requires | {"agents"}

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return spread(group, self._inner, set_of=lambda transition: transition.agent, by_step=self._by_step)
