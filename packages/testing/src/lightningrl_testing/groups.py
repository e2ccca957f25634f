"""Trajectories for tests, made by helpers that show what matters: `make_group((0.0,), (1.0,))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.types import (
    FinishReason,
    Outcome,
    SamplingSettings,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

__all__ = ["make_group", "make_trajectory", "make_transition"]


def make_transition(
    id: str,  # noqa: A002
    *,
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    index: int = 0,
    agent: str | None = None,
    parent: str | None = None,
    trainable: bool = True,
    rewards: Mapping[str, float | None] | None = None,
    version: int = 0,
    temperature: float = 1.0,
    policy: str = "policy",
    tool_call_ids: tuple[str, ...] = (),
    malformed: tuple[str, ...] = (),
    offered: str = "",
    fits: tuple[str, ...] = (),
) -> Transition:
    """One call; the logprob of token x is -x/1000, so that a misplaced one shows. It starts at the second `index`."""
    return Transition(
        id=id,
        index=index,
        policy=policy,
        policy_version=version,
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=np.array([-token / 1000 for token in completion], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        sampling=SamplingSettings(temperature=temperature),
        agent=agent,
        parent_id=parent,
        tool_call_ids=tool_call_ids,
        malformed=malformed,
        offered=offered,
        fits=fits,
        rewards=dict(rewards or {}),
        trainable=trainable,
        started_at=float(index),
    )


def make_trajectory(
    rollout_id: str,
    transitions: Sequence[Transition],
    *,
    reward: float | None = 0.0,
    group_id: str = "g",
    output: object = None,
    answer: object = None,
    tool_calls: Sequence[ToolCall] = (),
    outcome: Outcome = Outcome.SUCCEEDED,
) -> Trajectory:
    """A finished attempt with the return `reward`; None = nobody scored it."""
    return Trajectory(
        rollout_id=rollout_id,
        attempt=1,
        task=Task(id=f"task-{group_id}", input={}, answer=answer),
        group_id=group_id,
        outcome=outcome,
        transitions=tuple(transitions),
        tool_calls=tuple(tool_calls),
        output=output,
        rewards={} if reward is None else {"reward": reward},
        reward=reward,
    )


def make_group(
    *turn_rewards: Sequence[float | None],
    rewards: Sequence[float | None] | None = None,
    id: str = "g",  # noqa: A002
) -> TrajectoryGroup:
    """Make a group with one trajectory per argument and one call per number in it: the call's turn reward.

    None = nobody scored it. Without `rewards` there are no turn rewards: the return of a trajectory is its last number,
    as in `make_group((0.0,), (1.0,))`. Calls grow one history, of `write` and `check` in turn, and differ in length.
    """
    trajectories = []
    for i, turns in enumerate(turn_rewards):
        reward = (turns[-1] if turns else None) if rewards is None else rewards[i]
        history: list[int] = [100 + i]
        transitions = []
        for t, turn_reward in enumerate(turns):
            completion = [1000 * (i + 1) + 10 * t + k for k in range(1 + (i + t) % 3)]
            transitions.append(
                make_transition(
                    f"{id}-{i}/{t}",
                    prompt=history,
                    completion=completion,
                    index=t,
                    agent=("write", "check")[t % 2],
                    parent=f"{id}-{i}/{t - 1}" if t else None,
                    rewards={} if rewards is None else {"turn": turn_reward},
                )
            )
            history = [*history, *completion, 500 + t]
        trajectories.append(make_trajectory(f"{id}-{i}", transitions, reward=reward, group_id=id))
    return TrajectoryGroup(id=id, trajectories=tuple(trajectories))
