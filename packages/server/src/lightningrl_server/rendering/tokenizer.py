"""A policy's tokenizer and its chat template: texts and turns of a conversation to token ids, without torch.

Without a renderer of its own, a history grows by what the template writes between an answer and a completion:

    …<assistant> S <|im_end|>\\n<user>new message<|im_end|>\\n<assistant>      S = a sentinel in place of the answer
                   └──────────── suffix ────────────────────────────┘

The tokens of the suffix go after the tokens that the policy itself sampled, so its history stays a prefix, id for id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, ContextOverflow
from lightningrl_server.rendering.tool_turns import ToolTurns

__all__ = ["QuickTokenizer", "TemplateBridge", "context_overflow", "late_systems", "load_tokenizer", "ways_to_say"]

_SHORT = 256
_BLOCK = 16_384
_RARE = 8
"""Most characters a token stands for, on average, in any text that people write; more is counted in blocks first."""
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}
"""Characters that byte-level vocabularies write for bytes: `Ã©` for the two of `é` (GPT-2)."""
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""Text that the others write for a byte that they have no token for."""
_SLACK = 4
"""Contexts of tokens made before a prompt is refused unfinished: cut blocks and repeated encoding count too much."""
_SENTINEL = "lightningrlsentinel7f3a"
_USER: Mapping[str, Any] = {"role": "user", "content": "x"}


def context_overflow(context_length: int, taken: str) -> ContextOverflow:
    """The error for a prompt beyond the context."""
    return ContextOverflow(
        f"this model's maximum context length is {context_length} tokens; your messages and tools take {taken}, "
        "which leaves no room for an answer; shorten them"
    )


class _Room:
    """The tokens that a prompt may still take."""

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.left = _SLACK * context_length

    def take(self, tokens: int) -> None:
        self.left -= tokens
        if self.left < 0:
            raise context_overflow(self.context_length, f"more than {self.context_length}")


_room: ContextVar[_Room | None] = ContextVar("room", default=None)


def load_tokenizer(source: str | Path, *, is_there: bool = False, chat_template: str | None = None) -> Any:
    """Load a fast tokenizer from a local folder or hub name, without importing torch. `is_there`: fetch nothing; what
    is neither a folder nor in the hub's cache is missing, and nobody waits for a network. `chat_template`: the text of
    one in place of its own."""
    from transformers import PreTrainedTokenizerFast

    name = str(source)
    if Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file():
        raise ConfigError(
            f"model folder {name!r} has no tokenizer.json; save the policy's fast tokenizer there with save_pretrained"
        )
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=is_there)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


