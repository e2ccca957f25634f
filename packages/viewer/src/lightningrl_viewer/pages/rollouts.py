"""All rollouts: facets, a table, a peek. What is chosen stands in the address.

step  from to   mode  outcome  reward=0.5 | 0.2..0.4 | none   task  role  tool  mark  q   sort  after  peek
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from lightningrl.types import Outcome, RolloutMode, RolloutState
from lightningrl_runs.dialogue import Exchange, final_text, read_exchanges
from lightningrl_runs.facets import Facets, RewardRange, read_facets, read_parts
from lightningrl_runs.queries.rollout_counts import FacetCount, Part
from lightningrl_runs.queries.rollout_query import Mark, RolloutQuery
from lightningrl_runs.queries.rollout_rows import RolloutRow, Sort
from lightningrl_runs.segments import SegmentKind
from lightningrl_runs.trace import CallTrace, Trace
from lightningrl_viewer.page import NoSuchPage, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE", "find_answer", "read_query", "shorten_calls"]

PER_PAGE: Final = 60
_STATE: Final = ("step", "from", "to", "mode", "outcome", "reward", "task", "role", "tool", "mark", "q", "sort")
"""Parameters that narrow or order the list; a change of one begins again at the first page."""
_SORTS: Final = {
    Sort.DISAGREE: "groups that disagree",
    Sort.TASK: "tasks, least reward first",
    Sort.NEWEST: "newest",
    Sort.WORST: "least reward",
    Sort.BEST: "greatest reward",
    Sort.SLOWEST: "slowest",
}
_BY_TASK: Final = frozenset({Sort.DISAGREE, Sort.TASK, Sort.NEWEST})
"""Orders in which the rollouts of a task follow each other, below a line that says what was asked."""
_MARKS: Final = {
    Mark.SILENT: "no signal in the group",
    Mark.CUT: "cut short",
    Mark.BREAK: "break",
    Mark.TOOL_ERROR: "tool error",
    Mark.MALFORMED: "malformed tool call",
    Mark.REFUSED: "refused call",
    Mark.FAILED_REWARD: "failed reward",
}
_TEXT: Final = 280

C = TypeVar("C", bound=StrEnum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A step in the strip above the table, of a thousand by thirty."""

    x: float
    width: float
    height: float
    first: int
    last: int
    count: int
    reward: float | None


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    state = {name: request.query[name] for name in _STATE if request.query.get(name)}
    query, sort = read_query(request), _choice("sort", state.get("sort"), Sort) or Sort.DISAGREE
    rows = await viewed.run.queries.list_rows(query, sort, request.query.get("after") or None, PER_PAGE + 1)
    facets = await viewed.cache.get(("facets", query), lambda: read_facets(viewed.run, query))
    parts = await viewed.cache.get("parts", lambda: read_parts(viewed.run))
    peek = request.query.get("peek")
    trace = await viewed.run.trace(peek) if peek else None
    return PageView(
        "rollouts.html",
        title="Rollouts",
        state=state,
        rows=rows[:PER_PAGE],
        next_after=rows[PER_PAGE - 1].id if len(rows) > PER_PAGE else None,
        after=request.query.get("after"),
        facets=facets,
        roles=parts[Part.ROLE],
        tools=parts[Part.TOOL],
        reward_values=[(reward_text(found), found) for found in facets.rewards],
        strip=make_strip(facets),
        sort=sort,
        by_task=sort in _BY_TASK and any(map(_is_of_one_task, rows, rows[1:])),
        sorts=_SORTS,
        marks=_MARKS,
        peek=peek,
        trace=trace,
        peek_calls=[] if trace is None else shorten_calls(trace),
        peek_talks=[] if trace is None else shorten_exchanges(trace),
        answer=None if trace is None else find_answer(trace),
    )


