"""The weights of rewards and whom they pay: from their values to the return of a rollout, or of one role's calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightningrl.call_origin import is_role_among
from lightningrl.errors import ConfigError
from lightningrl_credit.rewards.value import check_weight

__all__ = ["RewardWeights", "WeightedReward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedReward:
    """A terminal reward's part in the return."""

    name: str
    weight: float = 1.0
    """0.0 = computed and shown, but no part of the return."""
    agents: frozenset[str] | None = None
    """Roles that it pays; None = all."""

    def __post_init__(self) -> None:
        check_weight(f"reward {self.name!r}", self.weight)


class RewardWeights:
    """Weights of a run's terminal rewards. Raises ConfigError where there are none, or two of one name."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        if not rewards:
            raise ConfigError("no reward is configured; add one under [rewards]")
        self.names = tuple(reward.name for reward in rewards)
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ConfigError(f"two rewards are named {twice[0]!r}; rename one")
        self._counted = [reward for reward in rewards if reward.weight != 0.0]

    @property
    def by_name(self) -> Mapping[str, float]:
        """Weights of the rewards that are part of the return."""
        return {reward.name: reward.weight for reward in self._counted}

    @property
    def roles(self) -> frozenset[str]:
        """Roles that have rewards of their own."""
        return frozenset().union(*(reward.agents for reward in self._counted if reward.agents is not None))

    def paid_to(self, agent: str | None) -> frozenset[str]:
        """Names of the rewards that a role's calls are paid."""
        return frozenset(
            reward.name
            for reward in self._counted
            if reward.agents is None or (agent is not None and is_role_among(agent, reward.agents))
        )

    def total(self, values: Mapping[str, float | None], names: Collection[str]) -> float | None:
        """Weighted sum of some rewards; None when one of them is None, or none is named."""
        paid = [reward for reward in self._counted if reward.name in names]
        return _weighted_sum(paid, values) if paid else None

    def of_rollout(self, values: Mapping[str, float | None]) -> float | None:
        """Return of a rollout. A reward that pays some roles alone may be None beside others: then it adds nothing."""
        present = [reward for reward in self._counted if reward.agents is None or values[reward.name] is not None]
        return None if self._counted and not present else _weighted_sum(present, values)


def _weighted_sum(rewards: Sequence[WeightedReward], values: Mapping[str, float | None]) -> float | None:
    total = 0.0
    for reward in rewards:
        value = values.get(reward.name)
        if value is None:
            return None
        total += reward.weight * value
    return total
