"""Generalised advantage estimation with a critic: over turns, over tokens, or over turns and then inside each.

    turn     δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γλ A_{t+1}       V_t: the critic's value of call t's prompt
    token    the same for each sampled token j, V_j: the value of all that stands before it
    both     A_t over turns; then, inside turn t, token by token, the turn's return A_t + V_t earned at its last token

Tool results and other policies' calls, between two sampled tokens or calls, are no steps: nothing is discounted there,
and what such a call earns is earned by the step before it. The outcome is earned by the last call. A rollout that was
cut off (a timeout, a full context) has ended: it has the reward of a failure, and no value stands for a rest. With one,
an endless loop would cost its policy nothing.

Sources: GAE, Schulman et al. 2016, eq. 11 and 16; over turns, Turn-PPO (arXiv 2512.17008); both, VAGEN's bi-level GAE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

import numpy as np

from lightningrl.advantages import FloatArray
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.types import Advantages, Array, Evidence, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.rewards.lineages import Joins, successors
from lightningrl_credit.turns import turn_rewards

__all__ = ["Level", "TurnGae"]

Level = Literal["turn", "token", "both"]


class TurnGae(CreditAssigner):
    """Advantages from a critic's values, which are evidence. It teaches the critic, too: V_j is to become A_j + V_j."""

    requires = frozenset({"values"})
    joins: Joins = "mean"

    def __init__(
        self,
        *,
        gamma: float | None = None,
        lam: float | None = None,
        level: Level = "turn",
        token_lam: float = 1.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`gamma`, `lam`: per turn, 0.99 and 0.9 as in Turn-PPO unless given; with `level = "token"` per token, 1 and 1
        as in verl's PPO. `token_lam`: λ inside a turn of `both`, where γ is 1 (VAGEN). `weights` weighs turn rewards by
        name; 1.0 for the others.
        """
        if level not in get_args(Level):
            raise ConfigError(f"credit assigner 'turn_gae': level {level!r} is none of 'turn', 'token', 'both'")
        default_gamma, default_lam = (1.0, 1.0) if level == "token" else (0.99, 0.9)
        gamma, lam = default_gamma if gamma is None else gamma, default_lam if lam is None else lam
        for name, value in {"gamma": gamma, "lam": lam, "token_lam": token_lam}.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"credit assigner 'turn_gae': {name} {value!r} is not between 0 and 1; try 0.95")
        self.gamma = None if level == "token" and gamma != 1.0 else gamma
        """Discount per call; None where it is per token."""
        self._gamma = gamma
        self.lam = lam
        self.level: Level = level
        self.token_lam = token_lam
        self.weights = dict(weights or {})

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Ask for values by call or by token (`value`), each at a place that the critic is taught."""
        results = await asyncio.gather(*(self._values(call, ask) for call in trajectory.transitions))
        if self.level == "turn":
            return Evidence(calls={"value": np.array([values[0] for values in results], np.float32)})
        return Evidence(tokens={"value": tuple(results)})

    async def _values(self, call: Transition, ask: Services) -> Array:
        """Value before the call, or before each of its tokens; 0 for calls of a policy that is not trained: it has no
        critic."""
        if not call.trainable:
            return np.zeros(len(call.completion_ids), np.float32)
        if self.level == "turn":
            return await ask.values([call.prompt_ids], policy=call.policy)
        return (await ask.token_values(call.completion_ids, call.prompt_ids, policy=call.policy))[:-1]

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return self._by_call(group, lambda advantages, _, length: _spread(advantages, length))

    def value_targets(self, group: TrajectoryGroup) -> Advantages:
        """Targets A + V wherever a V entered the arithmetic: at a turn's first token, or at each."""
        return self._by_call(group, lambda advantages, values, length: _padded(advantages + values, length))

    def _by_call(self, group: TrajectoryGroup, make: Callable[[FloatArray, FloatArray, int], Array]) -> Advantages:
        """Make a call's numbers from its advantages, its values and its length; None if it is not trained."""
        return tuple(
            tuple(
                None if advantages is None else make(advantages, values, len(call.completion_ids))
                for call, (advantages, values) in zip(trajectory.transitions, self._estimate(trajectory), strict=True)
            )
            for trajectory in group.trajectories
        )

    def _estimate(self, trajectory: Trajectory) -> Iterator[tuple[FloatArray | None, FloatArray]]:
        """Yield each call's advantages and values: one of each (`turn`) or one per token; None if not trained."""
        calls = trajectory.transitions
        nothing = np.zeros(0)
        if trajectory.reward is None:
            yield from ((None, nothing) for _ in calls)
            return
        evidence = trajectory.evidence
        if evidence is None:  # a rewarded trajectory has been scored, one without calls was not asked about
            return
        next_calls, rewards = successors(calls), turn_rewards(calls, self.weights)
        results: list[tuple[FloatArray | None, FloatArray]] = [(None, nothing)] * len(calls)
        values_at, advantages_at, earned_at = [0.0] * len(calls), [0.0] * len(calls), [0.0] * len(calls)
        """At each call's start, as seen by the calls before it; `earned_at`: by calls that are passed over from there
        on, which the step before them earns."""
        for t in reversed(range(len(calls))):
            later = next_calls[t]
            next_value, next_advantage, passed = (
                sum(at[k] for k in later) / len(later) if later else 0.0 for at in (values_at, advantages_at, earned_at)
            )
            reward = float(rewards[t]) + passed + (0.0 if later else trajectory.reward)
            if not calls[t].trainable:  # part of the environment, as tool results are
                values_at[t], advantages_at[t], earned_at[t] = next_value, next_advantage, reward
                continue
            by_token = self.level == "token"
            values = (
                np.array([evidence.calls["value"][t]]) if self.level == "turn" else evidence.tokens["value"][t]
            ).astype(np.float64)
            chain = values if by_token else values[:1]
            advantages = estimate_advantages(reward, chain, next_value, next_advantage, gamma=self._gamma, lam=self.lam)
            values_at[t], advantages_at[t] = float(chain[0]), float(advantages[0])
            if self.level == "both":
                earned = advantages[0] + values[0]
                advantages = estimate_advantages(earned, values, 0.0, 0.0, gamma=1.0, lam=self.token_lam)
            results[t] = advantages, values
        yield from results


def estimate_advantages(
    reward: float, values: FloatArray, next_value: float, next_advantage: float, *, gamma: float, lam: float
) -> FloatArray:
    """Advantages of a stretch's steps, the last of which earns `reward`. `next_value` and `next_advantage`: those of
    the step after the stretch."""
    advantages: list[float] = []
    for value in reversed(values.tolist()):
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage  # Â_t = δ_t + γλ Â_{t+1}  (GAE, eq. 16)
        advantages.append(next_advantage)
        next_value, reward = value, 0.0
    return np.array(advantages[::-1])


def _spread(advantages: FloatArray, length: int) -> Array:
    """Repeat a turn's one advantage for all its tokens, or take each token's own."""
    return np.full(length, advantages[0], np.float32) if len(advantages) == 1 else advantages.astype(np.float32)


def _padded(values: FloatArray, length: int) -> Array:
    """Fill up with NaN for the tokens that have no target."""
    return np.concatenate([values, np.full(length - len(values), np.nan)]).astype(np.float32)
