"""The run at a glance: how far it is, its curves, what is wrong, where time and tokens went.

smooth=none | some | much   until
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightningrl_runs.facets import read_facets
from lightningrl_runs.metrics import find_metric, read_rows
from lightningrl_runs.notes import read_notes
from lightningrl_runs.origin import read_import, read_values
from lightningrl_runs.queries.rollout_counts import ToolCount
from lightningrl_runs.queries.rollout_query import RolloutQuery
from lightningrl_runs.summary import Summary, read_summary
from lightningrl_viewer.charts import SMOOTHINGS, Series, draw_chart, make_curves, sparkline
from lightningrl_viewer.page import NoSuchPage, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE"]

_MOST_STEPS: Final = 60
_MOST_TOOLS: Final = 24
"""Tools that are listed: an agent may report as many as it thinks of."""
_FACTS: Final = {
    "policy.model": "policy",
    "credit.use": "credit",
    "loop.tasks_per_step": "tasks a step",
    "loop.group_size": "group size",
}
"""Keys of the recipe that are shown, and how they are called here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolLine:
    """Calls of one tool in the whole run."""

    name: str
    calls: int
    failed: int


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    if (imported := await asyncio.to_thread(read_import, viewed.folder)) is not None:
        return await _show_import(viewed, imported)
    summary = await viewed.cache.get("summary", lambda: read_summary(viewed.run, viewed.folder))
    recipe = await asyncio.to_thread(read_values, viewed.folder)
    until = request.number("until")
    lines = [line for line in summary.steps if until is None or line.step <= until]
    tools = list_tools(summary.tools)
    smooth = request.query.get("smooth") or "none"
    if smooth not in SMOOTHINGS:
        raise NoSuchPage(f"there is no smoothing {smooth[:40]!r}; choose of: {', '.join(SMOOTHINGS)}")
    return PageView(
        "run.html",
        title=viewed.name,
        summary=summary,
        chart=draw_chart(reward_series(summary), smoothing=SMOOTHINGS[smooth], bounds=_bounds(summary)),
        curves=make_curves([line.metrics for line in summary.steps], SMOOTHINGS[smooth]),
        warm_start=make_curves(await asyncio.to_thread(read_rows, viewed.folder / "warm_start" / "tuning")),
        smooth=smooth,
        notes=await asyncio.to_thread(read_notes, viewed.folder),
        smoothings=tuple(SMOOTHINGS),
        hint_of=_hint_of,
        parts_of_reward=[
            (name, points, sparkline([point.mean for point in points])) for name, points in summary.parts.items()
        ],
        tools=tools[:_MOST_TOOLS],
        tools_left=len(tools[_MOST_TOOLS:]),
        facts=[(name, recipe[key]) for key, name in _FACTS.items() if key in recipe],
        points_by_step={point.step: point for point in summary.train},
        lines=lines[-_MOST_STEPS:][::-1],
        earlier=lines[-_MOST_STEPS - 1].step if len(lines) > _MOST_STEPS else None,
        endings=sorted(
            {name for line in summary.steps for name in line.endings}, key=lambda name: (name != "succeeded", name)
        ),
        pace=sum(summary.bill.seconds.values()),
    )


async def _show_import(viewed: ViewedRun, imported: Mapping[str, Any]) -> PageView:
    """Show what an imported run is: its source, its calls by grade, its tools, and what to do with it."""
    facets = await viewed.cache.get(("facets", RolloutQuery()), lambda: read_facets(viewed.run, RolloutQuery()))
    tools = list_tools(await viewed.run.queries.tool_counts())
    return PageView(
        "imported.html",
        title=viewed.name,
        imported=imported,
        facets=facets,
        grades=await viewed.cache.get("grades", lambda: asyncio.to_thread(_count_grades, viewed.folder)),
        notes=await asyncio.to_thread(read_notes, viewed.folder),
        tools=tools[:_MOST_TOOLS],
        tools_left=len(tools[_MOST_TOOLS:]),
    )


def _count_grades(folder: Path) -> Counter[str]:
    """Count the calls of an import by grade."""
    try:
        with (folder / "grades.jsonl").open(encoding="utf-8") as lines:
            return Counter(str(json.loads(line)["grade"]) for line in lines)
    except (OSError, ValueError, LookupError, TypeError):
        return Counter()


def _bounds(summary: Summary) -> tuple[float, float] | None:
    """Return 0 and 1 where all rewards are within them: intervals are drawn no further."""
    points = (*summary.train, *summary.validation)
    return (0.0, 1.0) if all(0.0 <= point.mean <= 1.0 for point in points) else None


def _hint_of(name: str) -> str:
    """Say what a metric means and how it is in a run that goes well; empty for one that nobody describes."""
    metric = find_metric(name)
    return "" if metric is None else f"{metric.means} {metric.healthy}".strip()


def list_tools(counts: Sequence[ToolCount]) -> list[ToolLine]:
    """List the tools, those that fail most first."""
    calls, failed = Counter[str](), Counter[str]()
    for tool in counts:
        calls[tool.name] += tool.count
        failed[tool.name] += tool.count * tool.status.is_failure
    lines = [ToolLine(name=name, calls=count, failed=failed[name]) for name, count in calls.items()]
    return sorted(lines, key=lambda line: (-line.failed, -line.calls, line.name))


def reward_series(summary: Summary) -> list[Series]:
    """Return the two curves of a run."""
    return [
        Series(name="training reward", colour=2, points=summary.train),
        Series(name="validation", colour=1, points=summary.validation, is_dotted=True),
    ]


PAGE = Page("", show, name="Run", key="r")
