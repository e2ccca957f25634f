"""Values from outside, made fit to be kept and read again: text that UTF-8 can carry, finite numbers, JSON of bounded
depth.

bytes ─► parse_json ─► a value whose text is clean
a Python value of a task or an agent ─► to_plain ─► JSON that comes back equal:

    text, true, false, numbers, None, lists, dicts with text keys   as they are
    numpy's and pandas' numbers, arrays, tensors                    Python's (`.tolist()`)
    tuple                                                           list
    all else: set, date, Decimal, bytes, NaN, a key that is no text, an object      refused, by its place

Neither numpy nor pandas is imported for it.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import re
import sys
import uuid
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

__all__ = [
    "DEEPEST",
    "DoubledKeyError",
    "NotPlain",
    "as_text",
    "clean_json",
    "clean_text",
    "decode_text",
    "finite",
    "is_deeper",
    "kind_of",
    "one_line",
    "parse_json",
    "printable",
    "to_plain",
    "unique_keys",
]

DEEPEST: Final = 100
"""Levels of lists and objects in a JSON value."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_UNSEEN: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters, and what reorders or hides text; not tab and newline."""
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")

LONGEST_SHOWN: Final = 40
"""Characters of a value in a sentence."""

REMEDIES: Final[tuple[tuple[type[Any] | tuple[type[Any], ...], str], ...]] = (
    (AbstractSet, "a list, which has an order: sorted(value)"),
    ((datetime.date, datetime.time), "text: value.isoformat()"),
    (datetime.timedelta, "seconds: value.total_seconds()"),
    ((decimal.Decimal, fractions.Fraction), "a number or text: float(value), str(value)"),
    ((bytes, bytearray, memoryview), "text: value.decode()"),
    (complex, "its two parts: [value.real, value.imag]"),
    ((uuid.UUID, pathlib.PurePath), "text: str(value)"),
    (enum.Enum, "what it stands for: value.value"),
)
"""Types that are refused, each with a value that can stand in its place."""
ANYTHING: Final = "text, numbers, lists or dicts"
PYTHONS: Final = frozenset({bool, dict, float, int, list, str, tuple, type(None)})
"""Types that another library's value may become."""


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON may hold as `\\ud800` and UTF-8 may not, by U+FFFD; join pairs."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_text(data: bytes) -> str:
    """Text of a file in UTF-8, or in UTF-16 where a byte order mark says so. Raises UnicodeDecodeError."""
    return data.decode("utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig")


def clean_json(value: Any, *, cut: bool = False, levels: int = DEEPEST) -> Any:
    """The value with clean text. Where it is deeper than `levels`: None with `cut`, else ValueError."""
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
    """Parse JSON to clean text and bounded depth. Raises ValueError: no JSON, deeper than `DEEPEST`, endless
    numbers."""
    text = body.decode("utf-8-sig")  # some clients write a byte order mark before it
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels; send something flatter") from None
    is_shallow = text.count("[") + text.count("{") <= DEEPEST or not is_deeper(value, DEEPEST)
    return value if is_shallow and _ESCAPED_SURROGATE.search(text) is None else clean_json(value)


