"""Findings of the red team and the report that they make together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from lightningrl.sanitize import one_line
from lightningrl_training.redteam.attacks import Severity, text_of_answer

__all__ = ["RedTeamFinding", "RedTeamReport", "shorten"]

LONGEST: Final = 240
"""Characters of an output or input in a report."""


def shorten(value: Any) -> str:
    """A value in one line."""
    return "None" if value is None else one_line(repr(value) if value == "" else text_of_answer(value), LONGEST)


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
