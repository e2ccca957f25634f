"""One thing that a certificate says of a run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    is_passed: bool | None
    """None = it could not be looked at."""
    said: str
