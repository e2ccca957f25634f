"""Findings of the checks (verdict, evidence, remedy) and the diagnosis that they make together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lightningrl.sanitize import one_line

if TYPE_CHECKING:
    from lightningrl_training.doctor.bill import Bill
    from lightningrl_training.doctor.observation import Observation

__all__ = ["LONGEST", "Check", "Diagnosis", "Finding", "Row", "Verdict", "failed", "passed", "warned"]

LONGEST = 400
"""Characters of a sentence."""


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a check."""

    verdict: Verdict
    evidence: str
    remedy: str = ""
    """Advice; empty where nothing is to be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A row of the doctor's table."""

    name: str
    asks: str
    """The question that it answers."""
    look: Callable[[Observation], Finding]


def passed(evidence: str) -> Finding:
    return Finding(verdict=Verdict.PASS, evidence=one_line(evidence, LONGEST))


def warned(evidence: str, remedy: str) -> Finding:
    return Finding(verdict=Verdict.WARN, evidence=one_line(evidence, LONGEST), remedy=one_line(remedy, LONGEST))


def failed(evidence: str, remedy: str) -> Finding:
    return Finding(verdict=Verdict.FAIL, evidence=one_line(evidence, LONGEST), remedy=one_line(remedy, LONGEST))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A check and its finding."""

    check: str
    asks: str
    finding: Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings and the bill."""

    rows: tuple[Row, ...]
    bill: Bill | None
    """None where nothing could be tried."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings."""
        return max((row.finding.verdict for row in self.rows), key=list(Verdict).index, default=Verdict.PASS)

    def complaints(self) -> dict[str, Finding]:
        """Findings that did not pass, by the name of their check."""
        return {row.check: row.finding for row in self.rows if row.finding.verdict is not Verdict.PASS}

    def as_json(self) -> dict[str, Any]:
        checks = [{"check": row.check, "asks": row.asks, **asdict(row.finding)} for row in self.rows]
        return {"verdict": self.verdict, "checks": checks, "bill": None if self.bill is None else asdict(self.bill)}
