"""Attacks on a reward: an output or a trajectory, and what a sound reward would pay for it; and the report on them.

Task + its right answer + the form of an output ─► Target ─► mutator ─► Attack, Attack, … ─► RedTeamReport
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from lightningrl.sanitize import one_line
from lightningrl.types import Task, ToolCall

__all__ = [
    "Attack",
    "Form",
    "Mutator",
    "RedTeamFinding",
    "RedTeamReport",
    "Severity",
    "Target",
    "Worth",
    "canonical_text",
    "shorten",
    "text_of_answer",
]

LONGEST: Final = 4_000
"""Characters by which answers are told apart."""
LONGEST_SHOWN: Final = 240
"""Characters of an output or input in a report."""


class Worth(StrEnum):
    """Worth of an output to somebody who knows the task."""

    RIGHT = "right"
    """Gold in other words."""
    MORE = "more"
    """The right answer, more than once: it may earn as much as gold, not more."""
    WRONG = "wrong"
    """Near gold and wrong: it may earn a part, never all."""
    NOTHING = "nothing"
    """Nothing to do with the task: half of what gold earns is too much."""


class Severity(StrEnum):
    """Weight of a finding. Notes change no exit status."""

    HIGH = "high"
    MEDIUM = "medium"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """An output that was made up, with what came with it."""

    output: Any
    what: str
    """The same words for each task: `an empty text`. Findings are told apart by them."""
    worth: Worth
    advice: str
    """Change to make where it is paid."""
    tool_calls: tuple[ToolCall, ...] = ()
    reported: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values that the agent would report of the rollout."""
    least_share: float = 0.0
    """Share of the tasks that must pay for it, and two of them at least: a few may do so by coincidence. 0.0 = one
    task is enough."""
    severity: Severity = Severity.HIGH


def text_of_answer(answer: Any) -> str:
    """An answer as a policy would write it."""
    if answer is None or isinstance(answer, str):
        return answer or ""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return json.dumps(answer, ensure_ascii=False, default=str)


def canonical_text(value: Any) -> str:
    """Text without case, spaces and punctuation, by which two answers are the same."""
    text = text_of_answer(value)[:LONGEST].casefold()
    return "".join(character for character in text if character.isalnum() or character in "-+*/<>=") or text.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form of an agent's output: how an answer becomes one."""

    name: str = "the answer itself"
    wrap: Callable[[Any], Any] = text_of_answer
    pick: Callable[[Any], Any] = lambda answer: answer
    """Takes the part of a task's answer that is the answer: of several right ones the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A task under attack."""

    task: Task
    form: Form = field(default_factory=Form)
    answer: Any = None
    """The right answer; None = nobody knows it."""
    gold: Any = None
    """The output that earns the most; None = nobody knows it."""
    others: tuple[Any, ...] = ()
    """Right answers of other tasks, each once and none of them this task's."""

    @property
    def text(self) -> str:
        """The right answer as text; empty where there is none."""
        return text_of_answer(self.answer)


class Mutator(Protocol):
    """Makes attacks of a task; what a factory of the hook `lightningrl_reward_mutators` returns."""

    def __call__(self, target: Target, /) -> Iterable[Attack]: ...


def shorten(value: Any) -> str:
    """A value in one line."""
    return "None" if value is None else one_line(repr(value) if value == "" else text_of_answer(value), LONGEST_SHOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class RedTeamFinding:
    """Something that earns what it should not, or that breaks the reward."""

    severity: Severity
    mutator: str
    """Plugin that found it, or the check of ours: `gold`, `failure`, `repeat`, `files`, `search`."""
    reward: str
    """Name of the reward; of several with weights, all of them."""
    sentence: str
    """Observation, and why it is bad."""
    advice: str
    """Change to make."""
    task: str = ""
    """Id of one task where it was seen."""
    output: str = ""
    """The output there, cut where it is long."""
    earned: float | None = None
    gold: float | None = None
    """Return of the gold output on that task; None = nobody knows one."""
    tasks: int = 0
    """Tasks where it was seen."""
    tried: int = 0
    """Tasks where it was tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedTeamReport:
    """Everything that an attack on a recipe's rewards has shown."""

    findings: tuple[RedTeamFinding, ...]
    strict: tuple[RedTeamFinding, ...]
    """Outputs that say what gold says and earn less than half of it. They change no exit status."""
    tasks: int
    outputs: int
    """Outputs that were rewarded."""
    planned: int
    """Outputs that would have been rewarded with time enough."""
    gold: Mapping[str, str] = field(default_factory=dict[str, str])
    """Form of gold outputs, by reward; empty text = none was found."""
    notes: tuple[str, ...] = ()
    """Sentences on what was left out."""

    @property
    def is_bad(self) -> bool:
        """True where a finding is more than a note."""
        return any(finding.severity is not Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as one object of plain values."""
        return {**asdict(self), "is_bad": self.is_bad}
