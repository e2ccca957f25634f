"""The doctor's report on a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl_training.doctor.bill import Bill
from lightningrl_training.doctor.findings import Finding, Verdict

__all__ = ["Diagnosis", "Row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A check and what it found."""

    check: str
    asks: str
    finding: Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings, and the bill."""

    rows: tuple[Row, ...]
    bill: Bill | None
    """None where nothing could be tried."""

    @property
    def verdict(self) -> Verdict:
        """The worst of them."""
        return worst([row.finding.verdict for row in self.rows])

    def complaints(self, *verdicts: Verdict) -> dict[str, Finding]:
        """By check: those that did not pass, or those with one of `verdicts`."""
        wanted = verdicts or (Verdict.WARN, Verdict.FAIL)
        return {row.check: row.finding for row in self.rows if row.finding.verdict in wanted}

    def as_json(self) -> dict[str, Any]:
        checks = [{"check": row.check, "asks": row.asks, **asdict(row.finding)} for row in self.rows]
        return {"verdict": self.verdict, "checks": checks, "bill": None if self.bill is None else asdict(self.bill)}


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.PASS)
