"""What agents send, made fit to be kept and read again: text that UTF-8 can carry, finite numbers, JSON of bounded depth.

bytes ─► parse_json ─► a value whose text is clean ─► store ─► clean_text, clean_json, finite on read, so that what an older version
                                                              kept can be read, too
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

__all__ = ["DEEPEST", "as_text", "clean_json", "clean_text", "finite", "is_deeper", "one_line", "parse_json", "printable"]

DEEPEST: Final = 100
"""Levels of lists and objects in a JSON value."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_UNSEEN: Final = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and what reorders or hides text; not tab and newline."""
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def clean_text(text: str) -> str:
    """Lone surrogates, which JSON may hold as `\\ud800` and UTF-8 may not, become U+FFFD; pairs become the character they stand for."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clean_json(value: Any, *, cut: bool = False, levels: int = DEEPEST) -> Any:
    """The value with clean text. Deeper than `levels`: None in its place with `cut`, else ValueError."""
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        if cut:
            return None
        raise ValueError(f"it is nested deeper than {DEEPEST} levels; send something flatter")
    if isinstance(value, list):
        return [clean_json(item, cut=cut, levels=levels - 1) for item in value]
    return {clean_text(str(key)): clean_json(item, cut=cut, levels=levels - 1) for key, item in value.items()}


def parse_json(body: bytes) -> Any:
    """JSON with clean text and bounded depth. Raises ValueError: bytes that are no JSON, deeper than `DEEPEST`, endless numbers."""
    text = body.decode("utf-8-sig")  # some clients write a byte order mark before it
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels; send something flatter") from None
    is_shallow = text.count("[") + text.count("{") <= DEEPEST or not is_deeper(value, DEEPEST)
    return value if is_shallow and _ESCAPED_SURROGATE.search(text) is None else clean_json(value)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie within each other more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def finite(value: float) -> float:
    """The number, or 0.0 where it is none (NaN, infinite)."""
    return value if math.isfinite(value) else 0.0


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def one_line(text: str, most: int) -> str:
    """Somebody else's text for a person: one line of at most `most` characters, made `printable`."""
    line = printable(" ".join(clean_text(text[: 4 * most]).split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def printable(text: str) -> str:
    """For a terminal: what it would obey or hide is shown as `\\x1b` or `\\u202e`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)
