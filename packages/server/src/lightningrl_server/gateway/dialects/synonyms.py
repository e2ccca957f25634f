"""Names that clients, logs and data sets give to the parts of a chat message: one table for the gateway and for
importers of traces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["PROMPT_COLUMNS", "ROLES", "THOUGHT_KEYS", "THOUGHT_PARTS", "is_mark", "is_untrained", "marks_of", "text_of"]

ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API, in other words."""
PROMPT_COLUMNS: Final = frozenset(
    {"images", "image", "videos", "audio", "audios", "documents", "enable_thinking", "history"}
)
"""Columns of rows that a prompt is made of, beside its messages and tools."""
THOUGHT_KEYS: Final = (
    *("reasoning_content", "reasoning", "reasoning_text"),
    *("thinking", "reasoning_details", "thinking_blocks"),
)
"""Keys of a message's reasoning: of vLLM's and DeepSeek's clients, OpenRouter's, Copilot's, Ollama's, LiteLLM's."""
THOUGHT_PARTS: Final = ("thinking", "reasoning", "reasoning_content", "redacted_thinking")
"""Types of a content's parts that are reasoning."""
_MARKS: Final = frozenset({"weight", "weights", "train", "training", "trainable", "trained", "learn", "loss"})
"""Words of the keys by which an author says that a message is not to be trained on: `weight` 0, `loss_mask` 0,
`train_on_turn` false; with one of `_NOT`, `no_train` true."""
_NOT: Final = frozenset({"no", "not", "exclude", "excluded", "skip", "ignore", "without"})
_TEXTS: Final = ("text", "thinking", "reasoning", "reasoning_content", "content", "summary")
"""Keys under which they hold their text."""


def is_untrained(message: Mapping[str, Any]) -> bool:
    """True for a message, or a row, that its author says is not to be trained on."""
    beside = (message.get(key) for key in ("metadata", "additional_kwargs"))
    sides = (message, *(side for side in beside if isinstance(side, Mapping)))
    return any(is_mark(key, value) and _weight(key, value) <= 0 for side in sides for key, value in side.items())


def is_mark(key: str, value: Any) -> bool:
    """True for a key that says whether a message is trained on, wholly or not at all."""
    weight = _weight(key, value)
    return not _MARKS.isdisjoint(_words(key)) and (weight <= 0 or weight == 1)


def marks_of(side: Mapping[str, Any], kinds: type | tuple[type, ...] = list) -> list[str]:
    """Keys of a row, or a message, that weigh parts of it, or half of it, which nobody reads: values of `kinds`."""
    named = [key for key in side if isinstance(side[key], kinds) and not _MARKS.isdisjoint(_words(key))]
    return [key for key in named if side[key] and not is_mark(key, side[key])]


def _words(key: str) -> list[str]:
    return key.lower().replace("-", "_").split("_")


def _weight(key: str, value: Any) -> float:
    """A weight, by whatever name; NaN where it is none."""
    text = str(value).strip().lower()
    try:
        weight = float({"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}.get(text, text))
    except ValueError:
        return math.nan
    return weight if _NOT.isdisjoint(_words(key)) else 1 - weight


def text_of(value: Any) -> str:
    """The text in a part of reasoning, or in a list of them; nothing where it is encrypted."""
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if isinstance(value, dict):
        return next(filter(None, (text_of(value.get(key)) for key in _TEXTS)), "")
    return value if isinstance(value, str) else ""
