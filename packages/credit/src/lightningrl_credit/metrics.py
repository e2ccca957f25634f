"""Metrics of a step: rewards, calls and tokens of its rollouts, its branches, its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from lightningrl.advantages import teaching_rows
from lightningrl.types import OtherCallKind, Outcome, Sample, Trajectory

__all__ = ["FAILURES", "describe_branches", "describe_rollouts", "describe_rows"]

FAILURES: Final = (Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.INFRASTRUCTURE_ERROR)
"""Outcomes whose share of the rollouts is a metric each."""


def describe_rollouts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over trajectories: `reward`, each named reward (a failure that the policy caused counts as the lowest),
    calls; shares of the failures by kind; sums: tokens, breaks, refused calls, threads left; of answers that were
    offered tools, the share with a malformed tool call. Keys without a value are left out, so that none is NaN."""
    metrics: dict[str, float] = {}
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
    for name in sorted({name for trajectory in trajectories for name in trajectory.rewards}):
        values = [value for trajectory in trajectories if (value := trajectory.rewards.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    metrics["rollouts"] = len(trajectories)
    metrics["rollouts_unrewarded"] = len(trajectories) - len(rewards)
    outcomes = [trajectory.outcome for trajectory in trajectories]
    metrics |= {f"failures/{kind.value}": outcomes.count(kind) / max(1, len(outcomes)) for kind in FAILURES}
    metrics["rewards_failed"] = float(sum(trajectory.unrewarded is not None for trajectory in trajectories))
    metrics["calls_per_rollout"] = len(calls) / max(1, len(trajectories))
    metrics["completion_tokens"] = float(sum(len(call.completion_ids) for call in calls))
    metrics["prompt_tokens"] = float(sum(len(call.prompt_ids) for call in calls))
    metrics["breaks"] = float(sum(call.is_break for call in calls))
    offered = [call for call in calls if call.offered or call.malformed]
    if offered:
        metrics["malformed_tool_calls"] = sum(bool(call.malformed) for call in offered) / len(offered)
    others = [call.kind for trajectory in trajectories for call in trajectory.other_calls]
    rare = {
        "calls_judge": others.count(OtherCallKind.JUDGE),
        "tries_repeated": sum(trajectory.attempt - 1 for trajectory in trajectories),
        "tools_contradicted": sum(tool.contradicted for rollout in trajectories for tool in rollout.tool_calls),
        "results_refused": sum(trajectory.results_refused for trajectory in trajectories),
        "threads_left": sum(len(trajectory.left_threads) for trajectory in trajectories),
    }
    metrics |= {name: float(count) for name, count in rare.items() if count}
    metrics["calls_refused"] = float(others.count(OtherCallKind.REFUSED))
    return metrics


def describe_branches(branches: Sequence[Trajectory]) -> dict[str, float]:
    """Counts of branches, of diverged ones and of the tokens that they sampled; empty where there is no branch."""
    if not branches:
        return {}
    tokens = sum(
        len(call.completion_ids) for branch in branches for call in branch.transitions if call.replayed_from is None
    )
    diverged = sum(branch.outcome is Outcome.DIVERGED for branch in branches)
    return {"branches": float(len(branches)), "branches_diverged": float(diverged), "branch_tokens": float(tokens)}


def describe_rows(signals: Sequence[bool], samples: Sequence[Sample]) -> dict[str, float]:
    """Counts of groups, and of rows with an advantage; a learner whose loss has other terms learns from more."""
    teaching = teaching_rows(samples)
    return {
        "groups": float(len(signals)),
        "groups_without_signal": float(signals.count(False)),
        "rows": float(len(teaching)),
        "trained_tokens": float(sum(int(sample.mask.sum()) for sample in teaching)),
    }
