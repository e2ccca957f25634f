"""Switches of a chat template whose meaning nobody knows: they are tried on a conversation that has all there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["changes_prompts"]

_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_EVERYTHING: Final[list[Mapping[str, Any]]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "c",
        "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "d", "name": "f", "tool_call_id": "call12345"},
    {"role": "assistant", "content": "e", "reasoning_content": "f"},
    {"role": "user", "content": "g"},
]
"""A conversation in which a template's switches show."""


def changes_prompts(render: Callable[..., str], name: str, value: Any) -> bool:
    """True where a switch would change some prompt that `render(messages, tools=…)` writes."""

    def text(messages: list[Mapping[str, Any]], **kwargs: Any) -> str | None:
        try:
            return render(messages, **kwargs)
        except Exception:  # noqa: BLE001  (a template may take no tools; another conversation shows what it does)
            return None

    tried = [
        (messages, {"tools": tools})
        for messages in (_EVERYTHING, _EVERYTHING[-2:], _EVERYTHING[-1:])
        for tools in (None, [_TOOL])
    ]
    return any(text(messages, **tools) != text(messages, **tools, **{name: value}) for messages, tools in tried)
