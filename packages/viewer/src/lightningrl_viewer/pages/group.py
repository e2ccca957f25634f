"""A group: its rollouts side by side, from where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightningrl.sanitize import as_text
from lightningrl_runs.dialogue import final_text
from lightningrl_runs.group_diff import Sibling, SiblingCall
from lightningrl_viewer.page import Budget, LongText, NoSuchPage, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE"]

MOST: Final = 32
"""Columns."""
PAGE_BYTES: Final = 120_000
_CALLS: Final = 12
"""Calls of a column."""
_TASK: Final = 4_000
_OUTPUT: Final = 400
"""Bytes of the task and of its answer, and of an output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    call: SiblingCall
    same: LongText
    """The beginning that all of them share."""
    own: LongText


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    sibling: Sibling
    calls: Sequence[_Call]
    left: int
    """Calls that are not shown."""


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    group = await viewed.run.siblings(request.path["group_id"], most=MOST)
    if not group.rollouts:
        raise NoSuchPage(f"there is no group {request.path['group_id'][:100]!r}; a rollout's page links to its own")
    budget, each = Budget(PAGE_BYTES), PAGE_BYTES // (len(group.rollouts) + 1)
    largest = max((abs(one.mean_advantage) for one in group.rollouts if one.mean_advantage is not None), default=0.0)
    columns = [
        _Column(
            sibling=sibling,
            calls=[_call(call, budget, each // min(_CALLS, len(sibling.calls))) for call in sibling.calls[:_CALLS]],
            left=max(0, len(sibling.calls) - _CALLS),
        )
        for sibling in group.rollouts
    ]
    task = group.rollouts[0].rollout.spec.task
    shared = [_call(call, budget, each // len(group.shared)) for call in group.shared[:_CALLS]]
    return PageView(
        "group.html",
        title=f"group {group.group_id}",
        group=group,
        columns=columns,
        shared=shared,
        largest=largest,
        task=task,
        asked=budget.truncate("task", as_text(task.input), _TASK),
        expected=None if task.answer is None else budget.truncate("expected", as_text(task.answer), _TASK),
        outputs=[_output(column.sibling, budget) for column in columns],
    )


def _output(sibling: Sibling, budget: Budget) -> LongText | None:
    """Return what came of a rollout: its output or its error; None = nothing yet."""
    value = sibling.rollout.error or sibling.rollout.output
    return None if value is None else budget.truncate("", final_text(value), _OUTPUT)


def _call(call: SiblingCall, budget: Budget, most: int) -> _Call:
    same = budget.truncate("", call.text[: call.same], most // 3)
    return _Call(call=call, same=same, own=budget.truncate("", call.text[call.same :], most - most // 3))


PAGE = Page("groups/{group_id:path}", show)
