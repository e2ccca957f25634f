"""Which rollouts a page asks for, and where they stand in the index.

RolloutQuery(task="t", mark=Mark.CUT) ─► choose(index, db, query) ─► a mask over index.rows

Steps are counted from 1, as everywhere on screen: step 1 trains the rollouts that were planned at 0. A validation has
the step after which it ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Table, TextClause, select, text
from sqlalchemy.sql import ColumnElement

from lightningrl.types import OtherCallKind, Outcome, RolloutMode, RolloutState
from lightningrl_runs.queries.rollout_index import MODES, OUTCOMES, STATES, RolloutIndex
from lightningrl_server.store.participants import words_in
from lightningrl_server.store.tables import attempts, calls, other_calls, rollouts, tasks, words

__all__ = ["DECIDING", "IS_CUT", "Mark", "Mask", "RolloutQuery", "choose", "group_variances", "is_compared"]

Mask: TypeAlias = NDArray[np.bool_]
"""True where a rollout is meant, by its place in the index."""

DECIDING: Final = (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding)
IS_CUT: Final = text("finish_reason = 'length'")
"""In the words of its partial index, which a bound value would not find."""
_IS_BREAK: Final = text("CAST(is_break AS INTEGER) = 1")
_IS_MALFORMED: Final = text("malformed IS NOT NULL")
_EQUAL: Final = 1e-12
"""Variance of rewards that differ by rounding."""


class Mark(StrEnum):
    """An event in a rollout, or of its group."""

    CUT = "cut"
    """A completion ended at max_tokens."""
    BREAK = "break"
    TOOL_ERROR = "tool_error"
    MALFORMED = "malformed"
    """An answer begins a tool call that cannot be read."""
    REFUSED = "refused"
    """The gateway refused a call."""
    FAILED_REWARD = "failed_reward"
    SILENT = "silent"
    """All rewards of its group are equal: nothing is learned from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutQuery:
    """Which rollouts. None = any."""

    first_step: int | None = None
    last_step: int | None = None
    mode: RolloutMode | None = None
    outcome: Outcome | None = None
    state: RolloutState | None = None
    low: float | None = None
    """Least reward."""
    high: float | None = None
    """Greatest reward."""
    is_unrewarded: bool = False
    task: str | None = None
    role: str | None = None
    tool: str | None = None
    mark: Mark | None = None
    text: str | None = None
    """Part of the rollout's or the task's id."""


def choose(
    index: RolloutIndex, db: Connection, query: RolloutQuery, variances: NDArray[np.float64] | None = None
) -> Mask:
    """Mark the rollouts that `query` asks for. `variances`: of the groups, where the caller has them already."""
    rows = index.rows
    reward = rows["reward"]
    conditions: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
        (query.first_step, rows["step"].__ge__),
        (query.last_step, rows["step"].__le__),
        (query.mode, lambda mode: rows["mode"] == MODES.index(mode)),
        (query.outcome, lambda outcome: rows["outcome"] == OUTCOMES.index(outcome)),
        (query.state, lambda state: rows["state"] == STATES.index(state)),
        (query.low, reward.__ge__),
        (query.high, reward.__le__),
        (query.is_unrewarded or None, lambda _: np.isnan(reward)),
        (query.task, lambda task: rows["task"] == index.tasks.get(task, -1)),
        (query.role, lambda role: _lists(index, db, "roles", role)),
        (query.tool, lambda tool: _lists(index, db, "tools", tool)),
        (query.text or None, lambda part: _named_like(index, db, part)),
        (query.mark, lambda mark: _marked(index, db, mark, query.tool, variances)),
    )
    chosen = np.ones(len(rows), np.bool_)
    for value, holds in conditions:
        if value is not None:
            chosen &= holds(value)
    return chosen


def is_compared(index: RolloutIndex) -> Mask:
    """True for rollouts whose reward is compared within their group; a branch is compared with its own siblings
    alone."""
    rows = index.rows
    return np.asarray(~np.isnan(rows["reward"]) & (rows["mode"] != MODES.index(RolloutMode.BRANCH)))


def group_variances(index: RolloutIndex) -> NDArray[np.float64]:
    """Variance of each group's rewards, by the group's number; nan where fewer than two rollouts have one."""
    rows = index.rows[is_compared(index)]
    reward, group, count = rows["reward"], rows["group"], len(index.groups)
    number = np.bincount(group, minlength=count)
    mean, square = (
        np.bincount(group, values, minlength=count) / np.maximum(1, number) for values in (reward, reward * reward)
    )
    return np.where(number > 1, square - mean * mean, np.nan)


def _lists(index: RolloutIndex, db: Connection, column: str, word: str) -> Mask:
    """True where a rollout's list of words holds this one."""
    number = db.execute(select(words.c.pk).where(words.c.text == word)).scalar()
    has = np.array([number in words_in(listed or "") for listed in index.lists])
    return np.asarray(has[index.rows[column]])


def _named_like(index: RolloutIndex, db: Connection, part: str) -> Mask:
    like = "%" + re.sub(r"([%_\\])", r"\\\1", part) + "%"
    named_tasks = select(tasks.c.pk).where(tasks.c.task_id.like(like, escape="\\"))
    is_named = rollouts.c.id.like(like, escape="\\") | rollouts.c.task_pk.in_(named_tasks)
    return _among(index, db, select(rollouts.c.pk).where(is_named))


def _among(index: RolloutIndex, db: Connection, pks: Any) -> Mask:
    """True where a rollout is one of those that a statement finds."""
    return np.isin(index.rows["pk"], np.array(db.execute(pks).scalars().all(), np.int64))


def _having(table: Table, which: ColumnElement[bool] | TextClause) -> Any:
    """Rollouts whose deciding attempt has such rows."""
    whole = table.join(attempts, attempts.c.pk == table.c.attempt_pk).join(rollouts, DECIDING)
    return select(rollouts.c.pk).select_from(whole).where(which)


def _marked(
    index: RolloutIndex, db: Connection, mark: Mark, tool: str | None, variances: NDArray[np.float64] | None
) -> Mask:
    """`tool`: whose errors are meant; None = any."""
    rows = index.rows
    match mark:
        case Mark.CUT:
            return _among(index, db, _having(calls, IS_CUT))
        case Mark.BREAK:
            return _among(index, db, _having(calls, _IS_BREAK))
        case Mark.MALFORMED:
            return _among(index, db, _having(calls, _IS_MALFORMED))
        case Mark.REFUSED:
            return _among(index, db, _having(other_calls, other_calls.c.kind == OtherCallKind.REFUSED))
        case Mark.TOOL_ERROR if tool is not None:
            return _lists(index, db, "failed_tools", tool)
        case Mark.TOOL_ERROR:
            has_any = np.array([bool(listed) for listed in index.lists])
            return np.asarray(has_any[rows["failed_tools"]])
        case Mark.FAILED_REWARD:
            return np.asarray(rows["unrewarded"])
        case Mark.SILENT:
            return np.asarray(((group_variances(index) if variances is None else variances) < _EQUAL)[rows["group"]])
