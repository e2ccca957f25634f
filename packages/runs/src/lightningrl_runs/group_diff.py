"""The rollouts of a group side by side: what they share, said once, and what each did from where they part.

shared      call 0 "<tool_call>…"                        the same tokens in all of them
parts in    call 1, at token 7 of what was sampled       or in its prompt: the tools answered differently
columns     one for each rollout: reward, advantage, its calls from there on
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.records import RolloutRecord, Score
from lightningrl.types import ToolCall, Trajectory, Transition, common_tokens
from lightningrl_runs.segments import SegmentReader

__all__ = ["Divergence", "Sibling", "SiblingCall", "Siblings", "build_siblings", "find_divergence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Where rollouts part for the first time."""

    call: int
    """Index of the first call that is not the same in all of them."""
    token: int
    """First token that differs, of the call's prompt or of its completion."""
    in_prompt: bool
    """True where their prompts differ; else what was sampled does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiblingCall:
    """One rollout's call."""

    index: int
    agent: str | None
    text: str
    """Text of the whole completion, markup included."""
    same: int
    """Characters at its beginning that all siblings share; 0 but for the call in which they part."""
    tokens: int
    mean_advantage: float | None
    """Over its tokens; None = nobody scored it."""
    tools: tuple[ToolCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sibling:
    """A rollout of the group, as a column."""

    rollout: RolloutRecord
    calls: tuple[SiblingCall, ...]
    """Calls from where they part on; empty where it has not ended."""
    mean_advantage: float | None
    """Over all tokens that were scored; None = none was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Siblings:
    """A group's rollouts side by side."""

    group_id: str
    rollouts: tuple[Sibling, ...]
    """In the order in which they were asked for; the first of them, where there are many."""
    count: int
    """Rollouts of the whole group."""
    shared: tuple[SiblingCall, ...]
    """Calls that are the same in all of them."""
    divergence: Divergence | None
    """None = fewer than two have calls, or they never part."""
    mean: float | None
    """Mean reward; None = none has one."""
    std: float | None


def build_siblings(
    group_id: str,
    rollouts: Sequence[RolloutRecord],
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    reader_of: Callable[[str], SegmentReader],
    most: int,
) -> Siblings:
    """Compare a group's rollouts.

    `rollouts`: the whole group, of which the first `most` become columns; `trajectories` and `scores`: of the columns
    that have ended.
    """
    ended = {trajectory.rollout_id: trajectory for trajectory in trajectories}
    credit = {score.rollout_id: score for score in scores}
    called = [trajectory.transitions for trajectory in trajectories if trajectory.transitions]
    divergence = find_divergence(called)
    whole = len(called[0]) if len(called) > 1 else 0
    apart = whole if divergence is None else divergence.call

    def read(trajectory: Trajectory, calls: Sequence[Transition]) -> tuple[SiblingCall, ...]:
        score = credit.get(trajectory.rollout_id)
        return tuple(_read_call(trajectory, call, score, divergence, reader_of) for call in calls)

    columns = []
    for rollout in rollouts[:most]:
        trajectory = ended.get(rollout.spec.id)
        score = credit.get(rollout.spec.id)
        columns.append(
            Sibling(
                rollout=rollout,
                calls=() if trajectory is None else read(trajectory, trajectory.transitions[apart:]),
                mean_advantage=_mean(
                    [] if score is None else [array for array in score.advantages.values() if array is not None]
                ),
            )
        )
    first = next((trajectory for trajectory in trajectories if trajectory.transitions), None)
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return Siblings(
        group_id=group_id,
        rollouts=tuple(columns),
        count=len(rollouts),
        shared=() if first is None else read(first, first.transitions[:apart]),
        divergence=divergence,
        mean=statistics.fmean(rewards) if rewards else None,
        std=statistics.pstdev(rewards) if rewards else None,
    )


def find_divergence(rollouts: Sequence[Sequence[Transition]]) -> Divergence | None:
    """Find where rollouts stop being the same, token for token; None where fewer than two are given, or they never
    do."""
    if len(rollouts) < 2:
        return None
    longest = max(map(len, rollouts))
    for index in range(longest):
        calls = [calls[index] for calls in rollouts if index < len(calls)]
        first, *others = calls
        if len(calls) < len(rollouts):  # some have ended here, others go on
            return Divergence(call=index, token=0, in_prompt=False)
        prompt = min(common_tokens(first.prompt_ids, call.prompt_ids) for call in others)
        if any(len(call.prompt_ids) != prompt for call in calls):
            return Divergence(call=index, token=prompt, in_prompt=True)
        sampled = min(common_tokens(first.completion_ids, call.completion_ids) for call in others)
        if any(len(call.completion_ids) != sampled for call in calls):
            return Divergence(call=index, token=sampled, in_prompt=False)
    return None


def _read_call(
    trajectory: Trajectory,
    call: Transition,
    score: Score | None,
    divergence: Divergence | None,
    reader_of: Callable[[str], SegmentReader],
) -> SiblingCall:
    reader = reader_of(call.policy)
    text = reader.text(call.completion_ids)
    parts_here = divergence is not None and divergence.call == call.index and not divergence.in_prompt
    same = len(reader.text(call.completion_ids[: divergence.token])) if divergence is not None and parts_here else 0
    credit = None if score is None else score.advantages.get(call.id)
    return SiblingCall(
        index=call.index,
        agent=call.agent,
        text=text,
        same=min(same, len(text)),
        tokens=len(call.completion_ids),
        mean_advantage=_mean([] if credit is None else [credit]),
        tools=tuple(tool for tool in trajectory.tool_calls if tool.transition_id == call.id),
    )


def _mean(credit: Sequence[np.ndarray]) -> float | None:
    return float(np.concatenate(credit).mean()) if credit else None
