"""The ledger: the trainer's scores of finished attempts, and which step trained them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, Integer, and_, bindparam, delete, func, insert, or_, select

from lightningrl.records import Score, StepRecord
from lightningrl.types import Array, OtherCallKind, RolloutMode, RolloutState
from lightningrl_server.store import tables
from lightningrl_server.store.call_log import add_other_calls, call_index, call_indices, check_finite, reward_rows
from lightningrl_server.store.columns import decode_advantages, encode_advantages
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_server.store.reader import Reader, chunks, read_forgotten, same_columns
from lightningrl_server.store.tables import (
    FORGOTTEN,
    advantages,
    attempts,
    calls,
    meta,
    other_calls,
    rollouts,
    steps,
    trained,
)
from lightningrl_server.store.transaction import WITH_ROLLOUT, PreparedStatement, Transaction
from lightningrl_server.store.writer import StorePart, reading, writing

__all__ = ["SqlLedger"]

_AT_ONCE = 100
"""Rollouts that no step trained, forgotten in one commit: others wait for it."""


# ------------------------------------------------------------------ writes


def _set_scores(tx: Transaction, scores: Sequence[Score]) -> None:
    # One statement for each table, whatever the number of scores.
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    parts = chunks(tuple(dict.fromkeys(score.rollout_id for score in scores)))
    attempt_rows = (row for ids in parts for row in tx.db.execute(WITH_ROLLOUT.where(rollouts.c.id.in_(ids))))
    attempts_ = {(row.rollout_id, row.number): row for row in attempt_rows}
    places = [(score.rollout_id, score.attempt) for score in scores if score.transition_rewards or score.advantages]
    indices_of = call_indices(tx, [attempts_[place].pk for place in places if place in attempts_])
    for score in scores:
        place = score.rollout_id, score.attempt
        row = attempts_.get(place) or tx.attempt(*place)  # which says what is wrong
        if row.outcome is None:
            raise Conflict(
                f"attempt {score.attempt} of rollout {score.rollout_id!r} still runs; score it when it has ended"
            )
        indices = indices_of[row.pk]
        values: dict[str | None, Mapping[str, float | None]] = {None: score.rewards}
        values.update(score.transition_rewards)
        rows["computed"] += reward_rows(tx, row.pk, score.rollout_id, indices, values)
        for part, digest in score.digests.items():
            rows["digests"].append({"attempt_pk": row.pk, "part": tx.word(part), "digest": tx.word(digest)})
        if score.evidence is not None:
            rows["evidence"].append({"attempt_pk": row.pk, "data": score.evidence})
        if score.asked:
            is_judged = (other_calls.c.attempt_pk == row.pk) & (other_calls.c.kind == OtherCallKind.JUDGE)
            starts = set(tx.db.execute(select(other_calls.c.started_at).where(is_judged)).scalars())
            add_other_calls(tx, row.pk, [call for call in score.asked if call.started_at not in starts])
        total = check_finite(score.reward, "reward", score.rollout_id)
        rows["scores"].append({"attempt_pk": row.pk, "reward": total, "unrewarded": score.unrewarded})
        for transition_id, credit in score.advantages.items():
            index = call_index(indices, transition_id, score.rollout_id)
            data = None if credit is None else encode_advantages(credit)
            rows["advantages"].append({"attempt_pk": row.pk, "idx": index, "data": data})
    for name, table_rows in rows.items():
        tx.replace(getattr(tables, name), table_rows)


def _mark_trained(tx: Transaction, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
    wanted = tuple(rollout_ids)
    if len(set(wanted)) != len(wanted):
        raise Conflict(f"step {step} names a rollout twice; a rollout is trained once")
    pks: dict[str, int] = {}
    for ids in chunks(wanted):
        rows = tx.db.execute(select(rollouts.c.id, rollouts.c.pk).where(rollouts.c.id.in_(ids)))
        pks |= {row.id: row.pk for row in rows}
    for rollout_id in wanted:
        if rollout_id not in pks:
            raise UnknownRecord(f"step {step} trains rollout {rollout_id!r}, which does not exist; create it first")
    if tx.db.execute(select(steps.c.step).where(steps.c.step == step)).scalar() is not None:
        before = set(tx.db.execute(select(trained.c.rollout_pk).where(trained.c.step == step)).scalars())
        if before == set(pks.values()):
            return
        raise Conflict(
            f"step {step} is already recorded with other rollouts; roll back to step {step - 1} to train it again"
        )
    names = {pk: rollout_id for rollout_id, pk in pks.items()}
    for some in chunks(tuple(names)):
        taken = tx.db.execute(select(trained).where(trained.c.rollout_pk.in_(some)).limit(1)).one_or_none()
        if taken is not None:
            name = names[taken.rollout_pk]
            raise Conflict(f"rollout {name!r} was trained in step {taken.step}; a rollout is trained once")
    tx.db.execute(insert(steps).values(step=step, metrics=dict(metrics), at=tx.now))
    if pks:
        tx.run_many(_TRAIN, [{"rollout_pk": pks[rollout_id], "step": step} for rollout_id in wanted])


def _rollback_steps(tx: Transaction, after: int) -> int:
    tx.db.execute(delete(trained).where(trained.c.step > after))
    return tx.db.execute(delete(steps).where(steps.c.step > after)).rowcount


def _forget_some(tx: Transaction, through: int, slack: int) -> int:
    """Delete some of the rollouts that `forget_rollouts` deletes, a step's all at once; 0 = none is left."""
    last, count = read_forgotten(tx.db)
    oldest = tx.db.execute(select(func.min(trained.c.step)).where(trained.c.step <= through)).scalar()
    if oldest is not None:
        last = max(last, oldest)
        pks = list(tx.db.execute(select(trained.c.rollout_pk).where(trained.c.step == oldest)).scalars())
    else:
        pks = list(tx.db.execute(_PLANNED_THROUGH, {"through": through, "slack": slack}).scalars())
    if not pks:
        return 0
    attempt_pks: list[int] = []
    for some in chunks(pks):
        attempt_pks += tx.db.execute(select(attempts.c.pk).where(attempts.c.rollout_pk.in_(some))).scalars()
    columns = [(table.c.attempt_pk, attempt_pks) for table in _OF_ATTEMPTS]
    columns += [(column, pks) for column in (attempts.c.rollout_pk, trained.c.rollout_pk, rollouts.c.pk)]
    for column, gone in columns:
        for some in chunks(gone):
            tx.db.execute(delete(column.table).where(column.in_(some)))
    tx.replace(meta, [{"key": FORGOTTEN, "value": f"{last} {count + len(pks)}"}])
    return len(pks)


