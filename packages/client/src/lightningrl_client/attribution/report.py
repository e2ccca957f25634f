"""A report of an agent on its rollout: a body, and the path below the attempt's base URL that takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """One `POST {base URL}/{path}`."""

    path: Literal["rewards", "tool_calls"]
    body: dict[str, Any]
    """JSON"""