class QuickTokenizer:
    """Gives the `renderers` library what it asks, straight from the Rust core; the rest is transformers'. transformers
    encodes one text as a batch of one, on a thread pool; and renderers encode headers anew for each call."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs` are given to the chat template each time."""
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._core = tokenizer.backend_tokenizer
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self.name_or_path: str = str(getattr(tokenizer, "name_or_path", "") or "")
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.all_special_tokens: list[str] = list(tokenizer.all_special_tokens)
        self.added_tokens_decoder: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        self._encode_short = lru_cache(4096)(self._encode)
        self._token_id = lru_cache(1024)(tokenizer.convert_tokens_to_ids)

    def encode(self, text: str, *args: Any, add_special_tokens: bool = False, **options: Any) -> list[int]:
        """Token ids; nothing is added around them."""
        if args or options or add_special_tokens:
            return list(self._tokenizer.encode(text, *args, add_special_tokens=add_special_tokens, **options))
        ids = list(self._encode_short(text) if len(text) < _SHORT else self._encode(text))
        room = _room.get()
        if room is not None:
            room.take(len(ids))
        return ids

    @contextmanager
    def within(self, context_length: int | None) -> Iterator[None]:
        """Make any text far beyond the context raise ContextOverflow after a few contexts of tokens."""
        token = _room.set(None if context_length is None else _Room(context_length))
        try:
            yield
        finally:
            _room.reset(token)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Text; special tokens stay unless asked otherwise."""
        if options or self._cleans:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **options))
        return str(self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)) if token_ids else ""

    def bytes_of(self, token_id: int) -> bytes | None:
        """A token's own bytes, which may be a part of a character; None = they cannot be told."""
        text = self.decode([token_id])
        if "\ufffd" not in text:
            return text.encode()
        written = str(self._core.id_to_token(token_id))
        if byte := _ONE_BYTE.fullmatch(written):
            return bytes.fromhex(byte[1])
        return bytes(_BYTES[mark] for mark in written) if set(written) <= _BYTES.keys() else None

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._token_id(tokens) if isinstance(tokens, str) else self._tokenizer.convert_tokens_to_ids(tokens)

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        """The template's text, or its tokens."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **{**self._template_kwargs, **options})
        return self._encode(text) if tokenize else text

    def get_added_vocab(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_added_vocab())

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def _encode(self, text: str) -> list[int]:
        if len(text) < _BLOCK:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        room = _room.get()
        if room is not None and len(text) > _RARE * room.context_length:
            counted = _Room(room.context_length)
            for start in range(0, len(text), _BLOCK):
                counted.take(len(self._core.encode(text[start : start + _BLOCK], add_special_tokens=False).ids))
        # A batch leaves other threads the interpreter.
        return list(self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class TemplateBridge:
    """Finds the suffix after an answer by rendering a short conversation with a sentinel in its place."""

    def __init__(self, tokenizer: QuickTokenizer, turns: ToolTurns) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._shape = turns.shape if turns.changes else None
        self.stop_token_ids: frozenset[int] = frozenset()
        closes = () if turns.markup is None else turns.markup.closes
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        self._closes = frozenset(added[token] for token in closes if token in added)
        answered: list[Mapping[str, Any]] = [_USER, {"role": "assistant", "content": _SENTINEL}]
        _, sentinel, close = (self._text(answered, prompt=False) or "").rpartition(_SENTINEL)
        ids = self._encode(close if sentinel else "")
        self.close_token_id: int | None = ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
        """The single token by which the template ends an assistant's turn, where there is one."""

    def suffix(self, new_messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        """Tokens from the end of the sentinel answer up to the next completion; None where the template hides them."""
        answer: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
        results = list(_leading_tools(new_messages))
        if results and not (self._turns.one_each and len(results) > 1):
            # Templates may look tool results up in the calls that asked for them; the close follows the calls' markup.
            # Some write no content beside calls, so that the sentinel is an argument.
            called = {"content": _SENTINEL, "tool_calls": [_call_of(message) for message in results]}
            spoken = {"content": "", "tool_calls": [_call_of(message, key=_SENTINEL) for message in results]}
            for asking in (called, spoken):
                text = self._text([_USER, {**answer, **asking}, *new_messages])
                _, sentinel, rest = (text or "").rpartition(_SENTINEL)
                closes = [rest.find(self._tokenizer.decode([token])) for token in self.stop_token_ids]
                if sentinel and (place := min((place for place in closes if place >= 0), default=-1)) >= 0:
                    return tuple(self._encode(rest[place:]))
        _, sentinel, rest = (self._text([_USER, answer, *new_messages]) or "").partition(_SENTINEL)
        return tuple(self._encode(rest)) if sentinel else None

    def join(self, completion_ids: Sequence[int], suffix: tuple[int, ...]) -> tuple[int, ...]:
        """The suffix without the close that the policy sampled itself."""
        ends = completion_ids and suffix and completion_ids[-1] in self.stop_token_ids
        return suffix[1:] if ends and suffix[0] in self.stop_token_ids | self._closes else suffix

    def _text(self, messages: list[Mapping[str, Any]], *, prompt: bool = True) -> str | None:
        for turns in ways_to_say(messages):
            try:
                shaped = turns if self._shape is None else self._shape(turns, None)[0]
                text = self._tokenizer.apply_chat_template(shaped, add_generation_prompt=prompt, tokenize=False)
            except Exception:  # noqa: BLE001, S112  (whatever a template raises: render in full and count a break)
                continue
            if all(system in str(text) for system in late_systems(turns)):
                return str(text)
        return None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else []


def _leading_tools(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if message.get("role") != "tool":
            return
        yield message


def _call_of(message: Mapping[str, Any], **arguments: str) -> dict[str, Any]:
    """A tool call that the tool's message may answer."""
    function: dict[str, Any] = {"name": message.get("name") or "tool", "arguments": arguments}
    return {"id": message.get("tool_call_id") or "call", "type": "function", "function": function}


def late_systems(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts of system messages that a template may pass over in silence: later ones, and those with no others."""
    roles = {message["role"] for message in messages}
    return [
        message["content"].strip()
        for place, message in enumerate(messages)
        if message["role"] == "system" and (place or roles == {"system"})
    ]


def ways_to_say(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The conversation; then, for templates that take only some and where it makes a difference, with neighbours of one
    role as one turn; then with later system messages as the user's; then with the first as well."""
    before = list(messages)
    yield before
    for systems in (len(messages), 1, 0):
        joined: list[Mapping[str, Any]] = []
        for index, message in enumerate(messages):
            if message["role"] == "system" and index >= systems:
                message = {**message, "role": "user"}
            last = joined[-1] if joined else None
            if last is not None and last["role"] == message["role"] != "tool" and not last.get("tool_calls"):
                texts = {
                    key: "\n\n".join(filter(None, (last.get(key), message.get(key))))
                    for key in ("content", "reasoning_content")
                    if key in last or key in message
                }
                joined[-1] = {**last, **message, **texts}
            else:
                joined.append(message)
        if joined != before:
            yield joined
            before = joined
