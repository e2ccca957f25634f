"""Turns: each call is credited with its own reward and those after it; outcome and turns have baselines of their own.

    outcome  A^R_{i,t} = γ_R^{T_i - t} · baseline({R_j})_i     compared over the group's rollouts first, then discounted
    turns    A^G_{i,t} = G_{i,t} - mean({G_{j,t}})             compared with the same turn of the others, or all turns
             G_{i,t} = Σ_{k ≥ t} γ^{k-t} r_{i,k}               (Kevin, arXiv 2507.11948; AReaL)
    A = A^R + λ·A^G

The turns' baseline subtracts and does not divide, so that turn rewards keep their declared size beside the outcome's:
divided by their own deviation, a pay of 0.001 would be credited like one of 0.1.

| is                          | options                                                                               |
|-----------------------------|---------------------------------------------------------------------------------------|
| MT-GRPO, arXiv 2505.11821   | gamma = 0, outcome_gamma = 1, turn_baseline = "grpo": r_{i,t} among turns t, and the  |
|                             | outcome's for each turn                                                               |
| Kevin, arXiv 2507.11948     | gamma = 0.4, compared = "all", turn_baseline = "grpo": one mean and deviation over    |
|                             | all turns of the group                                                                |
| ReBN, GEM, arXiv 2510.01051 | baseline = "none", and `credit.whiten = true`: returns normalised over the batch      |

One mean over the discounted returns of all turns would tell the early turns of four equal successes that they were bad,
by their position alone: so the outcome is compared before it is discounted. With γ = 1 and no turn rewards: identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from lightningrl.advantages import FloatArray
from lightningrl.errors import ConfigError
from lightningrl.types import Trajectory, Transition
from lightningrl_credit.baselines import Baseline, Channel, ReturnBased, check_baseline, check_gamma, undivided
from lightningrl_credit.rewards.lineages import following

__all__ = ["ComparedTurns", "TurnReturns", "sum_to_go", "turn_rewards"]

ComparedTurns = Literal["turn", "all"]


class TurnReturns(ReturnBased):
    """Turn rewards to go and a discounted outcome, over the calls of an episode in order of arrival. A discount never
    crosses branches of one history, nor the choices of one call (`n` > 1)."""

    requires = frozenset({"group", "turn_rewards"})

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        outcome_gamma: float | None = None,
        turn_weight: float = 1.0,
        weights: Mapping[str, float] | None = None,
        baseline: Baseline = "grpo",
        turn_baseline: Baseline | None = None,
        compared: ComparedTurns = "turn",
        epsilon: float = 1e-6,
    ) -> None:
        """`gamma` discounts turn rewards per call (2507.11948 uses 0.4, AReaL 0.9), `outcome_gamma` the outcome; None =
        the same. `turn_weight` is λ (1 in 2505.11821). `weights` weighs turn rewards by name; 1.0 for the others.
        `baseline` is the outcome's, `turn_baseline` the turns'; None = the same without its division: `dr_grpo` for
        `grpo` and `maxrl`. `compared`: a turn is compared with the others' `turn` of the same number, or with `all` of
        them (2507.11948), where its position counts as well.
        """
        check_baseline(baseline)
        self.turn_baseline: Baseline = undivided(baseline) if turn_baseline is None else turn_baseline
        check_baseline(self.turn_baseline)
        check_gamma("gamma", gamma)
        check_gamma("outcome_gamma", gamma if outcome_gamma is None else outcome_gamma)
        if compared not in get_args(ComparedTurns):
            raise ConfigError(
                f"turns are compared with the same 'turn' of the others or with 'all'; compared is {compared!r}"
            )
        self.gamma = gamma
        self.outcome_gamma = gamma if outcome_gamma is None else outcome_gamma
        self.turn_weight = turn_weight
        self.weights = dict(weights or {})
        self.baseline: Baseline = baseline
        self.compared: ComparedTurns = compared
        self.epsilon = epsilon
        if baseline == "none" and self.turn_baseline == "none":
            self.requires = frozenset({"turn_rewards"})

    def returns(self, trajectory: Trajectory) -> FloatArray:
        """Return of each call: λ·G, with the outcome at the last call that came of it. None as turn reward adds 0."""
        outcome, turns = self.channels(trajectory)
        return turns.factors * turns.returns + outcome.factors * outcome.returns

    def channels(self, trajectory: Trajectory) -> tuple[Channel, Channel]:
        """Channels of the outcome and of the turn rewards."""
        transitions = trajectory.transitions
        count = len(transitions)
        rewards = turn_rewards(transitions, self.weights)
        later = following(transitions)
        after = np.array([len(calls) for calls in later], dtype=np.intp)
        reward = float(trajectory.reward or 0.0)
        outcome = Channel(
            returns=np.full(count, reward),
            factors=np.power(self.outcome_gamma, after - 1, dtype=np.float64),
            turns=None,
        )
        return outcome, Channel(
            returns=sum_to_go(rewards, later, self.gamma),
            factors=np.full(count, self.turn_weight),
            turns=np.arange(count)
            if _is_straight(later)
            else np.bincount([k for calls in later for k in calls[1:]], minlength=count),
            baseline=self.turn_baseline,
            is_pooled=self.compared == "all",
        )


def sum_to_go(rewards: FloatArray, later: Sequence[Sequence[int]], gamma: float) -> FloatArray:
    """G_t = Σ_{k ≥ t} γ^{k-t} r_k over the calls `later[t]` that came of call t, itself the first of them."""
    if not _is_straight(later):
        return np.array([float(gamma ** np.arange(len(calls)) @ rewards[calls]) for calls in later])
    sums = rewards.copy()
    for t in range(len(rewards) - 2, -1, -1):  # G_t = r_t + γ·G_{t+1}
        sums[t] += gamma * sums[t + 1]
    return sums


def _is_straight(later: Sequence[Sequence[int]]) -> bool:
    """True where nothing branches: each call is followed by all after it."""
    return all(len(calls) == len(later) - t for t, calls in enumerate(later))


def turn_rewards(transitions: tuple[Transition, ...], weights: Mapping[str, float]) -> FloatArray:
    """Weighted sum of each call's rewards; one of None adds nothing."""
    rewards = np.zeros(len(transitions))
    for t, call in enumerate(transitions):
        for name, value in call.rewards.items():
            if value is not None:
                rewards[t] += weights.get(name, 1.0) * value
    return rewards
