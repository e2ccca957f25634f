"""Evidence on whether a policy will learn, from the rollouts of some groups: nothing else is asked.

reward, scaled by the recipe's bounds to [0, 1]     pass@k, best@k = E[highest reward of k samples of a task]
signal = share of groups with an advantage          spread = mean standard deviation of rewards within a group
likeliest = mean reward of each group's likeliest rollout: what the policy would earn if it only grew surer of itself
greedy = the same of a greedy validation, of more tasks
knows, assured = of greedy answers, else of likeliest ones: whether they are surer where right; how often they come
moved, raised = what a learning step does to rollouts: in the direction asked for, and to those that earned
format = malformed tool calls, cut-off answers, rollouts that failed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from pydantic import BaseModel, ConfigDict

from lightningrl.recipe import Recipe
from lightningrl.types import FinishReason, Outcome, Trajectory
from lightningrl_credit.metrics import judge_failures
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_training.evaluation.statistics import pass_at_k
from lightningrl_training.forecast.movement import Movement
from lightningrl_training.forecast.noise import signal_to_noise

__all__ = ["Answer", "Evidence", "GreedyAnswers", "Rehearsal", "best_at_k", "gather", "judge", "knowledge"]

NEARLY = 1e-9
ALIKE = 1e-4
"""Nats within which two rollouts are as likely: the same tokens, computed in batches of other sizes."""


Answer = tuple[float, float]
"""Reward of a rollout, scaled to [0, 1], and Σ log π of its trained tokens."""


class GreedyAnswers(BaseModel):
    """Evidence of one rollout of each of some tasks: the greedy one, or the likeliest of some."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tasks: int
    reward: float
    """Mean reward."""
    knows: float
    """See `knowledge`."""
    assured: float
    """Mean of reward · probability: what these rollouts alone earn when the policy samples."""

    @classmethod
    def measure(cls, answers: Sequence[Answer]) -> GreedyAnswers | None:
        """Measure them; None where there are none."""
        if not answers:
            return None
        return cls(
            tasks=len(answers),
            reward=fmean(reward for reward, _ in answers),
            knows=knowledge(answers),
            assured=fmean(reward * math.exp(min(0.0, likelihood)) for reward, likelihood in answers),
        )


class Rehearsal(BaseModel):
    """Evidence of a rehearsal (`lightningrl_training.forecast.rehearsal`) on validation tasks."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    steps: int
    greedy: float
    """Mean reward of greedy answers, the best of those after some steps."""
    sampled: float
    """The same of sampled answers."""


class Evidence(BaseModel):
    """Evidence of some groups of rollouts on a policy and its tasks. Shares are in [0, 1], rewards scaled to it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    groups: int
    group_size: int
    rollouts: int
    """Rollouts with a reward, the agent's own failures included: they count as the lowest."""
    steps: int
    """Steps of the recipe."""
    reward: float
    """Mean reward."""
    pass_at: dict[int, float]
    """Unbiased pass@k by k; a rollout passes with the most that the recipe's rewards can be."""
    best_at: dict[int, float]
    """Expected highest reward of k samples of a task, without bias, by k."""
    likeliest: float | None = None
    """Mean over groups of the reward of the rollout whose sampled tokens are the likeliest together: near to what the
    policy earns without randomness. Reinforcement first sharpens a policy towards what it holds for likely (Huang et
    al. 2024, arXiv 2412.01951), so gains are near where this is above `reward`. None = of an older forecast."""
    greedy: GreedyAnswers | None = None
    """Greedy answers to validation tasks; None = no validation before the first step, or one that is not greedy."""
    knows: float = 0.0
    """`GreedyAnswers.knows` of greedy answers, without them of groups' likeliest rollouts."""
    assured: float = 0.0
    """`GreedyAnswers.assured` likewise."""
    spread: float
    """Mean over groups of the standard deviation of rewards within a group."""
    signal: float
    """Share of groups in which a trained call has an advantage."""
    signal_doubled: float
    """The same as expected in groups of twice the size."""
    snr: float | None
    """Signal to noise of a step's gradient, by the surrogate of `noise`; None = no two groups have a signal."""
    malformed: float
    """Share of calls that were offered tools or tried to call some, whose tool call nobody can read."""
    cut_off: float
    """Share of calls that ended at their most tokens."""
    failed: float
    """Share of rollouts that ended otherwise than by succeeding."""
    tokens: float
    """Trained tokens of a rollout, on average."""
    moved: float | None = None
    """Nats that a step at the full learning rate moves a rollout that it learns from by, in the direction asked for;
    None = no step was learned, or the backend does not say."""
    raised: float = 0.0
    """Nats by which such a step makes rollouts likelier, each by the weight of its reward; 0 where `moved` is None."""
    rehearsed: Rehearsal | None = None
    """None = no rehearsal, or nothing to learn in it."""

    @property
    def best(self) -> float:
        """Expected highest reward of a group."""
        return self.best_at[max(self.best_at)]


