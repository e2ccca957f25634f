"""Secrets and personal data in the records of a rollout, masked.

"mail ada@example.org, key AKIA…"  ─►  "mail [email], key [secret: token]"
an id that holds one               ─►  "masked-4f1c…", the same wherever the id is
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from lightningrl_server.lru import LruCache
from lightningrl_traces.grades import Reason
from lightningrl_traces.personal_rules import mask_personal
from lightningrl_traces.records import Call, Ending, ToolRun
from lightningrl_traces.secret_rules import is_doubtful, is_secret_pair, mask_secrets

__all__ = ["MaskedText", "mask_call", "mask_ending", "mask_id", "mask_text", "mask_tool"]


class MaskedText(NamedTuple):
    """A text whose secrets and personal data are masked."""

    text: str
    has_secret: bool = False
    has_personal: bool = False
    is_doubtful: bool = False
    """True where it has a random string that no rule names."""


_HIDDEN: Final = re.compile("[\u00ad\u180e\u200b-\u200f\u2060-\u2064\ufeff]")
"""Characters of no width, which hide a secret from every rule."""
_IDS: Final = frozenset({"id", "tool_call_id", "call_id"})
_SHORTEST: Final = 6
_LONG: Final = 16_384
_ENTRY: Final = 250
_MEMORY: Final = 4 * 2**20
"""Characters of texts shorter than `_LONG`, and `_ENTRY` for each, whose masks are remembered: a call repeats those
before it."""
_remembered: Final = LruCache[str, MaskedText](_MEMORY // _ENTRY, _LONG + _ENTRY, together=_MEMORY)


def mask_text(text: str) -> MaskedText:
    """Mask what is secret or personal in a text."""
    if len(text) < _SHORTEST:
        return MaskedText(text)
    if len(text) >= _LONG:
        return _mask(text)
    return _remembered.get(text) or _remembered.put(text, _mask(text), len(text) + _ENTRY)


def _mask(text: str) -> MaskedText:
    plain = text if text.isascii() else _HIDDEN.sub("", text)
    masked = mask_secrets(plain)
    private = mask_personal(masked)
    return MaskedText(text if private == plain else private, masked != plain, private != masked, is_doubtful(private))


def mask_id(text: str) -> str:
    """Return an id, or where it holds a secret or personal data, another for it, the same each time."""
    masked = mask_text(text)
    if not masked.has_secret and not masked.has_personal:
        return text
    return f"masked-{blake2b(text.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


class _Mask:
    """Masks the texts within values, and remembers what it came upon."""

    def __init__(self) -> None:
        self.notes: set[str] = set()

    def __call__(self, value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return self._text(value, key)
        if isinstance(value, Mapping):
            return {self(name): self(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        return value

    def _text(self, text: str, key: str) -> str:
        if key in _IDS:
            return mask_id(text)
        if key and is_secret_pair(key, text):
            self.notes.add(Reason.SECRET.value)
            return "[secret: key]"
        masked = mask_text(text)
        for note, is_so in zip((Reason.SECRET, Reason.PERSONAL, Reason.DOUBTFUL), masked[1:], strict=True):
            if is_so:
                self.notes.add(note.value)
        return masked.text

    def fields(self, record: Any, names: tuple[str, ...], ids: tuple[str, ...]) -> dict[str, Any]:
        """Mask fields of a record."""
        values = {name: self(getattr(record, name)) for name in names}
        return values | {name: mask_id(getattr(record, name) or "") or getattr(record, name) for name in ids}


def mask_call(call: Call) -> Call:
    """Mask a call's texts and names; its tokens, which say the same, are no data any more where anything was masked."""
    mask = _Mask()
    names = ("tools", "messages", "answer", "agent", "model", "finish_reason", "error", "rewards")
    masked = replace(call, **mask.fields(call, names, ("id", "parent_id")))
    notes = [mask_text(note).text for note in call.notes]
    return replace(masked, notes=(*notes, *(reason.value for reason in Reason if reason.value in mask.notes)))


def mask_tool(tool: ToolRun) -> ToolRun:
    names = ("name", "arguments", "result", "agent", "error_type")
    return replace(tool, **_Mask().fields(tool, names, ("id", "parent_id", "span_id")))


def mask_ending(ending: Ending) -> Ending:
    return replace(ending, **_Mask().fields(ending, ("input", "output", "error", "rewards"), ()))
