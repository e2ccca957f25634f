"""All runs of a folder beside each other; two or more compared.

compare=NAME, again and again   q   tag   after
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from lightningrl.errors import LightningError
from lightningrl_runs.runs import RunLine, differences, read_runs
from lightningrl_runs.summary import Summary, read_summary
from lightningrl_viewer.charts import Series, draw_chart, sparkline
from lightningrl_viewer.page import NoSuchPage, PageRequest, PageView
from lightningrl_viewer.runs import RunsFolder

__all__ = ["show_runs"]

_PER_PAGE: Final = 40
_MOST_COMPARED: Final = 6
_MOST_KEYS: Final = 40
_MOST_TAGS: Final = 40


async def show_runs(runs: RunsFolder, request: PageRequest) -> PageView:
    lines = await asyncio.to_thread(read_runs, runs.folder)
    compared = list(dict.fromkeys(request.query.getlist("compare")))
    if len(compared) > _MOST_COMPARED:
        raise NoSuchPage(f"{len(compared)} runs are too many to compare; choose up to {_MOST_COMPARED}")
    text = request.query.get("q", "")
    tags = Counter(tag for line in lines for tag in line.notes.tags)
    chosen = request.query.get("tag") or None
    listed = [line for line in lines if _is_like(line, text.lower()) and (chosen is None or chosen in line.notes.tags)]
    begin = max(0, request.number("after") or 0)
    page = listed[begin : begin + _PER_PAGE]
    differing = differences(page)
    summaries = [(name, await _summary(runs, name)) for name in compared]
    curves: dict[str, list[Series]] = {"validation": [], "training reward": []}
    for colour, (name, summary) in enumerate(summaries, 1):
        curves["validation"].append(Series(name=name, colour=colour, points=summary.validation))
        curves["training reward"].append(Series(name=name, colour=colour, points=summary.train))
    charts = {what: draw_chart(series) for what, series in curves.items()}
    return PageView(
        "runs.html",
        title="Runs",
        folder=runs.folder,
        tags=sorted(tags.items(), key=lambda tag: (-tag[1], tag[0]))[:_MOST_TAGS],
        tag=chosen,
        lines=page,
        has_labels=any(line.notes.tags or line.notes.note for line in page),
        count=len(listed),
        sparks={line.name: sparkline(line.validations if len(line.validations) > 1 else line.rewards) for line in page},
        shorts={line.name: _short_difference(line, differing) for line in page},
        next_after=begin + _PER_PAGE if len(listed) > begin + _PER_PAGE else None,
        after=begin or None,
        compared=compared,
        compared_elsewhere=[name for name in compared if name not in {line.name for line in page}],
        summaries=summaries,
        charts_drawn={what: chart for what, chart in charts.items() if chart is not None},
        common=_common_step(summaries),
        differing=dict(list(_compared(lines, compared).items())[:_MOST_KEYS]),
    )


def _is_like(line: RunLine, part: str) -> bool:
    """True where the text is in a run's name, in a tag or in its note."""
    return any(part in text.lower() for text in (line.name, *line.notes.tags, line.notes.note))


async def _summary(runs: RunsFolder, name: str) -> Summary:
    try:
        async with runs.viewed(name) as viewed:
            return await viewed.cache.get("summary", lambda: read_summary(viewed.run, viewed.folder))
    except NoSuchPage:
        raise
    except LightningError as error:
        raise LightningError(f"run {name!r} cannot be compared: {error}") from error


def _common_step(summaries: list[tuple[str, Summary]]) -> int | None:
    """Return the last step after which all of them were validated."""
    if not summaries:
        return None
    return max(set.intersection(*({point.step for point in found.validation} for _, found in summaries)), default=None)


def _compared(lines: list[RunLine], names: list[str]) -> dict[str, list[object]]:
    by_name = {line.name: line for line in lines}
    return differences([by_name[name] for name in names if name in by_name]) if len(names) > 1 else {}


def _short_difference(line: RunLine, differing: dict[str, list[object]], most: int = 4) -> str:
    """Say what sets a run apart from the others on the page."""
    shown = [f"{key} {line.recipe[key]}" for key in differing if line.recipe.get(key) is not None]
    return ", ".join(shown[:most]) + (" …" if len(shown) > most else "")
