"""Tool calls and spans of a running attempt: what several sources report of a tool call becomes one row.

the dialogue shows a call ─► a row of its own ─┐
a span or a report tells of it ────────────────┴─► one row, of the worst status; `contradicted` counts disagreement
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, update

from lightningrl.errors import StoreError
from lightningrl.sanitize import clean_text
from lightningrl.types import ToolCall, ToolStatus
from lightningrl_server.records import DIALOGUE, SpanRecord, ToolCallRecord
from lightningrl_server.store import tables
from lightningrl_server.store.columns import column_text
from lightningrl_server.store.participants import LiveAttempt, SpanNode
from lightningrl_server.store.tables import is_shown, tool_calls
from lightningrl_server.store.transaction import PreparedStatement, Transaction

__all__ = ["append_spans", "append_tool_calls"]

MOST_REPORTED = 50_000
"""Tool calls of an attempt, and as many spans: they are kept in memory while it runs."""
_BADNESS = (
    ToolStatus.UNKNOWN,
    ToolStatus.OK,
    ToolStatus.UNKNOWN_TOOL,
    ToolStatus.INVALID_ARGUMENTS,
    ToolStatus.TIMEOUT,
    ToolStatus.ERROR,
)
"""Statuses, the worst last: it stands where reports contradict each other, as nobody gains by reporting a failure."""


def append_tool_calls(tx: Transaction, rollout_id: str, attempt: int, tool_calls: Sequence[ToolCallRecord]) -> int:
    """Record tool calls; returns how many are new. Of one reported again, by id or span, the worst status stands."""
    live = tx.live(rollout_id, attempt, "a tool call")
    rows, replaced = list[dict[str, Any]](), set[str]()
    for record in tool_calls:
        tool_call, call_id = record.tool_call, column_text(record.tool_call.id)
        span = None if record.span_id is None else clean_text(record.span_id)
        if call_id in live.reported_tools or span in live.tool_spans:
            if record.is_of_dialogue and call_id in live.gaps:
                _fill_gaps(tx, live, call_id, tool_call)
            is_failure = call_id in live.reported_tools and tool_call.status is ToolStatus.ERROR
            if not record.is_of_dialogue or is_failure:
                _report_again(tx, live, rows, record)
            continue
        if not record.is_of_dialogue:
            shown = f"{DIALOGUE}{call_id}"
            if shown in live.shown:
                replaced.add(shown)
                tool_call = _without_gaps(tx, live, shown, tool_call)
                if live.shown[shown][1] is ToolStatus.ERROR and tool_call.status is ToolStatus.OK:
                    tool_call = replace(tool_call, status=ToolStatus.ERROR, contradicted=1)
            live.note_reported(call_id, has_gaps=_has_gaps(tool_call))
        if span is not None:
            live.tool_spans.add(span)
        row = {name: getattr(tool_call, name) for name in ToolCall.__slots__} | {
            "attempt_pk": live.pk,
            "name": tx.word(tool_call.name),
            "agent": tx.word_or_none(tool_call.agent),
            "span": span,
            "parent_span": record.parent_span_id,
            "started_at": record.started_at,
        }
        live.add_tool(row["name"], tool_call.status, shown=span if record.is_of_dialogue else None)
        rows.append(row)
    live.tool_calls += len(rows)
    _check_number(live.tool_calls, "tool calls", rollout_id)
    tx.run_many(_ADD, rows)
    for shown in replaced:
        tx.run(_DROP_SHOWN, of_attempt=live.pk, of_span=shown)
        live.drop_shown(shown)
    return len(rows)


def _report_again(tx: Transaction, live: LiveAttempt, rows: Sequence[dict[str, Any]], record: ToolCallRecord) -> None:
    """Change a tool call, one of the new `rows` or a stored one, as another report of it wants."""
    tool_call, call_id = record.tool_call, column_text(record.tool_call.id)
    span = None if record.span_id is None else clean_text(record.span_id)
    same = (row for row in rows if column_text(row["id"]) == call_id or (span is not None and row["span"] == span))
    row = next(same, None)
    if row is not None:
        changes = _merged(row, record)
        row |= changes
    else:
        by_id = tx.rows(_STORED_BY_ID, of_attempt=live.pk, of_id=call_id)[:1]
        (stored,) = by_id or tx.rows(_STORED_BY_SPAN, of_attempt=live.pk, of_span=span)
        changes = _merged(stored._asdict(), record)
        if changes:
            before = {name: getattr(stored, name) for name in _STATUS_COLUMNS}
            tx.run(_CHANGE, of_pk=stored.pk, **before | changes)
    if "status" in changes:
        live.add_tool(tx.word(tool_call.name), tool_call.status)


def _merged(stored: Mapping[str, Any], record: ToolCallRecord) -> dict[str, Any]:
    """Compute the changes: the status, and what belongs to it, where the other report is worse; the count, where both
    name a status. An error by the dialogue contradicts only a report of ok: others know the failure better."""
    # stored OK, reported ERROR: status ERROR, contradicted + 1. Stored ERROR, reported OK: contradicted + 1 alone.
    # Stored TIMEOUT, shown as ERROR by the dialogue: nothing.
    tool_call = record.tool_call
    if tool_call.status == stored["status"] or (record.is_of_dialogue and stored["status"] is not ToolStatus.OK):
        return {}
    changes: dict[str, Any] = {}
    if _BADNESS.index(tool_call.status) > _BADNESS.index(stored["status"]):
        changes |= {"status": tool_call.status, "result": tool_call.result, "error_type": tool_call.error_type}
    if ToolStatus.UNKNOWN not in (tool_call.status, stored["status"]):
        changes["contradicted"] = stored["contradicted"] + 1
    return changes


def _has_gaps(reported: ToolCall) -> bool:
    """True if a reported tool call leaves out what the dialogue may show of it."""
    return not (reported.arguments and reported.result) or reported.status is ToolStatus.UNKNOWN


def _without_gaps(tx: Transaction, live: LiveAttempt, shown: str, reported: ToolCall) -> ToolCall:
    """Fill a reported tool call's gaps with what the dialogue has shown before."""
    if not _has_gaps(reported):
        return reported
    (row,) = tx.rows(_STORED_BY_SPAN, of_attempt=live.pk, of_span=shown)
    return replace(
        reported,
        arguments=reported.arguments or row.arguments,
        result=reported.result or row.result,
        status=row.status if reported.status is ToolStatus.UNKNOWN else reported.status,
    )


