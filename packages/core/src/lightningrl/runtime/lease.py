"""What a worker is given: one attempt of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Lease", "LeasedTask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasedTask:
    """The task as the agent may see it: without its answer."""

    id: str
    input: Any
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right, and the duty, to run one attempt."""

    rollout_id: str
    attempt: int
    task: LeasedTask
    timeout_s: float
    key: str
    """Scoped to this attempt."""
    base_path: str
    """`/rollouts/{id}/attempts/{n}/v1`"""
    mode: str = "train"
