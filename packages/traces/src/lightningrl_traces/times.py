"""Times as exports write them: ISO 8601, Unix seconds, milliseconds or nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

__all__ = ["unix_seconds"]


def unix_seconds(value: Any) -> float:
    """Return Unix seconds; 0.0 where there is no time. A time without a zone is UTC."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for scale in (1e9, 1e6, 1e3):
            if value > 1e8 * scale:
                return value / scale
        return float(value)
    if not isinstance(value, str) or not value:
        return 0.0
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
