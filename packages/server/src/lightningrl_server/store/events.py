"""Events of a commit, for whoever waits for it: in this process, and in the others that serve the same store."""

from __future__ import annotations

from dataclasses import dataclass

from lightningrl.records import AttemptInfo
from lightningrl.types import RolloutState

__all__ = ["EndEvent", "Event", "LeaseEvent", "QueueEvent", "StartEvent"]


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """A rollout waits for a worker."""


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """A lease now ends at `expires_at`."""

    expires_at: float


@dataclass(frozen=True, slots=True)
class StartEvent:
    """An attempt was leased."""

    key_digest: bytes
    info: AttemptInfo


@dataclass(frozen=True, slots=True)
class EndEvent:
    """An attempt is over."""

    rollout_id: str
    attempt: int
    state: RolloutState
    """Of the rollout afterwards."""


Event = QueueEvent | LeaseEvent | StartEvent | EndEvent
