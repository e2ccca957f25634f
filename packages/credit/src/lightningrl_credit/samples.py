"""From credited trajectories to rows for the learner.

Rows are views: one per call, or merged by prefix; both give the same gradient.

    call 0  [prompt]·completion                 call   [p0]·c0    [p0 c0 p1]·c1    [p0 c0 p1 c1 p2]·c2      three rows
    call 1  [prompt completion more]·c1   ─►    merged [p0]·c0 [p1]·c1 [p2]·c2                              one row
    call 2  …                                          · = trained (mask): each sampled token in exactly one row

A token that the call's grammar left no other is no decision: it is context, as the prompt is (`Transition.chosen`).
Weights are per token and sum up a rollout's share, so a rollout weighs the same however many rows it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import ConfigError, PluginError
from lightningrl.types import Advantages, Array, RolloutMode, Sample, Trajectory, TrajectoryGroup, Transition

__all__ = ["Aggregation", "Rows", "build_samples", "check_advantages"]

Rows = Literal["call", "merged"]
Aggregation = Literal["rollout_mean", "token_mean", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainedCall:
    """A call that carries credit."""

    number: int
    """Place among the rollout's calls."""
    transition: Transition
    advantages: Array
    targets: Array | None
    """Values that a critic learns, one per token."""


def build_samples(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[Advantages],
    *,
    rows: Rows = "call",
    aggregation: Aggregation = "rollout_mean",
    constant_length: int | None = None,
    value_targets: Sequence[Advantages | None] | None = None,
) -> list[Sample]:
    """Build the rows of all calls that are trainable and scored (advantage not None), in the order of the groups.

    `rows`: `call`, one row per call; `merged`, calls whose prompt continues their parent's tokens share a row.
    `aggregation`, the weight of a trained token, with N the rollouts that have at least one:
        `rollout_mean`  1 / (N · trained tokens of its rollout)      every rollout counts the same
        `token_mean`    1 / all trained tokens                       every token counts the same (DAPO)
        `constant`      1 / (N · constant_length)                    no length bias (Dr. GRPO)
    Rows whose advantages are all 0.0 are among them: the learner knows whether its loss vanishes there
    (`teaching_rows`). `value_targets`: values that a critic learns from these rows, formed like `advantages`.

    Raises PluginError when advantages do not fit their tokens, ConfigError on unknown settings.
    """
    _check_settings(rows, aggregation, constant_length)
    if len(groups) != len(advantages):
        raise PluginError(
            f"{len(groups)} groups but advantages for {len(advantages)}; assign credit to each group once"
        )
    rollouts: list[tuple[Trajectory, list[_TrainedCall | None], int]] = []
    for group, group_advantages, group_targets in zip(
        groups, advantages, value_targets or [None] * len(groups), strict=True
    ):
        check_advantages(group, group_advantages)
        for number, (trajectory, credit) in enumerate(zip(group.members, group_advantages, strict=True)):
            trained = _trained_calls(
                trajectory,
                credit,
                None if group_targets is None or number >= len(group_targets) else group_targets[number],
            )
            tokens = sum(_count_chosen(call.transition) for call in trained if call is not None)
            if tokens:
                rollouts.append((trajectory, trained, tokens))
    all_tokens = sum(tokens for _, _, tokens in rollouts)
    samples: list[Sample] = []
    for trajectory, trained, tokens in rollouts:
        if aggregation == "rollout_mean":
            weight = 1.0 / (len(rollouts) * tokens)
        elif aggregation == "token_mean":
            weight = 1.0 / all_tokens
        else:
            weight = 1.0 / (len(rollouts) * (constant_length or 1))
        chains = _merge(trajectory, trained) if rows == "merged" else [[call] for call in trained if call is not None]
        samples.extend(_row(trajectory, chain, weight) for chain in chains)
    return samples


def check_advantages(group: TrajectoryGroup, advantages: Advantages) -> None:
    """Raise PluginError where what an assigner returned does not fit the group's calls and their tokens."""
    if len(group.members) != len(advantages):
        raise PluginError(
            f"group {group.id!r}: {len(group.members)} trajectories but credit for {len(advantages)}; "
            "a credit assigner returns one entry each"
        )
    for trajectory, by_call in zip(group.members, advantages, strict=True):
        if len(by_call) != len(trajectory.transitions):
            raise PluginError(
                f"rollout {trajectory.rollout_id!r}: {len(trajectory.transitions)} calls but credit for "
                f"{len(by_call)}; a credit assigner returns one entry each, None for calls that it does not score"
            )
        for transition, credit in zip(trajectory.transitions, by_call, strict=True):
            if credit is None or not transition.trainable:
                continue
            if not isinstance(credit, np.ndarray) or credit.shape != (len(transition.completion_ids),):
                kind = (
                    f"of shape {credit.shape}"
                    if isinstance(credit, np.ndarray)
                    else f"that are a {type(credit).__name__}"
                )
                raise PluginError(
                    f"transition {transition.id!r}: {len(transition.completion_ids)} completion tokens but advantages "
                    f"{kind}; a credit assigner returns an array with one number per token"
                )
            if not np.isfinite(credit).all():
                raise PluginError(
                    f"transition {transition.id!r}: advantages are not finite; "
                    "check the credit assigner for a division by zero"
                )


