"""Evidence of a trajectory, checked and read: one number for each call or token, and its mean over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightningrl.advantages import FloatArray
from lightningrl.errors import PluginError
from lightningrl.types import Evidence, Trajectory, TrajectoryGroup

__all__ = ["check_evidence", "evidence_of", "mean_evidence"]

MOST_NAMES = 32


def check_evidence(evidence: Any, trajectory: Trajectory) -> None:
    """Raise PluginError unless it is evidence of one number per call or token, ValueError unless all are finite."""
    if not isinstance(evidence, Evidence):
        raise PluginError(
            f"`score` returned {type(evidence).__name__}; return Evidence(calls={{name: one number per call}})"
        )
    if len(evidence.calls) + len(evidence.tokens) > MOST_NAMES:
        raise PluginError(f"`score` returned more than {MOST_NAMES} kinds of numbers; return what `assign` needs")
    for name, values, wanted in _columns(evidence, trajectory):
        if np.shape(values) != wanted:
            raise PluginError(
                f"`score` returned {name!r} of shape {np.shape(values)} for rollout {trajectory.rollout_id!r}, "
                f"which needs {wanted}; return one number per call, or an array for each call with one per completion "
                "token"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{name!r} is not finite")


def evidence_of(trajectory: Trajectory, name: str) -> FloatArray:
    """Read a number of each call of a rewarded trajectory. Raises PluginError where there is none."""
    if not trajectory.transitions:
        return np.zeros(0)
    if trajectory.evidence is None or name not in trajectory.evidence.calls:
        raise PluginError(
            f"rollout {trajectory.rollout_id!r} has a reward and no {name!r}; let `score` find it before `assign`"
        )
    return trajectory.evidence.calls[name].astype(np.float64)


def mean_evidence(groups: Sequence[TrajectoryGroup], name: str) -> dict[str, float]:
    """Metric of a step: the mean of a number over its calls; empty where nobody has one."""
    columns = [
        trajectory.evidence.calls[name]
        for group in groups
        for trajectory in group.trajectories
        if trajectory.evidence is not None and trajectory.transitions and name in trajectory.evidence.calls
    ]
    return {name: float(np.concatenate(columns).mean())} if columns else {}


def _columns(evidence: Evidence, trajectory: Trajectory) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield name, values and the shape that they must have."""
    for name, values in evidence.calls.items():
        yield name, values, (len(trajectory.transitions),)
    for name, by_call in evidence.tokens.items():
        if len(by_call) != len(trajectory.transitions):
            yield name, np.zeros(len(by_call)), (len(trajectory.transitions),)
            continue
        for call, values in zip(trajectory.transitions, by_call, strict=True):
            yield name, values, (len(call.completion_ids),)