class DoubledKeyError(ValueError):
    """A name that an object has twice."""

    def __str__(self) -> str:
        return f"it names {self.args[0]!r} twice in one object"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raises where a name comes again, for the first value would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise DoubledKeyError(next(name for name in names if names.count(name) > 1))
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """True where lists and objects lie within each other more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
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
    """Show somebody else's text to a person: one line of at most `most` characters, made `printable`."""
    line = printable(" ".join(clean_text(text[: 4 * most]).split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def printable(text: str) -> str:
    """Show what a terminal would obey or hide as `\\x1b` or `\\u202e`."""
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


class NotPlain(ValueError):
    """A value that JSON lacks; its text says where it is, what it is, and what to give instead."""


def to_plain(value: Any, name: str, *, levels: int = DEEPEST) -> Any:
    """A copy of `value` that is JSON, at most `levels` lists and dicts deep. Raises NotPlain with the place of what is
    none, below `name`: `answer['when'] is a date, …`."""
    return _Walk(name, levels).plain(value, ())


class _Walk:
    """A walk over one value; `place` holds the keys and positions that lead to the part it is at."""

    def __init__(self, name: str, levels: int) -> None:
        self._name = name
        self._levels = levels
        self._around: set[int] = set()
        """Ids of the lists and dicts that lie around."""

    def plain(self, value: Any, place: tuple[Any, ...]) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            # of a str alone: an enum's, numpy's and other kinds of text come back as text
            return clean_text(str.__str__(value))
        if isinstance(value, enum.Enum) and not isinstance(value, int | float):
            raise self._refuse(value, place)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return self._number(float(value), place)
        if isinstance(value, Mapping):
            return self._inside(value, place, lambda: self._dict(value, place))
        if isinstance(value, list | tuple):
            return self._inside(
                value, place, lambda: [self.plain(item, (*place, index)) for index, item in enumerate(value)]
            )
        return self._from_library(value, place)

    def _number(self, value: float, place: tuple[Any, ...]) -> float:
        if not math.isfinite(value):
            raise NotPlain(f"{self._path(place)} is {value}, which JSON has no number for; give None, or a number")
        return value

    def _dict(self, value: Mapping[Any, Any], place: tuple[Any, ...]) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, str):
                raise NotPlain(
                    f"{self._path(place)} has the key {_short(key)}, {kind_of(key)}; JSON's keys are text: str(key)"
                )
        return {clean_text(str.__str__(key)): self.plain(item, (*place, key)) for key, item in value.items()}

    def _inside(self, value: Any, place: tuple[Any, ...], copy: Callable[[], Any]) -> Any:
        if id(value) in self._around:
            raise NotPlain(f"{self._path(place)} holds itself, which no JSON can; leave it out there")
        if len(self._around) == self._levels:
            raise NotPlain(f"{self._name} is nested deeper than {self._levels} levels; give something flatter")
        self._around.add(id(value))
        try:
            return copy()
        finally:
            self._around.discard(id(value))

    def _from_library(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Convert another library's number or array by its `tolist`. Dates, records and labels, which would lose by it,
        are refused."""
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        is_array = (
            callable(getattr(value, "tolist", None)) and not hasattr(value, "to_dict") and kind not in ("M", "m", "V")
        )
        if not is_array or isinstance(value, type | memoryview):
            raise self._refuse(value, place)
        python = value.tolist()
        if type(python) not in PYTHONS:  # a number that Python has not, as numpy's longdouble
            raise self._refuse(python, place)
        return self.plain(python, place)

    def _refuse(self, value: Any, place: tuple[Any, ...]) -> NotPlain:
        if type(value).__name__ in ("NAType", "NaTType"):
            return NotPlain(f"{self._path(place)} is missing ({value}), which JSON has no value for; give None")
        instead = next((remedy for kinds, remedy in REMEDIES if isinstance(value, kinds)), ANYTHING)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            instead = "a dict: dataclasses.asdict(value)"
        elif callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
            instead = "a dict: value.model_dump()"
        elif getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):
            instead = "text: value.astype(str)"
        elif hasattr(value, "to_dict"):
            instead = "what it holds: value.to_dict(), value.tolist()"
        return NotPlain(f"{self._path(place)} is {kind_of(value)}, which is not JSON; give {instead}")

    def _path(self, place: tuple[Any, ...]) -> str:
        return self._name + "".join(f"[{_short(key)}]" for key in place)


def kind_of(value: Any) -> str:
    """`a set`, `an int`, `a numpy.datetime64`: a type's name with its article, and its library's name."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    name = kind.__qualname__ if root in sys.stdlib_module_names else f"{root}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
