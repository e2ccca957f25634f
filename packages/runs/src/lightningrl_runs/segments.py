"""Token ids to text and to the parts of a conversation, told by the tokens of the chat template.

    ids    151644 872 198 │ 3838 374 6 9 7 30 │ 151645 198 151644 77091 198     │ 2983 │ 151645
    text   <|im_start|>user⏎ What is 6*7?       <|im_end|>⏎<|im_start|>assistant⏎ 42     <|im_end|>
    kind   markup            user               markup                           assistant (sampled)

The texts joined are what the tokenizer decodes the whole row to. Only a token of the vocabulary can begin markup, so a
user who types it in other tokens changes nothing; where a template has no such tokens, the kind is `unknown`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from lightningrl.types import IntArray

__all__ = ["Segment", "SegmentKind", "SegmentReader"]


class SegmentKind(StrEnum):
    """Speaker of some tokens, or their part in a turn."""

    MARKUP = "markup"
    """Markup of the chat template, of reasoning and of tool calls."""
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    UNKNOWN = "unknown"
    """The template's tokens do not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Neighbouring tokens of one kind."""

    kind: SegmentKind
    text: str
    start: int
    """First token, counted from the beginning of the row: prompt, then completion."""
    end: int
    """One after the last token."""
    pieces: tuple[str, ...] = ()
    """Where the policy sampled it, the text of each token; a character of several tokens stands with its last one."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.pieces)


_K = SegmentKind
_ASSISTANT: Final = (_K.ASSISTANT, _K.REASONING, _K.TOOL_CALL)
_INSIDE: Final[Mapping[str, SegmentKind]] = {
    "<think>": _K.REASONING,
    "</think>": _K.ASSISTANT,
    "<tool_call>": _K.TOOL_CALL,
    "</tool_call>": _K.ASSISTANT,
    "<｜tool▁calls▁begin｜>": _K.TOOL_CALL,
    "<｜tool▁calls▁end｜>": _K.ASSISTANT,
    "[TOOL_CALLS]": _K.TOOL_CALL,
}
"""Tokens within an assistant's turn, and what follows them."""
_ROLES: Final[Mapping[str, SegmentKind]] = {
    "system": _K.SYSTEM,
    "developer": _K.SYSTEM,
    "user": _K.USER,
    "assistant": _K.ASSISTANT,
    "model": _K.ASSISTANT,
    "tool": _K.TOOL_RESULT,
    "ipython": _K.TOOL_RESULT,
}
"""Words by which templates head a turn."""
_TOOLS: Final = "[AVAILABLE_TOOLS]"
"""Token before tools that stand in no message."""
_UNFINISHED: Final = "\ufffd"
_MOST_HELD: Final = 8
"""Tokens that are waited for at most until they are a character."""
_CONTEXT: Final = 4
"""Tokens before the first one that decoders may look at."""


