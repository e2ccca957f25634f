"""Rewards for the text of an output: the task's answer, or a form. Of several right answers the best match counts.

Exact       1.0 for the same normalised text            exact match of SQuAD (Rajpurkar et al., arXiv 1606.05250)
Numeric     1.0 for the same number, within a tolerance
F1          2PR / (P + R) over the words of both        token F1 of SQuAD
Pattern     1.0 where a regular expression matches
JsonSchema  1.0 where the text is JSON that fits a schema

The text is found by a path into the agent's output or the task's answer, then by a pattern within it. An answer may be
a whole solution as data sets have it: what ends it in GSM8K (`#### 72`) or MATH (`\\boxed{72}`) is right as well.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.sanitize import as_text
from lightningrl.tool_schemas import build_check
from lightningrl.types import Task, Trajectory

__all__ = [
    "F1",
    "Exact",
    "Extract",
    "JsonSchema",
    "Numeric",
    "Pattern",
    "answers_of",
    "pick",
    "read_number",
    "spellings",
    "text_of",
]

LONGEST = 100_000
"""Characters of an output that are looked at: a model writes any length, and patterns take their time."""


def pick(value: Any, path: str | None) -> Any:
    """The value at a dotted path: `query.rows.0`; the whole value without a path, None where there is nothing."""
    for key in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def text_of(value: Any) -> str:
    """Text as it is, None as nothing, anything else as JSON."""
    return "" if value is None else as_text(value)[:LONGEST]


class Extract:
    """Takes the last match of a pattern, its first group where it has one; else the whole text."""

    def __init__(self, pattern: str | None) -> None:
        """Raise ConfigError for what is no pattern."""
        self._pattern = None if pattern is None else compile_pattern(pattern)

    def __call__(self, text: str) -> str:
        matches = None if self._pattern is None else list(self._pattern.finditer(text))
        if not matches:
            return text.strip()
        return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip()


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile it with `.` for any character, lines' ends included. Raises ConfigError."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is no regular expression ({error}); mend it, or write it in single quotes in TOML"
        ) from None


def answers_of(task: Task, path: str | None) -> list[Any]:
    """Right answers of a task, one or several. Raises ValueError where it has none: the data is broken then."""
    value = pick(task.answer, path)
    answers = [answer for item in (value if isinstance(value, list) else [value]) for answer in _answers_in(item)]
    if not answers or None in answers:
        where = f" at {path!r}" if path else ""
        raise ValueError(f"task {task.id!r} has no answer{where}; give each task one, or a list of right ones")
    return answers


_OBJECTS = (("text", "answer_start"), ("spans", "types"), ("value", "aliases"), ("ground_truth", "style"))
"""Keys of answers that data sets hold as objects, and one beside it: SQuAD's, DROP's, TriviaQA's, verl's."""


def _answers_in(value: Any) -> list[Any]:
    """Right answers in an object as data sets have it, or the value itself."""
    for key, beside in _OBJECTS if isinstance(value, Mapping) else ():
        if key in value and (beside in value or (len(value) == 1 and isinstance(value[key], list))):
            sides = (value[key], value.get("aliases") or [])
            return [answer for side in sides for answer in (side if isinstance(side, list) else [side])]
    return [value]


_LAST_LINE = re.compile(r"(?:^|\n)[ \t]*####[ \t]*([^\n]+?)\s*$")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def _written(value: Any) -> list[str]:
    """Texts of a value; of whole numbers in floats (`72.0`) the whole ones as well."""
    return list(dict.fromkeys([text_of(value), text_of(_whole(value))]))


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def spellings(answer: Any) -> list[str]:
    """Texts of a right answer: all of it, and what ends a solution."""
    texts = _written(answer)
    if isinstance(answer, Mapping) and isinstance(answer.get("text"), str):
        texts.append(answer["text"])
    text = texts[0]
    if (last := _LAST_LINE.search(text)) is not None:
        texts.append(last[1])
    elif boxed := _BOXED.findall(text):
        texts.append(boxed[-1].strip())
    return texts


_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_CURRENCY = re.compile(r"^([-+]?)[$€£]+\s*")
_DIVISION = re.compile(rf"({_NUMBER.pattern})\s*/\s*({_NUMBER.pattern})")


@dataclass(kw_only=True, eq=False)
class _Matching:
    """Base of rewards that compare the output's text with right answers."""

    field: str | None = None
    extract: InitVar[str | None] = None
    answer_field: str | None = None

    def __post_init__(self, extract: str | None) -> None:
        self._extract = Extract(extract)

    def _texts(self, task: Task, output: Any) -> tuple[list[str], list[list[str]]]:
        """Take the output's texts, and those of each right answer."""
        return [self._extract(text) for text in _written(pick(output, self.field))], [
            [self._extract(text) for text in spellings(answer)] for answer in answers_of(task, self.answer_field)
        ]


