"""Secrets and personal data in the records of a rollout, masked.

"mail ada@example.org, key AKIA…"  ─►  "mail [email], key [secret: token]"
an id that holds one               ─►  "masked-4f1c…", the same wherever the id is
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from lightningrl.sanitize import parse_json
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


_HIDDEN: Final = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]|[\0-\x08\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
"""Colours of a terminal and characters of no width, which hide a secret from every rule."""
_ESCAPED: Final = re.compile(
    r"\\{1,31}u00(2[013-9a-f]|[3-7][0-9a-f])|&#(?:x0*([2-7][0-9a-f])|0*(\d{2,3}));"
    r"|(?<!\w)(\w{0,40}?[\u0370-\u052f]\w{0,40})"
    r"|([\uff0d\uff0e\uff10-\uff19\uff1d\uff20-\uff3a\uff3f\uff41-\uff5a\U0001d400-\U0001d7ff]+)",
    re.IGNORECASE,
)
"""Letters and signs that JSON and HTML can write as numbers, and Unicode in other widths and scripts."""
_ALIKE: Final = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u0501\u051d\u04cf\u043a\u0442\u043d"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406"
    "\u03bf\u03b1\u03c1\u03b5\u03b9\u03ba\u03c4\u03c5\u0391\u0395\u0399\u039a\u039f\u03a1\u03a4\u03a5",
    "aeopcyxsijdwlkthABEKMHOPCTYXSIoapeiktuAEIKOPTY",
)
"""Cyrillic and Greek letters that look like others, within words that have others."""
_LABELS: Final = ("name", "key", "header", "field", "variable")
_LABELLED: Final = frozenset({"value", "values", "default"})
"""Keys of a value whose name stands beside it."""
_NAME: Final = re.compile(r"-{0,2}[\w.-]{1,64}")
_OF_JWK: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "k"})
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
    inside = _Mask()
    text = inside.document(text)
    plain = _ESCAPED.sub(_unescape, _HIDDEN.sub("", text))
    masked = mask_secrets(plain)
    private = mask_personal(masked)
    return MaskedText(
        text if private == plain else private,
        masked != plain or Reason.SECRET.value in inside.notes,
        private != masked or Reason.PERSONAL.value in inside.notes,
        is_doubtful(private),
    )


def _unescape(match: re.Match[str]) -> str:
    if match[4]:
        alike = match[4].translate(_ALIKE)
        return alike if alike.isascii() and re.search("[A-Za-z]", match[4]) else match[4]
    if match[5]:
        return unicodedata.normalize("NFKC", match[5])
    letter = chr(int(match[3]) if match[3] else int(match[1] or match[2], 16))
    return letter if letter.isprintable() and letter not in "\"'\\" else match[0]


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
            label = next((name for given in _LABELS if isinstance(name := value.get(given), str)), key)
            of_jwk = _OF_JWK if "kty" in value else ()
            return {
                self(str(name)): self(
                    inner, label if name in _LABELLED else "private key" if name in of_jwk else str(name)
                )
                for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._item(value, place, key) for place in range(len(value))]
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 999:
            return self._beside(f"{key}: ", str(value), value)
        return value

    def document(self, text: str) -> str:
        """Mask a text that is JSON by its keys and values."""
        if text.lstrip()[:1] not in ("{", "[", '"'):
            return text
        try:
            value = parse_json(text.encode())
        except ValueError:
            return text
        masked = self(value) if isinstance(value, dict | list | str) else value
        return text if masked == value else json.dumps(masked, ensure_ascii=False)

    def _item(self, items: Sequence[Any], place: int, key: str) -> Any:
        """Mask an item of a list: of a command's words, where a flag stands before it, or of a name with its value."""
        item, before = items[place], items[place - 1] if place else None
        if isinstance(item, str) and isinstance(before, str) and _NAME.fullmatch(before):
            sign = " " if before.startswith("-") else ": " if len(items) == 2 else ""
            item = self._beside(before + sign, item, item) if sign else item
        return self(item, key)

    def _beside(self, name: str, text: str, value: Any) -> Any:
        """Return the value, or a mask where its text is secret or personal behind a name."""
        masked = mask_text(name + text)
        if not (masked.has_secret or masked.has_personal) or not masked.text.startswith(name):
            return value
        self.notes.add((Reason.SECRET if masked.has_secret else Reason.PERSONAL).value)
        return masked.text.removeprefix(name)

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
