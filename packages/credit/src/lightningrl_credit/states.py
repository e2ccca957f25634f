"""States: calls of a task's rollouts are compared with those that were in the same state (GiGPO, arXiv 2505.10978).

    A_{i,t} = A^E_i + ω · A^S_{i,t}
    A^E_i     = baseline({R_j})_i                         over the group's rollouts, each of them once   (eq. 3)
    A^S_{i,t} = baseline({γ^{T_j - k} R_j : s_{j,k} = s_{i,t}}) + G_{i,t} - mean({G_{j,k} : s_{j,k} = s_{i,t}})
                                                          over the calls in the state, each of them once (eq. 5 to 7)
    G_{i,t}   = Σ_{k ≥ t} γ^{k-t} r_{i,k}                 turn rewards, at their size: not divided by their deviation

A state that fewer than two rollouts were in says nothing: its calls have A^S = 0, not their return. So has a group
whose rollouts all earned the same, however long they took. A state that every rollout was in, as at the first call,
says of the outcome what A^E says, and would count it twice: there A^S is of turn rewards alone, unless λ < 1 or A^E has
no weight. With γ < 1 a state is worth more to those who had fewer calls to go: that is γ's taste for short rollouts.

| option             | is                                                                                           |
|--------------------|----------------------------------------------------------------------------------------------|
| `history`, `alpha` | HGPO, arXiv 2602.22817: A^S = Σ_k w_k A_k, A_k among calls that share their last k states,   |
|                    | k = 1 … history + 1, w_k ∝ (k + 1)^α                                                         |
| `shrinkage` κ      | ECPO, arXiv 2606.05885: m_{s,u} = (n_{s,u} Ḡ_{s,u} + κ μ_s) / (n_{s,u} + κ); a call's A^S is |
|                    | that of its action, (m - μ_s) / σ_s                                                          |
| `gate` τ           | ECPO: A^S · tanh(n_s / τ) · B_s / (B_s + W_s), the variance between and within actions       |
| `lam` λ            | GAGPO, arXiv 2605.13217: G_t = r_t + γ[(1 - λ) V(s_{t+1}) + λ G_{t+1}], V: a state's mean    |

The paper adds turn rewards to the discounted outcome before it normalises. HGPO is `episode = 0`, after the authors'
code, with two differences: σ divides by n - 1, and a set of calls that compares counts in Σ w also where it says 0.
ECPO's formulas are from two summaries of the paper, whose own text was not to be had: that its advantages are divided
by the deviation of the state's returns, and that an action is the tools called with their arguments (else the
completion), are ours. λ is derived from GAGPO's δ as it is quoted elsewhere, not from the paper; in a branched history
it goes by the first call that follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, are_equal
from lightningrl.errors import ConfigError
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup
from lightningrl_credit.baselines import Baseline, baseline_advantages, check_gamma, undivided
from lightningrl_credit.identical import IdenticalAssignment
from lightningrl_credit.rewards.lineages import Joins, following
from lightningrl_credit.rewards.tools import tools_of_calls
from lightningrl_credit.spread import call_advantages, to_tokens
from lightningrl_credit.state_keys import StateKey, find_key, normalize, state_keys
from lightningrl_credit.turns import TurnReturns, turn_rewards

__all__ = ["StateBaseline", "StateGroups"]

StateBaseline = Literal["grpo", "dr_grpo", "rloo"]
_Indices = NDArray[np.intp]
MOST_COMPARED = 512


@dataclass(kw_only=True, eq=False)
class StateGroups:
    """GiGPO, with the options of its successors.

    `key`: see `lightningrl_credit.state_keys`; a key's file is looked for in `folder`. `gamma` and `omega` are 0.95 and
    1 in 2505.10978. `episode` weighs A^E. `alpha` is 1 in 2602.22817. `shrinkage` is 2 in 2606.05885, 0 = none; `gate`
    None = none. `weights` weighs turn rewards by name. `baseline` is the outcome's, in A^E and in A^S; that of turn
    rewards is the same without its division.
    """

    requires: frozenset[str] = field(init=False, default=frozenset({"group", "state_key"}))
    key: str | StateKey = "prompt"
    gamma: float = 0.95
    omega: float = 1.0
    episode: float = 1.0
    history: int = 0
    alpha: float = 1.0
    shrinkage: float = 0.0
    gate: float | None = None
    lam: float = 1.0
    weights: InitVar[Mapping[str, float] | None] = None
    baseline: StateBaseline = "grpo"
    epsilon: float = 1e-6
    folder: InitVar[Path | str] = "."

    def __post_init__(self, weights: Mapping[str, float] | None, folder: Path | str) -> None:
        check_gamma("gamma", self.gamma)
        check_gamma("lam", self.lam)
        if self.baseline not in get_args(StateBaseline):
            kinds = ", ".join(get_args(StateBaseline))
            raise ConfigError(f"states cannot be compared by baseline {self.baseline!r}; choose {kinds}")
        if self.history < 0 or self.shrinkage < 0.0:
            raise ConfigError(f"history is {self.history!r} and shrinkage {self.shrinkage!r}; both are 0 or more")
        if self.gate is not None and self.gate <= 0.0:
            raise ConfigError(f"gate is {self.gate!r}; it is a number of calls above 0, or left out")
        self.joins: Joins = "sum" if self.lam == 1.0 else "first"
        self.key = self._key = find_key(self.key, folder)
        self._outcome = IdenticalAssignment(baseline=self.baseline, epsilon=self.epsilon)
        self._turns = TurnReturns(gamma=self.gamma, weights=weights)
        self._compared: dict[int, tuple[TrajectoryGroup, FloatArray, NDArray[np.bool_]]] = {}
        """Results for the groups that `finish_step` has yet to see, by `id`, so that they are computed once."""

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return self._sum(group, call_advantages(group, self._outcome))

    def assign_by_role(self, group: TrajectoryGroup) -> Advantages:
        """Compare the outcome within each role's calls; a state is always one role's."""
        return self._sum(group, call_advantages(group, self._outcome, set_of=lambda call: call.agent))

    def _sum(self, group: TrajectoryGroup, outcome: FloatArray) -> Advantages:
        return to_tokens(group, self.episode * outcome + self.omega * self._steps(group)[0])

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        """Metrics: `anchor_hit_rate`, the share of trained calls whose state some other rollouts were in, and not all,
        and `zero_step_credit`, the share of trained tokens that have no credit from their state."""
        hits, tokens, zeros = [], [], []
        for group, by_trajectory in zip(groups, advantages, strict=True):
            step, is_hit = self._steps(group)
            calls = [
                (call, credit)
                for trajectory, by_call in zip(group.trajectories, by_trajectory, strict=True)
                if trajectory.reward is not None
                for call, credit in zip(trajectory.transitions, by_call, strict=True)
            ]
            is_trained = np.array([credit is not None and call.trainable for call, credit in calls], dtype=np.bool_)
            lengths = np.array([len(call.completion_ids) for call, _ in calls], dtype=np.intp)
            hits.append(is_hit[is_trained])
            tokens.append(lengths[is_trained].sum())
            zeros.append(lengths[is_trained & (step == 0.0)].sum())
        self._compared.clear()
        hit = np.concatenate([np.zeros(0, np.bool_), *hits])
        if not hit.size:
            return {}
        return {"anchor_hit_rate": float(hit.mean()), "zero_step_credit": float(sum(zeros) / sum(tokens))}

    def _steps(self, group: TrajectoryGroup) -> tuple[FloatArray, NDArray[np.bool_]]:
        result = self._compared.get(id(group))
        if result is None:
            if len(self._compared) >= MOST_COMPARED:
                self._compared.clear()
            result = self._compared[id(group)] = (group, *self._compare_states(group))
        return result[1:]

    def _compare_states(self, group: TrajectoryGroup) -> tuple[FloatArray, NDArray[np.bool_]]:
        """A^S of each call of the rewarded trajectories, and True where its state compares some of them, not all."""
        rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
        owners = np.repeat(np.arange(len(rewarded)), [len(trajectory.transitions) for trajectory in rewarded])
        is_hit = np.zeros(len(owners), dtype=np.bool_)
        if not len(owners):
            return np.zeros(0), is_hit
        pasts = [past for trajectory in rewarded for past in self._pasts(trajectory)]
        levels = [self._sets(pasts, owners, k) for k in range(1, self.history + 2)]
        apart = [[calls for calls in sets if len(np.unique(owners[calls])) < len(rewarded)] for sets in levels]
        for calls in apart[0]:
            is_hit[calls] = True
        is_said = self.episode != 0.0 and self.lam == 1.0  # what all compare is A^E once more
        scores = np.zeros(len(owners))
        actions = (
            [action for trajectory in rewarded for action in _actions(trajectory)]
            if self.shrinkage or self.gate
            else None
        )
        if not are_equal(np.array([trajectory.reward for trajectory in rewarded], dtype=np.float64)):
            outcomes = self._returns(rewarded, levels[0], is_outcome=True)
            scores += self._weigh(outcomes, apart if is_said else levels, actions, self.baseline)
        turns = [turn_rewards(trajectory.transitions, self._turns.weights) for trajectory in rewarded]
        if any(map(np.any, turns)) and not all(np.array_equal(rewards, turns[0]) for rewards in turns[1:]):
            returns = self._returns(rewarded, levels[0], is_outcome=False)
            scores += self._weigh(returns, levels, actions, undivided(self.baseline))
        return scores, is_hit

    def _weigh(
        self,
        returns: FloatArray,
        levels: Sequence[Sequence[_Indices]],
        actions: Sequence[Hashable] | None,
        baseline: Baseline,
    ) -> FloatArray:
        """Mean of each call's credit in its sets of calls, of 1, 2, … shared states."""
        sums, weighed = np.zeros(len(returns)), np.zeros(len(returns))
        for k, sets in enumerate(levels, start=1):
            weight = (k + 1.0) ** self.alpha
            for calls in sets:
                acted = None if actions is None else [actions[n] for n in calls]
                sums[calls] += weight * self._credit(returns[calls], acted, baseline)
                weighed[calls] += weight
        return np.divide(sums, weighed, out=np.zeros_like(sums), where=weighed > 0)

    def _pasts(self, trajectory: Trajectory) -> list[list[Hashable]]:
        """State of each call and those before it, the latest first, as many as count."""
        states = [
            (call.agent, call.policy, key)
            for call, key in zip(trajectory.transitions, state_keys(trajectory, self._key), strict=True)
        ]
        if not self.history:
            return [[state] for state in states]
        pasts: list[list[Hashable]] = [[state] for state in states]
        for t, later in reversed(list(enumerate(following(trajectory.transitions)))):
            for k in later[1:]:
                if len(pasts[k]) <= self.history:
                    pasts[k].append(states[t])
        return pasts

    def _sets(self, pasts: Sequence[Sequence[Hashable]], owners: _Indices, k: int) -> list[_Indices]:
        """Calls that share their last k states, where two rollouts have one."""
        members: dict[Hashable, list[int]] = {}
        for number, past in enumerate(pasts):
            if len(past) >= k:
                members.setdefault(past[0] if k == 1 else tuple(past[:k]), []).append(number)
        return [np.array(calls) for calls in members.values() if len({int(owners[n]) for n in calls}) > 1]

    def _returns(self, rewarded: Sequence[Trajectory], states: Sequence[_Indices], *, is_outcome: bool) -> FloatArray:
        """Return of each call: what comes to it of the outcome, or of turn rewards."""
        channels = [self._turns.channels(trajectory)[0 if is_outcome else 1] for trajectory in rewarded]
        returns = np.concatenate([channel.factors * channel.returns for channel in channels])
        if self.lam == 1.0:
            return returns
        values = returns.copy()  # V(s), of a state that one rollout alone was in its own return
        for calls in states:
            values[calls] = returns[calls].mean()
        start = 0
        for trajectory in rewarded:
            made = trajectory.transitions
            rewards = np.zeros(len(made)) if is_outcome else turn_rewards(made, self._turns.weights)
            for t, later in reversed(list(enumerate(following(trajectory.transitions)))):
                if len(later) > 1:
                    after = start + later[1]
                    bootstrap = (1.0 - self.lam) * values[after] + self.lam * returns[after]
                    returns[start + t] = rewards[t] + self.gamma * bootstrap
            start += len(trajectory.transitions)
        return returns

    def _credit(self, returns: FloatArray, actions: Sequence[Hashable] | None, baseline: Baseline) -> FloatArray:
        """A^S of the calls of one state.

        Four calls with returns 1, 0, 1, 0 by the actions a, a, b, c; with `dr_grpo` their credit is ±0.5:

            actions     numbers [0 0 1 2], counts [2 1 1], means [0 0.5 -0.5]
            gate        between = 2·0² + 1·0.5² + 1·0.5² = 0.5, within = 0.5² + 0.5² = 0.5: trust = tanh(4 / τ) · 0.5
            shrinkage   κ = 1: a 0·2/3 = 0, b 0.5·1/2 = 0.25, c -0.25: the two calls of a differ by chance
        """
        credit = baseline_advantages(returns, np.arange(len(returns)), baseline=baseline, epsilon=self.epsilon)
        if actions is None or not credit.any():
            return credit
        numbers: dict[Hashable, int] = {}
        action = np.array([numbers.setdefault(name, len(numbers)) for name in actions], dtype=np.intp)
        counts = np.bincount(action)
        means = np.bincount(action, weights=credit) / counts
        if self.gate is not None:
            between = float((counts * means**2).sum())
            within = float(((credit - means[action]) ** 2).sum())
            trust = float(np.tanh(len(returns) / self.gate)) * between / (between + within)
        else:
            trust = 1.0
        if self.shrinkage:  # (n Ḡ + κ μ) / (n + κ) - μ  =  (Ḡ - μ) n / (n + κ)
            credit = (means * counts / (counts + self.shrinkage))[action]
        return trust * credit


def _actions(trajectory: Trajectory) -> list[Hashable]:
    """Action of each call: the tools that it called, with their arguments, or else its completion."""
    return [
        tuple(sorted((tool.name, normalize(tool.arguments)) for tool in tools)) or call.completion_ids.tobytes()
        for call, tools in zip(trajectory.transitions, tools_of_calls(trajectory), strict=True)
    ]
