"""What happened in a commit, for whoever waits for it: in this process, and in the others that serve the same store."""

from __future__ import annotations

from dataclasses import dataclass

from lightningrl.store.protocol import AttemptInfo
from lightningrl.types import RolloutState

__all__ = ["Begun", "Ended", "Event", "Leased", "Queued"]


@dataclass(frozen=True, slots=True)
class Queued:
    """A rollout waits for a worker."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease now ends at `expires_at`."""

    expires_at: float


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt was leased."""

    digest: bytes
    """Of its key."""
    info: AttemptInfo


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt is over."""

    rollout_id: str
    attempt: int
    state: RolloutState
    """Of the rollout afterwards."""


Event = Queued | Leased | Begun | Ended
