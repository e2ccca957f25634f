"""Rows to trajectories: the deciding attempt's calls with their rewards, its tool calls tied to the calls that
asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, select

from lightningrl.types import ToolCall, Trajectory, Transition
from lightningrl_server.store.columns import decode_output
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_server.store.participants import SpanNode, named_agent
from lightningrl_server.store.reader import OTHER_CALLS, PKS, Reader, chunks, decode_task, same_columns
from lightningrl_server.store.tables import attempts, calls, rollouts, scores, spans, tasks, tool_calls
from lightningrl_server.store.transaction import PreparedStatement

__all__ = ["read_trajectories"]

_CALLS = PreparedStatement(select(calls).where(calls.c.attempt_pk.in_(PKS)).order_by(calls.c.attempt_pk, calls.c.idx))
_TOOL_CALLS = PreparedStatement(
    select(tool_calls).where(tool_calls.c.attempt_pk.in_(PKS)).order_by(tool_calls.c.started_at, tool_calls.c.pk)
)
_SPANS = PreparedStatement(select(spans).where(spans.c.attempt_pk.in_(PKS)))
_HEADS = PreparedStatement(
    select(
        *(rollouts.c[name] for name in ("id", "group_id", "mode", "step", "branch")),
        tasks.c.body,
        *(attempts.c[name] for name in ("pk", "number", "outcome", "output", "error", "duration_s")),
        *(attempts.c[name] for name in ("left_threads", "results_refused")),
        scores.c.reward,
        scores.c.unrewarded,
    )
    .join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .outerjoin(attempts, (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding))
    .outerjoin(scores, scores.c.attempt_pk == attempts.c.pk)
    .where(rollouts.c.id.in_(bindparam("ids", expanding=True)))
)
_OF_HEAD = ("group_id", "mode", "step", "branch", "left_threads", "reward", "unrewarded", "duration_s")
"""Columns of these that are fields of a Trajectory."""


def read_trajectories(reader: Reader, db: Connection, rollout_ids: Sequence[str]) -> tuple[Trajectory, ...]:
    """Read them in the order asked. Raises UnknownRecord, or Conflict where no attempt has ended."""
    trajectories: dict[str, Trajectory] = {}
    for ids in chunks(list(dict.fromkeys(rollout_ids))):
        trajectories |= _read_some(reader, db, ids)
    return tuple(trajectories[rollout_id] for rollout_id in rollout_ids)


def _read_some(reader: Reader, db: Connection, rollout_ids: Sequence[str]) -> dict[str, Trajectory]:
    heads = {row.id: row for row in _HEADS.read(db, ids=rollout_ids)}
    for rollout_id in rollout_ids:
        if rollout_id not in heads:
            raise UnknownRecord(f"no rollout {rollout_id!r}; create it first")
        if heads[rollout_id].pk is None:
            raise Conflict(f"rollout {rollout_id!r} has no finished attempt yet; wait for it first")
    pks = [heads[rollout_id].pk for rollout_id in rollout_ids]
    call_rows, tool_rows, other_rows, span_rows = (
        _by_attempt(statement.read(db, pks=pks)) for statement in (_CALLS, _TOOL_CALLS, OTHER_CALLS, _SPANS)
    )
    terminal, turns = reader.computed(db, pks)
    reported, reported_of_calls = reader.reported(db, pks)
    digests, evidence = reader.digests(db, pks), reader.evidence(db, pks)
    trajectories = {}
    for rollout_id in rollout_ids:
        head = heads[rollout_id]
        tree = {row.span: SpanNode(row.parent, row.agent) for row in span_rows.get(head.pk, ())}
        rewards = turns.get(head.pk, {}), reported_of_calls.get(head.pk, {})
        transitions = reader.transitions(db, call_rows.get(head.pk, ()), tree, *rewards)
        trajectories[rollout_id] = Trajectory(
            rollout_id=rollout_id,
            attempt=head.number,
            task=decode_task(head.body),
            outcome=head.outcome,
            transitions=transitions,
            tool_calls=_tool_calls(reader, db, tool_rows.get(head.pk, ()), tree, transitions),
            other_calls=reader.other_calls(db, other_rows.get(head.pk, ())),
            results_refused=head.results_refused or 0,
            output=decode_output(head.output),
            error=head.error or None,
            rewards=terminal.get(head.pk, {}),
            reported=reported.get(head.pk, {}),
            digests=digests.get(head.pk, {}),
            evidence=evidence.get(head.pk),
            **{name: getattr(head, name) for name in _OF_HEAD},
        )
    return trajectories


def _by_attempt(rows: Sequence[Any]) -> dict[int, list[Any]]:
    grouped: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        grouped[row.attempt_pk].append(row)
    return grouped


def _tool_calls(
    reader: Reader, db: Connection, rows: Sequence[Any], tree: Mapping[str, SpanNode], transitions: Sequence[Transition]
) -> tuple[ToolCall, ...]:
    if not rows:
        return ()
    by_call = {tool_call_id: transition.id for transition in transitions for tool_call_id in transition.tool_call_ids}
    by_span = {transition.span_id: transition.id for transition in transitions if transition.span_id is not None}
    return tuple(
        ToolCall(
            **same_columns(row, ToolCall, but=("name", "transition_id", "agent")),
            name=reader.text(db, row.name),
            transition_id=row.transition_id or by_call.get(row.id) or by_span.get(row.parent_span or ""),
            agent=reader.word(db, row.agent if row.agent is not None else named_agent(tree, row.parent_span)),
        )
        for row in rows
    )
