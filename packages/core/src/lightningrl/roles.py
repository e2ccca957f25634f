"""Roles: who in an agent makes a call. A nested role is a path, "team/writer"; naming a role names what lies below
it too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

__all__ = ["LONGEST_ROLE", "is_role_among"]

LONGEST_ROLE: Final = 200
"""Characters."""


def is_role_among(agent: str, roles: Collection[str]) -> bool:
    """True where `agent` ("write", or nested "team/write") is one of `roles` or lies below one."""
    parts = agent.split("/")
    return any("/".join(parts[:length]) in roles for length in range(1, len(parts) + 1))
