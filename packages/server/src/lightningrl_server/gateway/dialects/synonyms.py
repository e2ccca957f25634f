"""Names that clients, logs and data sets give to the parts of a chat message: one table for the gateway and for
importers of traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MARKS", "ROLES", "THOUGHT_KEYS", "THOUGHT_PARTS", "is_untrained", "text_of"]

ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API, in other words."""
THOUGHT_KEYS: Final = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "reasoning_details",
    "thinking_blocks",
)
"""Keys of a message's reasoning: of vLLM's and DeepSeek's clients, OpenRouter's, Copilot's, Ollama's, LiteLLM's."""
THOUGHT_PARTS: Final = ("thinking", "reasoning", "reasoning_content", "redacted_thinking")
"""Types of a content's parts that are reasoning."""
MARKS: Final = ("weight", "train", "training", "trainable", "loss", "loss_weight")
"""Keys by which an author says that a message is not to be trained on: 0, false."""
_TEXTS: Final = ("text", "thinking", "reasoning", "reasoning_content", "content", "summary")
"""Keys under which they hold their text."""


def is_untrained(message: Mapping[str, Any]) -> bool:
    """True for a message that its author says is not to be trained on."""
    return any(str(message[mark]).lower() in ("0", "0.0", "false") for mark in MARKS if mark in message)


def text_of(value: Any) -> str:
    """The text in a part of reasoning, or in a list of them; nothing where it is encrypted."""
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if isinstance(value, dict):
        return next(filter(None, (text_of(value.get(key)) for key in _TEXTS)), "")
    return value if isinstance(value, str) else ""
