"""The critic's reward: how many of its verdicts are right. The writer's is execution match, as in text_to_sql."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "text_to_sql"))

from reward import is_correct

__all__ = ["verdicts_right"]


def verdicts_right(task: Any, output: dict[str, Any], trajectory: object = None) -> float:
    """The share of drafts that the critic judged as the database does: accepted the right ones, rejected the wrong
    ones."""
    drafts = output["drafts"]
    right = [draft["accepted"] == is_correct(task, draft["query"]) for draft in drafts]
    return float(sum(right)) / len(right)
