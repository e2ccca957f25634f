"""What a check says: pass, warn or fail, what it was seen by, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from lightningrl.sanitize import one_line

if TYPE_CHECKING:
    from lightningrl_training.doctor.observation import Observation

__all__ = ["LONGEST", "Check", "Finding", "Verdict", "failed", "passed", "warned"]

LONGEST = 400
"""Characters of a sentence."""


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a check saw."""

    verdict: Verdict
    evidence: str
    remedy: str = ""
    """What to do; empty where there is nothing to be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    asks: str
    """What it looks at, as a question."""
    look: Callable[[Observation], Finding]


def passed(evidence: str) -> Finding:
    return Finding(verdict=Verdict.PASS, evidence=one_line(evidence, LONGEST))


def warned(evidence: str, remedy: str) -> Finding:
    return Finding(verdict=Verdict.WARN, evidence=one_line(evidence, LONGEST), remedy=one_line(remedy, LONGEST))


def failed(evidence: str, remedy: str) -> Finding:
    return Finding(verdict=Verdict.FAIL, evidence=one_line(evidence, LONGEST), remedy=one_line(remedy, LONGEST))
