"""Attacks on a reward: an output or a trajectory, and what a sound reward would pay for it.

Task + its right answer + the form of an output ─► Target ─► mutator ─► Attack, Attack, …
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from lightningrl.types import Task, ToolCall

__all__ = ["Attack", "Form", "Mutator", "Severity", "Target", "Worth", "canonical_text", "text_of_answer"]


LONGEST: Final = 4_000
"""Characters by which answers are told apart."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form of an agent's output: how an answer becomes one."""

    name: str
    wrap: Callable[[Any], Any]
    pick: Callable[[Any], Any] = lambda answer: answer
    """Takes the part of a task's answer that is the answer: of several right ones the first."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls without which gold earns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A task under attack."""

    task: Task
    form: Form
    answer: Any = None
    """The right answer; None = nobody knows it."""
    gold: Any = None
    """The output that earns the most; None = nobody knows it."""
    others: tuple[Any, ...] = ()
    """Right answers of other tasks, each once and none of them this task's."""
    fields: tuple[str, ...] = ()
    """Keys that agent and rewards name in their code."""

    @property
    def text(self) -> str:
        """The right answer as text; empty where there is none."""
        return text_of_answer(self.answer)


class Mutator(Protocol):
    """Makes attacks of a task; what a factory of the hook `lightningrl_reward_mutators` returns."""

    def __call__(self, target: Target, /) -> Iterable[Attack]: ...


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
