"""Looking at a store: rollouts as they stand, totals, and rows to trajectories: the deciding attempt's calls with their
rewards, its tool calls tied to the calls that asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, func, select

from lightningrl.records import AttemptRecord, RolloutFilter, RolloutRecord, StoreCounts
from lightningrl.types import RolloutSpec, ToolCall, Trajectory, Transition
from lightningrl_server.store.columns import decode_output
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_server.store.participants import SpanNode, named_agent
from lightningrl_server.store.reader import OTHER_CALLS, PKS, STEP, Reader, chunks, decode_task, same_columns
from lightningrl_server.store.tables import attempts, calls, rollouts, scores, spans, tasks, tool_calls, trained
from lightningrl_server.store.transaction import PreparedStatement
from lightningrl_server.store.writer import StorePart, reading

__all__ = ["SqlLook", "read_trajectories"]

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


def _read_rollout(_: Reader, db: Connection, rollout_id: str) -> RolloutRecord:
    records = _read_rollouts(db, [rollouts.c.id == rollout_id], 1, 0)
    if not records:
        raise UnknownRecord(f"no rollout {rollout_id!r}; {_near(db, rollout_id)}")
    return records[0]


def _near(db: Connection, rollout_id: str) -> str:
    """Name rollouts beside one that does not exist, in their order."""
    ids = rollouts.c.id
    below = db.execute(select(ids).where(ids < rollout_id).order_by(ids.desc()).limit(2)).scalars().all()
    above = db.execute(select(ids).where(ids > rollout_id).order_by(ids).limit(2)).scalars().all()
    near = ", ".join(map(repr, (*reversed(below), *above)))
    return f"near it are {near}" if near else "there is none yet"


def _list_rollouts(
    _: Reader,
    db: Connection,
    where: RolloutFilter = RolloutFilter(),  # noqa: B008
) -> tuple[RolloutRecord, ...]:
    wanted = {
        rollouts.c.state: where.state,
        rollouts.c.outcome: where.outcome,
        rollouts.c.mode: where.mode,
        STEP: where.step,
        rollouts.c.group_id: where.group_id,
        tasks.c.task_id: where.task_id,
    }
    conditions = [column == value for column, value in wanted.items() if value is not None]
    return _read_rollouts(db, conditions, where.limit, where.offset)


def _read_rollouts(
    db: Connection, where: Sequence[ColumnElement[bool]], limit: int, offset: int
) -> tuple[RolloutRecord, ...]:
    rows = db.execute(_ROLLOUTS.where(*where).order_by(rollouts.c.pk.desc()).limit(limit).offset(offset)).all()
    tries: dict[int, list[AttemptRecord]] = defaultdict(list)
    for pks in chunks([row.pk for row in rows]):
        for row in db.execute(_TRIES.where(attempts.c.rollout_pk.in_(pks)).order_by(attempts.c.number)):
            own = {"attempt": row.number, "output": decode_output(row.output), "error": row.error or None}
            tries[row.rollout_pk].append(AttemptRecord(**same_columns(row, AttemptRecord, but=own), **own))
    return tuple(
        RolloutRecord(
            spec=RolloutSpec(task=decode_task(row.body), **same_columns(row, RolloutSpec, but=("task",))),
            attempts=tuple(tries[row.pk]),
            **same_columns(row, RolloutRecord, but=("spec", "attempts")),
        )
        for row in rows
    )


def _read_counts(db: Connection, late: int) -> StoreCounts:
    state, outcome = rollouts.c.state, rollouts.c.outcome
    states = db.execute(select(state, func.count()).group_by(state)).all()
    outcomes = db.execute(select(outcome, func.count()).where(outcome.is_not(None)).group_by(outcome)).all()
    total, breaks = db.execute(select(func.count(), func.count().filter(calls.c.is_break)).select_from(calls)).one()
    return StoreCounts(
        states=dict(states),
        outcomes=dict(outcomes),
        attempts=db.execute(select(func.count()).select_from(attempts)).scalar_one(),
        calls=total,
        breaks=breaks,
        late=late,
    )


class SqlLook(StorePart):
    """`lightningrl_server.store.protocol.Look`, but for what call log and ledger read."""

    rollout = reading(_read_rollout)
    list_rollouts = reading(_list_rollouts)
    trajectories = reading(read_trajectories)

    async def counts(self) -> StoreCounts:
        return await self.read(lambda db: _read_counts(db, self._late))


_deciding = attempts.alias("deciding")
_ROLLOUTS = (
    select(rollouts, tasks.c.body, trained.c.step.label("trained_step"), scores.c.reward)
    .join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .outerjoin(_deciding, (_deciding.c.rollout_pk == rollouts.c.pk) & (_deciding.c.number == rollouts.c.deciding))
    .outerjoin(scores, scores.c.attempt_pk == _deciding.c.pk)
)
_count = select(func.count()).select_from(calls).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery()
_TRIES = select(attempts, _count.label("calls"))
