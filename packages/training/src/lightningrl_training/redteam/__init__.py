"""The red team: attacks the rewards of a recipe before a policy is trained to.

recipe ─► attack.RedTeam ─► mutators ─► rewards, as in a run ─► judgement ─► RedTeamReport
"""

from __future__ import annotations

from lightningrl_training.redteam.attack import RedTeam, choose_tasks, mutators_of
from lightningrl_training.redteam.attacks import (
    Attack,
    Form,
    Mutator,
    RedTeamFinding,
    RedTeamReport,
    Severity,
    Target,
    Worth,
)

__all__ = [
    "Attack",
    "Form",
    "Mutator",
    "RedTeam",
    "RedTeamFinding",
    "RedTeamReport",
    "Severity",
    "Target",
    "Worth",
    "choose_tasks",
    "mutators_of",
]
