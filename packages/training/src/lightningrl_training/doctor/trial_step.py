"""One step of the real learner, to see whether reward reaches the tokens: how much likelier are its tokens afterwards?

log π(tokens) ─► learn(rows) ─► log π(tokens)      gain = mean of sign(A) · Δ log π, over tokens with an advantage

A learner that raises gives a lesson, too: what the rollouts have shown stays.

Credit of a group whose rollouts all earn the same is tried by changing their rewards: most methods give it none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightningrl.advantages import teaching_rows
from lightningrl.backends import Backend, Continuation, LearnReport, TokenScorer
from lightningrl.errors import LightningError
from lightningrl.types import Array, Sample, Trajectory, TrajectoryGroup
from lightningrl_credit.scoring import Scorer
from lightningrl_training.doctor.machine import MemoryGrowth
from lightningrl_training.doctor.observation import GpuMemory, Lesson

__all__ = ["failed_lesson", "falls_silent", "teach"]

MOST_ROWS = 64
"""Rows that are scored; all are learned from."""


async def teach(
    backend: Backend, samples: Sequence[Sample], learn: Callable[[Sequence[Sample]], Awaitable[LearnReport]]
) -> Lesson:
    """Take one step on a policy's rows and measure its effect. Where no row has an advantage, +1 is planted on all of
    them.

    `learn` makes the step; it is awaited once, if there is a row. What backend or step raise is in the lesson.
    """
    rows, is_planted = list(samples), not teaching_rows(samples)
    if is_planted:
        rows = [replace(row, advantages=row.mask.astype(np.float32)) for row in rows if row.mask.any()]
    if not rows:
        return Lesson(rows=0)
    teaching = teaching_rows(rows)
    looked_at = teaching[:MOST_ROWS]
    try:
        before = await asyncio.to_thread(_logprobs, backend, looked_at)
        growth = MemoryGrowth()
        report = await learn(rows)
        grown = growth.most()
        after = await asyncio.to_thread(_logprobs, backend, looked_at)
    except Exception as error:  # noqa: BLE001  the boundary to a backend and to a loss of the user's
        return failed_lesson(error, rows=len(teaching), is_planted=is_planted)
    return Lesson(
        rows=len(teaching),
        is_planted=is_planted,
        gain=None if before is None or after is None else _gain(looked_at, before, after),
        gradient=report.metrics.get("grad_norm"),
        learning_rate=report.metrics.get("lr"),
        grown=grown,
        gpu=_gpu(report.metrics),
    )


def failed_lesson(error: Exception, *, rows: int, is_planted: bool = False) -> Lesson:
    """Make a lesson of what backend or step raised."""
    return Lesson(
        rows=rows,
        is_planted=is_planted,
        error=str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}",
        is_out_of_memory=_is_out_of_memory(error),
    )


def falls_silent(scorer: Scorer, groups: Sequence[TrajectoryGroup]) -> bool:
    """True if no group has an advantage once all its rollouts earn what its best one does. `groups`: some that have
    one now."""
    return bool(groups) and not any(scorer.credit_group(_alike(group)).has_signal for group in groups)


def _alike(group: TrajectoryGroup) -> TrajectoryGroup:
    rewarded = [member for member in group.members if member.reward is not None]
    if not rewarded:
        return group
    best = max(rewarded, key=lambda member: member.reward or 0.0)

    def earn(members: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        return tuple(replace(member, reward=best.reward, rewards=best.rewards) for member in members)

    return replace(group, trajectories=earn(group.trajectories), branches=earn(group.branches))


def _is_out_of_memory(error: Exception) -> bool:
    """Tell out-of-memory errors by type, else by their words: torch has a type of its own for a GPU and a plain
    RuntimeError for a CPU, and another process's error reaches us as a sentence."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in message or "allocate memory" in message


def _gpu(metrics: Mapping[str, float]) -> GpuMemory | None:
    if "gpu_memory" not in metrics:
        return None
    before, peak, total = (int(metrics[name]) for name in ("gpu_memory_before", "gpu_memory_peak", "gpu_memory"))
    return GpuMemory(before=before, peak=peak, total=total)


def _logprobs(backend: Backend, rows: Sequence[Sample]) -> list[Array] | None:
    """Log-probabilities of all tokens but the first, by row; None where the backend tells none."""
    if not isinstance(backend, TokenScorer):
        return None
    return list(backend.logprobs([Continuation(context=row.token_ids[:1], tokens=row.token_ids[1:]) for row in rows]))


def _gain(rows: Sequence[Sample], before: Sequence[Array], after: Sequence[Array]) -> float:
    gains = [
        (np.sign(row.advantages[1:]) * (new - old))[row.mask[1:] & (row.advantages[1:] != 0.0)]
        for row, old, new in zip(rows, before, after, strict=True)
    ]
    return float(np.mean(np.concatenate(gains)))
