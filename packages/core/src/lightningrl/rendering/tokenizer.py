"""A policy's tokenizer: loaded without torch, and quick for the many short texts of a gateway."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, ContextOverflow

__all__ = ["QuickTokenizer", "context_overflow", "load_tokenizer"]

_SHORT = 256
_BLOCK = 16_384
_RARE = 8
"""Characters a token on average stands for at most in any text that people write; beyond them a long text is counted in blocks first."""
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}
"""What byte-level vocabularies write for a byte: `Ã©` for the two of `é` (GPT-2)."""
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""What the others write for one that they have no token for."""
_SLACK = 4
"""How many contexts of tokens are made before a prompt is refused unfinished: cut blocks and renderers that encode twice count too much."""


def context_overflow(context_length: int, taken: str) -> ContextOverflow:
    """A prompt beyond the context."""
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


def load_tokenizer(source: str | Path, *, is_there: bool = False) -> Any:
    """A fast tokenizer of a local folder or hub name, without importing torch. `is_there`: nothing is fetched; what is neither a folder
    nor in the hub's cache is missing, and nobody waits for a network."""
    from transformers import PreTrainedTokenizerFast

    name = str(source)
    if Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file():
        raise ConfigError(f"model folder {name!r} has no tokenizer.json; save the policy's fast tokenizer there with save_pretrained")
    try:
        return PreTrainedTokenizerFast.from_pretrained(name, local_files_only=is_there)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {error}") from error


class QuickTokenizer:
    """What the `renderers` library asks of a tokenizer, straight from the Rust core; the rest is transformers'.

    transformers encodes one text as a batch of one, on a pool of threads; and the renderers encode the same headers for every call.
    """

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
        """In it, a text far beyond the context raises ContextOverflow after a few contexts of tokens, however long it is."""
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

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, return_dict: bool = False, **options: Any) -> Any:
        """The template's text, or its tokens."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **{**self._template_kwargs, **options})
        return self._encode(text) if tokenize else text

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
        return list(self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # it leaves other threads the interpreter
