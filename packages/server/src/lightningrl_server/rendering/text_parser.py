"""Parser of completions whose tool-call markup is read as text: tokens to reasoning, content and calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any, Final

from lightningrl_server.rendering.markups import Markup, TextReading, read_text
from lightningrl_server.rendering.tokenizer import QuickTokenizer

__all__ = ["TextParser", "parsed_calls"]

_THINK_END: Final = "</think>"
_BACK: Final = 32
"""Characters before new ones that may begin a mark which they end."""


class TextParser:
    """Reads the completions of one policy."""

    def __init__(self, tokenizer: QuickTokenizer, markup: Markup) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._opens = re.compile(markup.opens or "|".join(map(re.escape, markup.tokens)))
        framing = sorted({*tokenizer.all_special_tokens} - {"<think>", _THINK_END, *markup.tokens})
        self._framing = re.compile("|".join(map(re.escape, framing))) if framing else None
        self._own_ids = frozenset(tokenizer.convert_tokens_to_ids(list(markup.tokens)))

    def opens_call(self, text: str, place: int = 0) -> bool:
        """True where what begins near a place of a text may be or become a call."""
        return self._opens.search(text, max(0, len(text[:place].rstrip()) - _BACK)) is not None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_tail: Sequence[int],
        stop_ids: Collection[int],
        *,
        tools: bool,
        final: bool,
    ) -> TextReading:
        """Read a completion after the last tokens of its prompt. Without `tools`, calls stay text."""
        reasoning: Any = import_module("renderers.reasoning")
        end = len(completion_ids)
        while end and completion_ids[end - 1] in stop_ids and completion_ids[end - 1] not in self._own_ids:
            end -= 1
        ids = list(completion_ids[:end])
        is_open = reasoning.prompt_ends_in_reasoning(self._tokenizer, list(prompt_tail), stop_ids=frozenset(stop_ids))
        thought = reasoning.scan_reasoning(self._tokenizer, ids, prefilled=is_open)
        if thought.is_open:
            return TextReading(content="", reasoning=thought.text)
        text = self._tokenizer.decode(ids)
        if thought.text is not None:
            text = text.partition(_THINK_END)[2]
        if self._framing is not None:
            text = self._framing.sub("", text)
        if not tools and not self._markup.has_channels:
            return TextReading(content=text, reasoning=thought.text or "")
        read = read_text(self._markup, text, final=final)
        return TextReading(
            content=read.content, calls=read.calls, reasoning=thought.text or read.reasoning, problems=read.problems
        )


def parsed_calls(reading: TextReading) -> tuple[Any, ...]:
    """The calls of a reading as `renderers.ParsedToolCall`."""
    library: Any = import_module("renderers.base")
    return tuple(
        library.ParsedToolCall(raw=raw, name=call.name, arguments=call.arguments, id=call.id)
        for call, raw in reading.calls
    )
