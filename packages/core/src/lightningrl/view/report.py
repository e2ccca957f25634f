"""A run in one file: the page Run and the rollouts worth reading, with their style inside and no script, to be sent to a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lightningrl.look.queries.rollout_query import RolloutQuery
from lightningrl.look.queries.rollout_rows import Sort
from lightningrl.look.reader import StoredRun
from lightningrl.view.page import Asked, ViewedRun
from lightningrl.view.pages import rollouts
from lightningrl.view.pages import run as run_page
from lightningrl.view.templates import STATIC, render

__all__ = ["make_report"]

_ROLLOUTS: Final = 24


async def make_report(run: StoredRun, folder: Path) -> str:
    """HTML."""
    viewed = ViewedRun(name=folder.absolute().name, folder=folder, run=run)  # noqa: ASYNC240
    shown = await run_page.PAGE.show(viewed, Asked())
    rows = await run.queries.list_rows(RolloutQuery(), Sort.DISAGREE, None, _ROLLOUTS)
    found = []
    for row in rows:
        trace = await run.trace(row.id)
        found.append((row, rollouts.shorten_calls(trace), rollouts.find_answer(trace)))
    values: dict[str, Any] = {
        "is_report": True,
        "css": (STATIC / "style.css").read_text(encoding="utf-8"),
        "run": viewed,
        "url": None,
        "theme": None,
        "query": {},
        "found": found,
    }
    return render("report.html", {**values, **shown.values})