@dataclass(kw_only=True, eq=False)
class Exact(_Matching):
    """Gives 1.0 if the output says the answer, else 0.0."""

    normalized: bool = True
    """Regardless of case, punctuation, articles and spaces."""

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        given, right = self._texts(task, output)
        same: Callable[[str], object] = normalize if self.normalized else str.strip
        answers = [same(text) for texts in right for text in texts]
        return float(any(same(text) in answers for text in given))


@dataclass(kw_only=True, eq=False)
class Numeric(_Matching):
    """Gives 1.0 if the output is the answer's number, else 0.0. Raises ValueError for a task whose answer is none."""

    tolerance: float = 1e-6
    """Relative: a share of the larger of both."""
    absolute: float = 0.0
    """For answers near 0; the larger allowance counts."""

    def __post_init__(self, extract: str | None) -> None:
        super().__post_init__(extract)
        if not (self.tolerance >= 0 and self.absolute >= 0):
            both = f"tolerance {self.tolerance!r} and absolute {self.absolute!r}"
            raise ConfigError(f"reward 'numeric': {both} must not be negative")

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        (text, *_), right = self._texts(task, output)
        numbers = [
            next((number for text in texts if (number := read_number(text)) is not None), None) for texts in right
        ]
        if None in numbers:
            shown = [texts[0] for texts in right]
            raise ValueError(
                f"the answer of task {task.id!r} is {shown!r}, no number; give it one, `extract` it, or use 'exact'"
            )
        given = read_number(text)
        if given is None:
            return 0.0
        return float(
            any(
                math.isclose(given, number, rel_tol=self.tolerance, abs_tol=self.absolute)
                for number in numbers
                if number is not None
            )
        )


class F1(_Matching):
    """Harmonic mean of precision and recall over the words of the normalised texts."""

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        given, right = self._texts(task, output)
        return max(_f1(normalize(text), normalize(words)) for words in given for texts in right for text in texts)


class Pattern:
    """Gives 1.0 where the text matches, from its start to its end; with `whole = false` anywhere in it."""

    def __init__(self, *, pattern: str, field: str | None = None, whole: bool = True) -> None:
        self.field = field
        self.whole = whole
        self._pattern = compile_pattern(pattern)

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        text = text_of(pick(output, self.field))
        return float((self._pattern.fullmatch(text) if self.whole else self._pattern.search(text)) is not None)


def normalize(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD); a text that has nothing else keeps them: "A", "+".
    Punctuation is of any script, and an "é" of one code point or of two is the same."""
    lower = unicodedata.normalize("NFC", text).lower()
    bare = "".join(character for character in lower if not _is_punctuation(character))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split() or bare.split() or [lower.strip()]


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def read_number(text: str) -> float | None:
    """Read a text that is a number: `-1,234.5`, `-$72`, `12 %`, `2/3`, `1e-3`; None where it is anything else."""
    bare = text.replace("\N{MINUS SIGN}", "-").strip().removesuffix(".").removesuffix("%").strip()
    bare = _CURRENCY.sub(r"\1", bare)
    parts = _DIVISION.fullmatch(bare)
    if parts is not None:
        above, below = _float(parts[1]), _float(parts[2])
        number = above / below if below else math.inf
    else:
        number = _float(bare) if _NUMBER.fullmatch(bare) else math.inf
    return number if math.isfinite(number) else None


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _f1(right: list[str], given: list[str]) -> float:
    common = sum((Counter(right) & Counter(given)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(right)
    return 2 * precision * recall / (precision + recall)


class JsonSchema:
    """Gives 1.0 where the output, or the text that `field` and `extract` take of it, is JSON that fits `schema`."""

    def __init__(self, *, schema: Mapping[str, Any], field: str | None = None, extract: str | None = None) -> None:
        self.field = field
        self._extract = Extract(extract)
        self._check = build_check(schema, what="reward 'json_schema': `schema`")

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        value = pick(output, self.field)
        if isinstance(value, str):
            try:
                value = json.loads(self._extract(text_of(value)), parse_constant=_refuse)
            except (ValueError, RecursionError):
                return 0.0
        return float(self._check(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")  # Python's own reader takes NaN and Infinity