def _fill_gaps(tx: Transaction, live: LiveAttempt, call_id: str, shown: ToolCall) -> None:
    """Fill a stored tool call's gaps with what the dialogue shows afterwards."""
    live.gaps.discard(call_id)
    for row in tx.rows(_STORED_BY_ID, of_attempt=live.pk, of_id=call_id):
        status = shown.status if row.status is ToolStatus.UNKNOWN else row.status
        values = {"arguments": row.arguments or shown.arguments, "result": row.result or shown.result}
        tx.run(_FILL, of_pk=row.pk, status=status, **values)
        live.add_tool(row.name, status)


def append_spans(tx: Transaction, rollout_id: str, attempt: int, spans: Sequence[SpanRecord]) -> None:
    live = tx.live(rollout_id, attempt, "a span")
    rows: list[dict[str, Any]] = []
    for record in spans:
        node = live.tree[record.span_id] = SpanNode(record.parent_span_id, tx.word_or_none(record.agent))
        rows.append({"attempt_pk": live.pk, "span": record.span_id, **node._asdict()})
    _check_number(len(live.tree), "spans", rollout_id)
    tx.replace(tables.spans, rows)


def _check_number(count: int, what: str, rollout_id: str) -> None:
    if count > MOST_REPORTED:
        raise StoreError(f"rollout {rollout_id!r} would have {count} {what}, more than {MOST_REPORTED}; report fewer")


_ADD = PreparedStatement(insert(tool_calls))
_is_attempt = tool_calls.c.attempt_pk == bindparam("of_attempt")
_is_id, _is_span = tool_calls.c.id == bindparam("of_id"), tool_calls.c.span == bindparam("of_span")
_is_pk = tool_calls.c.pk == bindparam("of_pk")
_STATUS_COLUMNS = ("status", "result", "error_type", "contradicted")
_stored = select(tool_calls).where(_is_attempt)
_STORED_BY_ID = PreparedStatement(_stored.where(_is_id, func.coalesce(~is_shown, True)).order_by(tool_calls.c.pk))
_STORED_BY_SPAN = PreparedStatement(_stored.where(_is_span))
_CHANGE = PreparedStatement(update(tool_calls).where(_is_pk), columns=_STATUS_COLUMNS)
_FILL = PreparedStatement(update(tool_calls).where(_is_pk), columns=("arguments", "result", "status"))
_DROP_SHOWN = PreparedStatement(delete(tool_calls).where(_is_attempt, _is_span))
