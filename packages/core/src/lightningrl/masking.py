"""Keys put out of sight in texts that leave: errors, records, answers of other people's servers.

"401: no such key sk-abc…"  ─►  "401: no such key ***"
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final
from urllib.parse import quote

__all__ = ["Mask", "MaskedBytes"]

MASKED: Final = "***"
SHORTEST: Final = 6
"""Characters of a key that is looked for in texts: `none` and `EMPTY`, which local servers are given, are words."""
_SECRET_VARIABLE: Final = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PAT)(_?\d+)?", re.IGNORECASE)


class Mask:
    """Keys, which it puts `***` in the place of; also where they are written as JSON, as HTML, in an address, or in base64, alone or behind
    a user."""

    def __init__(self, keys: Iterable[str | None] = ()) -> None:
        written: set[str] = set()
        for key in keys:
            for part in {key, key.partition(" ")[2].strip()} if key else ():  # `Bearer KEY` in a header
                if len(part) >= SHORTEST:
                    written |= {part, json.dumps(part)[1:-1], part.replace("/", "\\/"), quote(part, safe=""), quote(part)}
                    written |= {escape(part), escape(part, quote=False), *_as_base64(part.encode())}
        self.written = sorted(written, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, self.written))) if written else None

    @classmethod
    def of_variables(cls, environment: Mapping[str, str], *more: str) -> Mask:
        """The values of environment variables whose names end in KEY, TOKEN, SECRET, PASSWORD or _PAT, numbered or not, and `more`."""
        return cls([*(value for name, value in environment.items() if _SECRET_VARIABLE.fullmatch(name)), *more])

    def text(self, text: str) -> str:
        return text if self._found is None else self._found.sub(MASKED, text)

    def json(self, value: Any) -> Any:
        """A value that JSON can say, its texts and names masked."""
        if self._found is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(name)): self.json(item) for name, item in value.items()}
        return value


def _as_base64(key: bytes) -> set[str]:
    """The letters that say the key and nothing else, behind as many bytes as there may be: `user:KEY` of basic authorization."""
    written = set()
    for behind in range(3):
        letters = base64.b64encode(bytes(behind) + key).decode().rstrip("=")
        written.add(letters[(0, 2, 3)[behind] : 4 * (len(key) + behind) // 3])
    return written


class MaskedBytes:
    """Bytes of one answer, masked while they are passed on: what may be the beginning of a key waits for what comes next."""

    def __init__(self, mask: Mask) -> None:
        self._written = [key.encode() for key in mask.written]
        self._held = b""

    def add(self, chunk: bytes) -> bytes:
        """The bytes that can go on."""
        if not self._written:
            return chunk
        data = self._held + chunk
        for key in self._written:
            data = data.replace(key, MASKED.encode())
        longest = min(len(data), max(map(len, self._written)) - 1)
        held = next((size for size in range(longest, 0, -1) if any(key.startswith(data[-size:]) for key in self._written)), 0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def end(self) -> bytes:
        """The rest."""
        held, self._held = self._held, b""
        return held
