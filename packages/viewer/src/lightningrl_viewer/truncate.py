"""Long texts, truncated: a page shows the beginning of each and links to the rest, so that no text makes it heavy.

Budget(100_000).truncate("call-2-0", text, 2_000)  ─►  LongText(text="…", rest=998_000)
"""

from __future__ import annotations

from dataclasses import dataclass

from lightningrl.sanitize import printable

__all__ = ["Budget", "LongText"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LongText:
    """Part of a text that a page shows."""

    name: str
    """Name by which the page of the whole text finds it."""
    text: str
    """Its beginning, cleaned."""
    end: int
    """End of that part: the first character that is not shown."""
    rest: int
    """Characters from there on."""


class Budget:
    """Bytes of HTML that a page's texts may take."""

    def __init__(self, size: int) -> None:
        self._left = size

    def truncate(self, name: str, text: str, most: int, *, start: int = 0) -> LongText:
        """Return at most `most` bytes of a text, from the character `start` on; nothing where the page is full."""
        limit = min(most, self._left)
        count = min(len(text) - start, limit)
        shown = printable(text[start : start + count])
        while (size := html_size(shown)) > limit:
            count = min(count - 1, count * limit // size)
            shown = printable(text[start : start + count])
        self._left -= size
        return LongText(name=name, text=shown, end=start + count, rest=len(text) - start - count)


def html_size(text: str) -> int:
    """Return the bytes of a text in a page."""
    quoted = 4 * (text.count("&") + text.count("'") + text.count('"')) + 3 * (text.count("<") + text.count(">"))
    return len(text.encode("utf-8", "replace")) + quoted