def gather(
    recipe: Recipe,
    credited: Sequence[CreditedGroup],
    *,
    movement: Movement | None = None,
    greedy: GreedyAnswers | None = None,
    rehearsed: Rehearsal | None = None,
) -> Evidence | None:
    """Gather evidence from a policy's groups; None where no rollout has a reward. `movement`: of a step at the full
    learning rate; `greedy`: of validation tasks, where they were asked for; `rehearsed`: where that was done."""
    earned = [judged for group in credited if (judged := judge(group.group.trajectories, *recipe.reward_bounds))]
    rewards = [[reward for reward, _ in judged] for judged in earned]
    every = [value for values in rewards for value in values]
    rollouts = [rollout for group in credited for rollout in group.group.trajectories]
    if not every or not rollouts:
        return None
    calls = [call for rollout in rollouts for call in rollout.transitions]
    offered = [call for call in calls if call.offered or call.malformed]
    trained = sum(len(call.completion_ids) for call in calls if call.trainable)
    likeliest = GreedyAnswers.measure([_likeliest(judged) for judged in earned])
    sure = greedy or likeliest
    assert likeliest is not None and sure is not None
    return Evidence(
        groups=len(rewards),
        group_size=recipe.loop.group_size,
        rollouts=len(every),
        steps=recipe.loop.steps,
        reward=fmean(every),
        pass_at=_pass_at(rewards),
        best_at={k: fmean(best_at_k(values, k) for values in rewards) for k in _sizes(rewards)},
        likeliest=likeliest.reward,
        greedy=greedy,
        knows=sure.knows,
        assured=sure.assured,
        spread=fmean(pstdev(values) for values in rewards),
        signal=fmean(group.has_signal for group in credited),
        signal_doubled=_signal_doubled(rewards, fmean(group.has_signal for group in credited)),
        snr=signal_to_noise([(group.group, group.advantages) for group in credited]),
        malformed=fmean(bool(call.malformed) for call in offered) if offered else 0.0,
        cut_off=fmean(call.finish_reason is FinishReason.LENGTH for call in calls) if calls else 0.0,
        failed=fmean(rollout.outcome is not Outcome.SUCCEEDED for rollout in rollouts),
        tokens=trained / len(rollouts),
        moved=movement.asked if movement else None,
        raised=movement.earned if movement else 0.0,
        rehearsed=rehearsed,
    )


def knowledge(answers: Sequence[Answer]) -> float:
    """Covariance of reward and log-likelihood, by the latter's standard deviation: above 0 where the policy is surer of
    what is right than of what is wrong."""
    rewards, likelihoods = zip(*answers, strict=True)
    reward, likelihood, deviation = fmean(rewards), fmean(likelihoods), pstdev(likelihoods)
    covariance = fmean((r - reward) * (value - likelihood) for r, value in answers)
    return covariance / deviation if deviation > ALIKE else 0.0


def judge(trajectories: Sequence[Trajectory], low: float, high: float) -> list[Answer]:
    """Rewards of a group, scaled to [0, 1] by what they can be, and cut there, each with Σ log π of the rollout's
    trained tokens."""
    judged = judge_failures(trajectories, low)
    if not any(rollout.reward is not None for rollout in judged):  # nobody earned: only failures of the agent's own
        return [(0.0, _log_likelihood(rollout)) for rollout in judged if rollout.outcome.is_agents_own]
    return [
        (min(1.0, max(0.0, (rollout.reward - low) / (high - low))), _log_likelihood(rollout))
        for rollout in judged
        if rollout.reward is not None
    ]


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected highest reward of k of a task's samples, drawn without putting back, without bias; for rewards of 0 and
    1 it is pass@k. `k` is at most the number of samples."""
    if not 1 <= k <= len(rewards):
        raise ValueError(f"best@{k} wants at least {k} samples of a task, and there are {len(rewards)}")
    # the i-th lowest (from 1) is the highest of C(i - 1, k - 1) of the C(n, k) choices
    weights = [math.comb(rank, k - 1) for rank in range(len(rewards))]
    return sum(w * r for w, r in zip(weights, sorted(rewards), strict=True)) / math.comb(len(rewards), k)


def _log_likelihood(rollout: Trajectory) -> float:
    return sum(float(call.logprobs.sum()) for call in rollout.transitions if call.trainable)


def _likeliest(judged: Sequence[Answer]) -> Answer:
    """Answer of the likeliest rollout, with the mean reward of several that are as likely."""
    most = max(likelihood for _, likelihood in judged)
    return fmean(reward for reward, likelihood in judged if likelihood > most - ALIKE), most


def _sizes(rewards: Sequence[Sequence[float]]) -> list[int]:
    """1, 2, 4, … to the smallest group, and that."""
    least = min(map(len, rewards))
    return sorted({*(2**power for power in range(least.bit_length())), least})


def _pass_at(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """pass@k for each size (Chen et al. 2021, arXiv 2107.03374)."""
    counts = [(len(values), sum(value >= 1.0 - NEARLY for value in values)) for values in rewards]
    return {k: fmean(pass_at_k(n, passed, k) for n, passed in counts) for k in _sizes(rewards)}


def _signal_doubled(rewards: Sequence[Sequence[float]], signal: float) -> float:
    """Share of groups of twice the size whose members would not all earn the same, where a task's chance of a better
    reward is its share of them, drawn by two samples' weight to the mean of all tasks. Not below `signal`."""
    better = [(sum(value > min(map(min, rewards)) + NEARLY for value in values), len(values)) for values in rewards]
    mean = sum(count for count, _ in better) / sum(size for _, size in better)
    chances = [((count + 2.0 * mean) / (size + 2.0), size) for count, size in better]
    return max(signal, fmean(1.0 - p ** (2 * n) - (1.0 - p) ** (2 * n) for p, n in chances))