class SegmentReader:
    """Reads the rows of one policy."""

    def __init__(self, tokenizer: Any | None) -> None:
        """Read with a fast tokenizer; None = nobody has it, and the text of a token is its number."""
        self._headers: dict[str, list[tuple[str, SegmentKind]]] = {}
        self._closers: frozenset[str] = frozenset()
        self._added: dict[int, Any] = {}
        self.has_text: Final = tokenizer is not None
        if tokenizer is None:
            self._decode_all: Callable[[Sequence[int]], str] = lambda ids: "".join(f"{token} " for token in ids)
            self._decode: Callable[[tuple[int, ...]], str] = self._decode_all
            return

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        self._decode_all = decode
        self._decode = lru_cache(1 << 16)(decode)
        self._added = dict(tokenizer.added_tokens_decoder)
        template = _Template(tokenizer, [added.content for added in self._added.values()])
        self._closers = frozenset(template.closers)
        template.headers.setdefault(_TOOLS, _K.SYSTEM)
        for header, kind in sorted(template.headers.items(), key=lambda item: -len(item[0])):
            first = next((added for added in template.added if header.startswith(added)), None)
            if first is not None:  # else it is a guess from another role's: <|developer|> by <|user|>
                self._headers.setdefault(first, []).append((header, kind))

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of a whole row at once: quicker than its parts."""
        return self._decode_all([int(token) for token in ids])

    def read(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        *,
        start: int = 0,
        before: Sequence[int] = (),
        kind: SegmentKind,
        most: int | None = None,
    ) -> tuple[tuple[Segment, ...], SegmentKind]:
        """Return the segments of a prompt and its completion, and the kind that goes on after them.

        Where an earlier call's row begins the prompt, `prompt_ids` are what follows it, `start` its length, `before`
        its last tokens and `kind` what it ended with (`MARKUP` at the beginning of a row). `most`: tokens that are
        read, the others are left out of the middle, in a segment without text; 0 = there are no segments.
        """
        if most is not None and len(prompt_ids) + len(completion_ids) > most:
            return self._read_ends(prompt_ids, completion_ids, start=start, before=before, kind=kind, most=most)
        ids = [*prompt_ids, *completion_ids]
        pieces = self._pieces(ids, tuple(before[-_CONTEXT:]))
        split = len(prompt_ids)
        segments: list[Segment] = []
        for first, last in ((0, split), (split, len(ids))):
            if completion_ids and first == split and kind not in _ASSISTANT:
                kind = _K.ASSISTANT  # a completion is the policy's, whatever stands before it
            for own, after, begin, end in self._runs(ids[first:last], pieces[first:last], kind):
                kind = after
                texts = pieces[first + begin : first + end]
                sampled = tuple(texts) if first == split else ()
                segments.append(
                    Segment(
                        kind=own,
                        text="".join(texts),
                        start=start + first + begin,
                        end=start + first + end,
                        pieces=sampled,
                    )
                )
        return tuple(segments), kind

    def pieces(self, ids: Iterable[int], before: Sequence[int] | IntArray = ()) -> list[str]:
        """Return the text of each token; a character of several tokens stands with its last one."""
        return self._pieces([int(token) for token in ids], tuple(int(token) for token in before[-_CONTEXT:]))

    def _read_ends(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        *,
        start: int,
        before: Sequence[int],
        kind: SegmentKind,
        most: int,
    ) -> tuple[tuple[Segment, ...], SegmentKind]:
        """Read the beginning, and of the end twice as much."""
        after = _K.MARKUP if completion_ids and completion_ids[-1] in self._added else _K.ASSISTANT
        if not most:
            return (), after
        split, length = len(prompt_ids), len(prompt_ids) + len(completion_ids)
        head, tail = most // 3, length - (most - most // 3)
        first, _ = self.read(
            prompt_ids[:head], completion_ids[: max(0, head - split)], start=start, before=before, kind=kind
        )
        gap = Segment(kind=_K.UNKNOWN, text="", start=start + head, end=start + tail)
        last, _ = self.read(
            prompt_ids[tail:], completion_ids[max(0, tail - split) :], start=start + tail, kind=_K.UNKNOWN
        )
        return (*first, gap, *last), after

    def _runs(
        self, ids: Sequence[int], pieces: Sequence[str], kind: SegmentKind
    ) -> Iterator[tuple[SegmentKind, SegmentKind, int, int]]:
        """Yield kind, the kind that goes on after it, first token and end of each run of one kind."""
        begin, own, position = 0, kind, 0
        while position < len(ids):
            this, after, width = self._at(ids, pieces, position, kind)
            if position > begin and this is not own:
                yield own, kind, begin, position
                begin = position
            own, kind, position = this, after, position + width
        if ids:
            yield own, kind, begin, len(ids)

    def _at(
        self, ids: Sequence[int], pieces: Sequence[str], position: int, kind: SegmentKind
    ) -> tuple[SegmentKind, SegmentKind, int]:
        """Return the kind of the token at `position`, the kind that goes on after it, and how many tokens belong
        together."""
        added = self._added.get(ids[position])
        if added is None:
            is_between = kind is _K.MARKUP and not pieces[position].isspace() and pieces[position] != ""
            own = _K.UNKNOWN if is_between else kind
            return own, own, 1
        for header, speaker in self._headers.get(added.content, ()):
            text, width = "", 0
            while len(text) < len(header) and position + width < len(ids):
                text, width = text + pieces[position + width], width + 1
            if text.startswith(header):
                return _K.MARKUP, speaker, width
        if added.content in self._closers:
            return _K.MARKUP, _K.MARKUP, 1
        inner = _INSIDE.get(added.content) if kind in _ASSISTANT else None
        is_draft = kind is _K.REASONING and inner is _K.TOOL_CALL  # a draft of a call is still a thought
        if inner is not None and not is_draft:
            return _K.MARKUP, inner, 1
        if added.content in self._headers:  # it heads a turn of nobody we know
            return _K.MARKUP, _K.UNKNOWN, 1
        return (_K.MARKUP if added.special else kind), kind, 1

    def _pieces(self, ids: Sequence[int], context: tuple[int, ...]) -> list[str]:
        """Return the text of each token; joined, they are the text of all.

        A decoder that gives up a whole run of bytes for a wrong one is read more kindly.

        The bytes E2 82 AC are "€", and one token each gives "", "" and "€". E2 before "A" is none: its piece is
        "\ufffd".
        """
        pieces: list[str] = []
        held: tuple[int, ...] = ()
        for token in ids:
            text = self._text(context, (*held, token))
            if held:
                finished = self._text(context, held)
                if text.startswith(finished) and text[len(finished) :][:1] not in ("", _UNFINISHED):
                    pieces[-1], text = finished, text[len(finished) :]
                    context, held = held, ()
            held = (*held, token)
            pieces.append("")
            if not text.endswith(_UNFINISHED):
                pieces[-1] = text
                context, held = held, ()
            elif len(held) > _MOST_HELD:
                cut = self._cut(context, held)
                pieces[cut - len(held) - 1] = self._text(context, held[:cut])
                context, held = held[:cut], held[cut:]
        if held:
            pieces[-1] = self._text(context, held)
        return pieces

    def _cut(self, context: tuple[int, ...], held: tuple[int, ...]) -> int:
        """Return where bytes that are no text can be parted, so that the parts are decoded as the whole is."""
        whole = self._text(context, held)
        cuts = range(len(held) - 1, 0, -1)
        return next(
            (cut for cut in cuts if self._text(context, held[:cut]) + self._decode(held[cut:]) == whole), len(held)
        )

    def _text(self, context: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """Return the text that the tokens add to that of `context`."""
        return self._decode((*context, *ids))[len(self._decode(context)) :] if context else self._decode(ids)


class _Template:
    """The markup that a chat template writes around messages, found by rendering some."""

    def __init__(self, tokenizer: Any, added: Sequence[str]) -> None:
        self.added = sorted(added, key=len, reverse=True)
        self.headers: dict[str, SegmentKind] = {}
        """Text before a message, from its first added token on."""
        self.closers: set[str] = set()
        """Added tokens after a message."""
        self._tokenizer = tokenizer
        call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}
        self._learn(({"role": "system"}, {"role": "user"}))
        self._learn(({"role": "user"}, {"role": "assistant"}, {"role": "user"}))
        tool = {"role": "tool", "tool_call_id": "call_0", "name": "look"}
        self._learn(({"role": "user"}, {"role": "assistant", "tool_calls": [call]}, tool, tool, {"role": "assistant"}))
        for header in [header for header, kind in self.headers.items() if kind is _K.USER and "user" in header]:
            for word, kind in _ROLES.items():
                self.headers.setdefault(header.replace("user", word), kind)

    def _learn(self, messages: Sequence[Mapping[str, Any]]) -> None:
        marked = [{**message, "content": f"lightningrl{index}said"} for index, message in enumerate(messages)]
        tail = ""
        for index, message in enumerate(marked):
            text = self._text(marked[: index + 1])
            before, _, after = text.rpartition(message["content"])
            if not before:
                return
            if index or message["role"] == "system":
                piece = before.rpartition(marked[index - 1]["content"])[2] if index else before
                # <|im_end|>⏎<|im_start|>user⏎ less <|im_end|>⏎, which ended the message before, is what heads this one
                shared = len(os.path.commonprefix((piece, tail)))  # noqa: RUF071  (characters are meant)
                kind = _ROLES[message["role"]]
                if not index and before == self._text([{**message, "role": "user"}]).partition(message["content"])[0]:
                    kind = _K.USER  # a system message begins the user's turn, as in Gemma's and Mistral's
                # what ends Mistral's user turn, [/INST], is all that heads the answer
                self._add_header(piece[shared:] or piece, kind)
            tail = after
            self.closers.update(token for token in self._tokens(tail) if token not in _INSIDE)

    def _add_header(self, text: str, kind: SegmentKind) -> None:
        tokens = self._tokens(text)
        if tokens:
            inner = next((token for token in tokens if token in _INSIDE), None)
            header = text[text.index(tokens[0]) : None if inner is None else text.index(inner)]
            if header:
                self.headers.setdefault(header, kind)

    def _tokens(self, text: str) -> list[str]:
        return re.findall("|".join(map(re.escape, self.added)), text) if self.added else []

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False))
        except Exception:  # noqa: BLE001  (templates raise what they like; what it will not write is not learned)
            return ""
