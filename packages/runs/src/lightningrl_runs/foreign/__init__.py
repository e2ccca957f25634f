"""Requests and answers of chat in the forms of other APIs, conventions and frameworks, read as OpenAI's messages.

messages.py   a message of any form        bodies.py   a whole request or answer, also streamed
"""

from __future__ import annotations

from typing import Any

__all__ = ["Message", "dict_of", "dicts_of"]

Message = dict[str, Any]
"""A chat message in OpenAI's form."""


def dict_of(value: object) -> dict[str, Any]:
    """Return a part of another's document as a dict; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}


def dicts_of(value: object) -> list[dict[str, Any]]:
    """Return the dicts among the items of another's list; none where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
