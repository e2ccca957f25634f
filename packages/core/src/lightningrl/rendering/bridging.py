"""The text that a chat template writes between an assistant's answer and the next completion, for templates without a renderer.

    …<assistant> S <|im_end|>\\n<user>new message<|im_end|>\\n<assistant>      S = a sentinel in place of the answer
                   └──────────── suffix ────────────────────────────┘

The tokens of the suffix go after the tokens that the policy itself sampled, so its history stays a prefix, id for id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lightningrl.rendering.templates import joined_turns, late_systems

__all__ = ["TemplateBridge"]

_SENTINEL = "lightningrlsentinel7f3a"


class TemplateBridge:
    """Finds the suffix by rendering a short conversation with a sentinel answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids: frozenset[int] = frozenset()
        closed = self._text([{"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}], prompt=False)
        _, found, close = (closed or "").rpartition(_SENTINEL)
        self._close = close if found else ""
        ids = self._encode(self._close)
        added = tokenizer.added_tokens_decoder
        self.close_token_id: int | None = ids[0] if ids and ids[0] in added else None
        """The single token by which the template ends an assistant's turn, where there is one."""

    def suffix(self, new_messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        """Tokens from the end of the sentinel answer up to the next completion; None where the template hides them."""
        answer: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
        calls = [_call_of(message) for message in _leading_tools(new_messages)]
        if calls and self.close_token_id is not None:
            # Templates may look tool results up in the calls that asked for them; the close then follows the calls' markup.
            text = self._text([{"role": "user", "content": "x"}, {**answer, "tool_calls": calls}, *new_messages])
            _, found, rest = (text or "").partition(_SENTINEL)
            mark = self._tokenizer.decode([self.close_token_id], skip_special_tokens=False)
            at = rest.find(mark)
            if found and at >= 0:
                return tuple(self._encode(rest[at:]))
        text = self._text([{"role": "user", "content": "x"}, answer, *new_messages])
        _, found, rest = (text or "").partition(_SENTINEL)
        return tuple(self._encode(rest)) if found else None

    def join(self, completion_ids: Sequence[int], suffix: tuple[int, ...]) -> tuple[int, ...]:
        """The suffix without the close that the policy sampled itself."""
        if completion_ids and suffix and completion_ids[-1] in self.stop_token_ids and suffix[0] in self.stop_token_ids:
            return suffix[1:]
        return suffix

    def _text(self, messages: list[Mapping[str, Any]], *, prompt: bool = True) -> str | None:
        for turns in chain([messages], joined_turns(messages)):
            try:
                text = str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, tokenize=False))
            except Exception:  # noqa: BLE001, S112  (templates raise what they like; a refusal means: render in full and count a break)
                continue
            if all(system in text for system in late_systems(turns)):
                return text
        return None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def _leading_tools(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    tools: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool":
            break
        tools.append(message)
    return tools


def _call_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": message.get("tool_call_id") or "call",
        "type": "function",
        "function": {"name": message.get("name") or "tool", "arguments": {}},
    }