def _check_settings(rows: str, aggregation: str, constant_length: int | None) -> None:
    if rows not in ("call", "merged"):
        raise ConfigError(f"no rows named {rows!r}; choose 'call' or 'merged'")
    if aggregation not in ("rollout_mean", "token_mean", "constant"):
        raise ConfigError(f"no aggregation named {aggregation!r}; choose 'rollout_mean', 'token_mean' or 'constant'")
    if aggregation == "constant" and (constant_length is None or constant_length < 1):
        raise ConfigError(
            f"aggregation 'constant' divides by constant_length, which is {constant_length!r}; "
            "set it to a number of tokens"
        )
    if aggregation != "constant" and constant_length is not None:
        raise ConfigError(
            f"constant_length is {constant_length!r} but aggregation {aggregation!r} does not use it; remove it"
        )


def _trained_calls(
    trajectory: Trajectory, by_call: Sequence[Array | None], targets: Sequence[Array | None] | None
) -> list[_TrainedCall | None]:
    """Credit of each call; None where it is not trained."""
    trained: list[_TrainedCall | None] = []
    for number, (transition, credit) in enumerate(zip(trajectory.transitions, by_call, strict=True)):
        if credit is None or not transition.trainable or not _count_chosen(transition):
            trained.append(None)
            continue
        if trajectory.mode is RolloutMode.VALIDATION:
            raise PluginError(
                f"rollout {trajectory.rollout_id!r} is for {trajectory.mode.value}, not for training; "
                "leave it out of the groups"
            )
        target = None if targets is None else targets[number]
        if target is not None and (np.shape(target) != np.shape(credit) or np.isinf(target).any()):
            raise PluginError(
                f"transition {transition.id!r}: value targets are one finite number per completion token, "
                "or NaN for none"
            )
        trained.append(_TrainedCall(number=number, transition=transition, advantages=credit, targets=target))
    return trained


def _merge(trajectory: Trajectory, trained: Sequence[_TrainedCall | None]) -> list[list[_TrainedCall]]:
    """Chains of trained calls, each a prefix of the next; a call that several continue is trained with the first."""
    # Calls 0 ─► 1 ─► 2 and 1 ─► 3 (two sub-agents go on from one history), all trained: leaves are 2 and 3.
    #     from 2 upwards: 2, 1, 0 are free ─► chain [0, 1, 2]
    #     from 3 upwards: 1 is taken        ─► chain [3], whose row has 0 and 1 as its prompt, untrained
    transitions = trajectory.transitions
    position = {transition.id: index for index, transition in enumerate(transitions)}
    parents: list[int | None] = []
    has_trained_child = [False] * len(transitions)
    for index, transition in enumerate(transitions):
        parent = position.get(transition.parent_id) if transition.parent_id is not None else None
        parents.append(
            parent if parent is not None and parent < index and _continues(transition, transitions[parent]) else None
        )
    for index in reversed(range(len(transitions))):
        above = parents[index]
        if above is not None and (trained[index] is not None or has_trained_child[index]):
            has_trained_child[above] = True
    chains: list[list[_TrainedCall]] = []
    taken = [False] * len(transitions)
    for leaf, call in enumerate(trained):
        if call is None or has_trained_child[leaf]:
            continue
        chain: list[_TrainedCall] = []
        at: int | None = leaf
        while at is not None and not taken[at]:
            taken[at] = True
            member = trained[at]
            if member is not None:
                chain.append(member)
            at = parents[at]
        chains.append(chain[::-1])
    return chains


def _continues(child: Transition, parent: Transition) -> bool:
    """True if the child's prompt starts with all of the parent's tokens."""
    n, m = len(parent.prompt_ids), len(parent.completion_ids)
    return (
        child.policy == parent.policy
        and len(child.prompt_ids) >= n + m
        and np.array_equal(child.prompt_ids[:n], parent.prompt_ids)
        and np.array_equal(child.prompt_ids[n : n + m], parent.completion_ids)
    )


def _count_chosen(transition: Transition) -> int:
    """Tokens that the policy chose; without a grammar all of them."""
    return int(transition.chosen.sum()) if transition.sampling.grammar else len(transition.completion_ids)


def _row(trajectory: Trajectory, calls: Sequence[_TrainedCall], weight: float) -> Sample:
    """Build one row: the tokens of the last call, with those that were chosen in each of `calls` trained."""
    last = calls[-1].transition
    token_ids = np.concatenate((last.prompt_ids, last.completion_ids), dtype=np.int32)
    length = len(token_ids)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs, advantages, weights = (np.zeros(length, dtype=np.float32) for _ in range(3))
    versions, calls_of = (np.full(length, -1, dtype=np.int32) for _ in range(2))
    temperatures = np.ones(length, dtype=np.float32)
    value_targets = np.full(length, np.nan, dtype=np.float32) if any(c.targets is not None for c in calls) else None
    for call in calls:
        transition = call.transition
        start = len(transition.prompt_ids)
        chosen: slice | NDArray[np.intp] = slice(None)
        here: slice | NDArray[np.intp] = slice(start, start + len(transition.completion_ids))
        if transition.sampling.grammar:
            chosen = np.flatnonzero(transition.chosen)
            here = start + chosen
        mask[here] = True
        logprobs[here] = transition.logprobs[chosen]
        advantages[here] = call.advantages[chosen]
        weights[here] = weight
        if value_targets is not None and call.targets is not None:
            value_targets[here] = call.targets[chosen]
        versions[here] = transition.policy_version
        calls_of[here] = call.number
        # Greedy calls record their logprobs at temperature 1 (backends.TokenChunk), so that is where they are trained.
        temperatures[here] = transition.sampling.temperature or 1.0
    return Sample(
        rollout_id=trajectory.rollout_id,
        policy=last.policy,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        advantages=advantages,
        weights=weights,
        versions=versions,
        calls=calls_of,
        temperatures=temperatures,
        value_targets=value_targets,
    )
