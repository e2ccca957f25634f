"""Questions about a run's credit that a page asks, and their answers: what viewer and trainer say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from lightningrl_credit.xray import XRay

__all__ = ["Answer", "Question"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Part of a run that is asked about: a rollout, a group, a step (0 = the newest), or the whole run."""

    rollout: str | None = None
    group: str | None = None
    step: int = 0
    whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An X-ray, or the sentence why there is none."""

    xray: XRay | None = None
    first: int = 0
    """First step that was trained; `last` is the last."""
    last: int = 0
    error: str = ""
    is_defect: bool = False
    """True where a method failed; else there is no such rollout, group or step."""