def read_query(request: PageRequest) -> RolloutQuery:
    """Read the query. Raises NoSuchPage where a value is none that there is."""
    get = request.query.get
    step = request.number("step")
    ending = get("outcome")
    states = {member.value: member for member in (RolloutState.QUEUED, RolloutState.RUNNING)}
    low, high, is_unrewarded = _reward(get("reward"))
    return RolloutQuery(
        first_step=request.number("from") if step is None else step,
        last_step=request.number("to") if step is None else step,
        mode=_choice("mode", get("mode"), RolloutMode),
        outcome=None if ending in states else _choice("outcome", ending, Outcome),
        state=states.get(ending or ""),
        low=low,
        high=high,
        is_unrewarded=is_unrewarded,
        task=get("task") or None,
        role=get("role") or None,
        tool=get("tool") or None,
        mark=_choice("mark", get("mark"), Mark),
        text=get("q") or None,
    )


def reward_text(bounds: RewardRange) -> str:
    """Write the range as it stands in the address."""
    return repr(bounds.low) if bounds.low == bounds.high else f"{bounds.low!r}..{bounds.high!r}"


def _is_of_one_task(row: RolloutRow, following: RolloutRow) -> bool:
    return row.task_id == following.task_id


def make_strip(facets: Facets, most: int = 120) -> list[Bar]:
    """Draw rollouts by step; of many steps several share a bar."""
    if not facets.steps:
        return []
    first, last = facets.steps[0].value, facets.steps[-1].value
    wide = -(-(last - first + 1) // most)
    bins: dict[int, list[FacetCount[int]]] = defaultdict(list)
    for step in facets.steps:
        bins[(step.value - first) // wide].append(step)
    number = (last - first) // wide + 1
    greatest = max(sum(step.count for step in part) for part in bins.values())
    bars = []
    for place, part in bins.items():
        count = sum(step.count for step in part)
        rewarded = [(step.reward, step.count) for step in part if step.reward is not None]
        rewards, counts = [reward * count for reward, count in rewarded], [count for _, count in rewarded]
        bars.append(
            Bar(
                x=round(1000 * place / number, 1),
                width=round(max(1.0, 1000 / number - 1.5), 1),
                height=round(30 * count / greatest, 1),
                first=first + place * wide,
                last=min(last, first + (place + 1) * wide - 1),
                count=count,
                reward=sum(rewards) / sum(counts) if counts else None,
            )
        )
    return bars


def shorten_calls(trace: Trace) -> list[tuple[CallTrace, str]]:
    """Return each call, and what it said in a few lines."""
    return [(call, _cut(_said(call), _TEXT)) for call in trace.calls]


def shorten_exchanges(trace: Trace) -> list[tuple[Exchange, str]]:
    """Return each call that a provider answered, and its answer in a few lines; none beside calls of a policy."""
    exchanges = () if trace.calls else read_exchanges(trace)
    answers = ("\n".join(part.text for part in each.speeches if part.is_answer) for each in exchanges)
    return [(each, _cut(answer, _TEXT)) for each, answer in zip(exchanges, answers, strict=True)]


def _said(call: CallTrace) -> str:
    parts = [segment.text for segment in call.segments if segment.is_sampled and segment.kind is not SegmentKind.MARKUP]
    return "".join(parts).strip()


def find_answer(trace: Trace) -> str | None:
    """Return what the deciding attempt returned, or why it failed."""
    shown = trace.shown_attempt
    value = None if shown is None else shown.error or shown.output
    return None if value is None else _cut(final_text(value), 2 * _TEXT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _reward(text: str | None) -> tuple[float | None, float | None, bool]:
    if not text or text == "none":
        return None, None, text == "none"
    low, dots, high = text.partition("..")
    try:
        ends = float(low), float(high if dots else low)
    except ValueError:
        ends = math.nan, math.nan
    if any(map(math.isnan, ends)):
        raise NoSuchPage(f"reward is {text[:40]!r}; write a number, two as 0.2..0.4, or none")
    return *ends, False


def _choice(name: str, text: str | None, kind: type[C]) -> C | None:
    if not text:
        return None
    members: Mapping[str, C] = {member.value: member for member in kind}
    if text not in members:
        raise NoSuchPage(f"there is no {name} {text[:40]!r}; choose of: {', '.join(members)}")
    return members[text]


PAGE = Page("rollouts", show, name="Rollouts", key="l")