# ------------------------------------------------------------------ reads


def _read_scores(reader: Reader, db: Connection, rollout_ids: Sequence[str]) -> tuple[Score, ...]:
    scores: dict[str, Score] = {}
    for ids in chunks(rollout_ids):
        rows = db.execute(_SCORES.where(rollouts.c.id.in_(ids))).all()
        pks = [row.pk for row in rows]
        terminal, turns = reader.computed(db, pks)
        digests, evidence = reader.digests(db, pks), reader.evidence(db, pks)
        size = func.length(calls.c.logprobs).label("bytes")
        of_calls = select(calls.c.attempt_pk, calls.c.idx, calls.c.id, size).where(calls.c.attempt_pk.in_(pks))
        lengths = {(call.attempt_pk, call.idx): (call.id, call.bytes // 4) for call in db.execute(of_calls)}
        credit: dict[int, dict[str, Array | None]] = defaultdict(dict)
        credited = select(advantages).where(advantages.c.attempt_pk.in_(pks)).order_by(advantages.c.idx)
        for row in db.execute(credited):
            transition_id, length = lengths[row.attempt_pk, row.idx]
            credit[row.attempt_pk][transition_id] = row.data and decode_advantages(row.data, length)
        for row in rows:
            of_turns = turns.get(row.pk, {})
            scores[row.id] = Score(
                rollout_id=row.id,
                attempt=row.number,
                rewards=terminal.get(row.pk, {}),
                reward=row.reward,
                unrewarded=row.unrewarded,
                digests=digests.get(row.pk, {}),
                evidence=evidence.get(row.pk),
                transition_rewards={lengths[row.pk, idx][0]: values for idx, values in of_turns.items()},
                advantages=credit.get(row.pk, {}),
            )
    return tuple(scores[rollout_id] for rollout_id in rollout_ids if rollout_id in scores)


def _read_steps(_: Reader, db: Connection) -> tuple[StepRecord, ...]:
    ids: dict[int, list[str]] = defaultdict(list)
    for row in db.execute(_TRAINED):
        ids[row.step].append(row.id)
    last, _count = read_forgotten(db)
    return tuple(
        StepRecord(
            rollout_ids=tuple(ids[row.step]),
            is_forgotten=row.step <= last,
            **same_columns(row, StepRecord, but=("rollout_ids", "is_forgotten")),
        )
        for row in db.execute(select(steps).order_by(steps.c.step))
    )


class SqlLedger(StorePart):
    """`lightningrl_server.store.protocol.Ledger`, and what `Look` reads of it."""

    set_scores = writing(_set_scores)
    scores = reading(_read_scores)
    mark_trained = writing(_mark_trained)
    rollback_steps = writing(_rollback_steps)
    steps = reading(_read_steps)

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        count = 0
        while gone := await self._write(lambda tx: _forget_some(tx, through, slack)):  # others write between
            count += gone
        return count


_has_ended = rollouts.c.state.not_in((RolloutState.QUEUED, RolloutState.RUNNING))
_through: BindParameter[int] = bindparam("through")
_slack: BindParameter[int] = bindparam("slack", type_=Integer)
# a validation's `step` is that of its weights; a training rollout's is one less than that of the step which takes it
_is_planned = or_(
    and_(rollouts.c.mode == RolloutMode.VALIDATION, rollouts.c.step <= _through),
    and_(rollouts.c.mode != RolloutMode.VALIDATION, rollouts.c.step < _through - _slack),
)
_PLANNED_THROUGH = (
    select(rollouts.c.pk)
    .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .where(trained.c.step.is_(None), _has_ended, _is_planned)
    .limit(_AT_ONCE)
)
_OF_ATTEMPTS = tuple(table for table in tables.metadata.sorted_tables if "attempt_pk" in table.c)
_TRAIN = PreparedStatement(insert(trained))
_TRAINED = (
    select(trained.c.step, rollouts.c.id).join(rollouts, rollouts.c.pk == trained.c.rollout_pk).order_by(rollouts.c.pk)
)
_SCORES = (
    select(rollouts.c.id, attempts.c.pk, attempts.c.number, tables.scores.c.reward, tables.scores.c.unrewarded)
    .join(attempts, (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding))
    .outerjoin(tables.scores, tables.scores.c.attempt_pk == attempts.c.pk)
)
