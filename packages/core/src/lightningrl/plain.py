"""Values as JSON has them, so that they come back equal: from tasks' sources and from agents.

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
import math
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from lightningrl.clean import DEEPEST, clean_text

__all__ = ["NotPlain", "kind_of", "to_plain"]

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
"""By type, a value that can stand in its place."""
ANYTHING: Final = "text, numbers, lists or dicts"
PYTHONS: Final = frozenset({bool, dict, float, int, list, str, tuple, type(None)})
"""Types that another library's value may become."""


class NotPlain(ValueError):
    """A value that JSON lacks; its text says where it is, what it is, and what to give instead."""


def to_plain(value: Any, name: str, *, levels: int = DEEPEST) -> Any:
    """A copy of `value` that is JSON, at most `levels` lists and dicts deep. Raises NotPlain with the place of what is none, below
    `name`: `answer['when'] is a date, …`."""
    return _Walk(name, levels).plain(value, ())


class _Walk:
    """One value, walked from its top; `place` holds the keys and positions that lead to where it is."""

    def __init__(self, name: str, levels: int) -> None:
        self._name = name
        self._levels = levels
        self._around: set[int] = set()
        """Ids of the lists and dicts that lie around."""

    def plain(self, value: Any, place: tuple[Any, ...]) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return clean_text(str.__str__(value))  # of a str alone: an enum's, numpy's and other kinds of text come back as text
        if isinstance(value, enum.Enum) and not isinstance(value, int | float):
            raise self._refuse(value, place)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return self._number(float(value), place)
        if isinstance(value, Mapping):
            return self._inside(value, place, lambda: self._dict(value, place))
        if isinstance(value, list | tuple):
            return self._inside(value, place, lambda: [self.plain(item, (*place, index)) for index, item in enumerate(value)])
        return self._of_others(value, place)

    def _number(self, value: float, place: tuple[Any, ...]) -> float:
        if not math.isfinite(value):
            raise NotPlain(f"{self._path(place)} is {value}, which JSON has no number for; give None, or a number")
        return value

    def _dict(self, value: Mapping[Any, Any], place: tuple[Any, ...]) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, str):
                raise NotPlain(f"{self._path(place)} has the key {_short(key)}, {kind_of(key)}; JSON's keys are text: str(key)")
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

    def _of_others(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Of another library's number or array, which knows what it is in Python. Dates, records and labels would lose by it."""
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        is_array = callable(getattr(value, "tolist", None)) and not hasattr(value, "to_dict") and kind not in ("M", "m", "V")
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
    """`a set`, `an int`, `a numpy.datetime64`: other libraries' with where they are from."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    name = kind.__qualname__ if root in sys.stdlib_module_names else f"{root}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
