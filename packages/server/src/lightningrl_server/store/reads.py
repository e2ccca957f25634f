"""The queries. A Reader is a cache of interned words and nothing else; any thread may use it with a connection of its own.

What is read before it is committed belongs in a Reader of its own (`Transaction.reader`): a rollback may give a word's number anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from sqlalchemy import BindParameter, ColumnElement, Connection, Row, bindparam, case, func, select

from lightningrl.records import (
    AttemptInfo,
    AttemptRecord,
    CallRecord,
    RolloutFilter,
    RolloutRecord,
    RunningAttempt,
    Score,
    StepRecord,
    StoreCounts,
)
from lightningrl.types import (
    Array,
    Evidence,
    OtherCall,
    Outcome,
    RolloutMode,
    RolloutSpec,
    RolloutState,
    SamplingSettings,
    Task,
)
from lightningrl_server.lru import LruCache
from lightningrl_server.store.codec import as_number, decode_advantages, decode_output, decode_sampling
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.prepared import PreparedStatement
from lightningrl_server.store.schema import (
    FORGOTTEN,
    advantages,
    attempts,
    calls,
    computed,
    digests,
    evidence,
    is_shown,
    meta,
    other_calls,
    rewards,
    rollouts,
    scores,
    steps,
    tasks,
    tool_calls,
    toolsets,
    trained,
    words,
)
from lightningrl_server.store.tokens import build_transition, prompts_and_completions

__all__ = ["OTHER_CALLS", "PKS", "STEP", "Reader", "chunks", "decode_task", "read_forgotten"]

_K = TypeVar("_K")
_Rewards = tuple[dict[int, dict[str, float | None]], dict[int, dict[int, dict[str, float | None]]]]
_IN_MOST = 500
_MOST_TOOLSETS = 256
"""In memory."""
_LONGEST_TOOLSET = 64 * 1024
"""Characters of one of these; longer ones are read each time."""
PKS: BindParameter[Any] = bindparam("pks", expanding=True)
"""Of attempts."""
STEP = case((rollouts.c.mode == RolloutMode.VALIDATION, rollouts.c.step), else_=func.coalesce(trained.c.step, rollouts.c.step + 1))
"""Of a rollout beside `trained`, as it is counted on screen: see `RolloutFilter.step`."""
OTHER_CALLS = PreparedStatement(
    select(other_calls).where(other_calls.c.attempt_pk.in_(PKS)).order_by(other_calls.c.started_at, other_calls.c.pk)
)
_DIGESTS, _EVIDENCE, _REWARDS, _COMPUTED = (
    PreparedStatement(select(table).where(table.c.attempt_pk.in_(PKS))) for table in (digests, evidence, rewards, computed)
)
_TOOLSET = select(toolsets.c.body).where(toolsets.c.pk == bindparam("pk"))
_WORD = select(words.c.text).where(words.c.pk == bindparam("pk"))
_PLACE = (
    select(rollouts.c.id, attempts.c.number).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk).where(attempts.c.pk == bindparam("pk"))
)
_task = msgspec.json.Decoder(Task)


def chunks(values: Sequence[_K]) -> Iterator[Sequence[_K]]:
    """A few hundred at a time, for IN (…)."""
    for start in range(0, len(values), _IN_MOST):
        yield values[start : start + _IN_MOST]


class Reader:
    """Everything that only reads."""

    def __init__(self) -> None:
        self._words = LruCache[int, str]()
        self._sampling = LruCache[int, SamplingSettings]()
        self._offered = LruCache[int, str](_MOST_TOOLSETS, _LONGEST_TOOLSET)

    def word(self, db: Connection, pk: int | None) -> str | None:
        if pk is None:
            return None
        known = self._words.get(pk)
        if known is None:
            known = str(db.execute(_WORD, {"pk": pk}).scalar_one())
            self._words.put(pk, known, len(known))
        return known

    def text(self, db: Connection, pk: int) -> str:
        return self.word(db, pk) or ""

    def sampling(self, db: Connection, row: Row[Any]) -> SamplingSettings:
        """Of a call's row."""
        known = self._sampling.get(row.sampling)
        if known is None:
            said = self.text(db, row.sampling)
            known = self._sampling.put(row.sampling, decode_sampling(said), len(said))
        return known if row.seed is None else replace(known, seed=int(row.seed))

    def offered(self, db: Connection, pk: int | None) -> str:
        """Of a call's toolset."""
        if pk is None:
            return ""
        known = self._offered.get(pk)
        if known is None:
            known = str(db.execute(_TOOLSET, {"pk": pk}).scalar_one())
            self._offered.put(pk, known, len(known))
        return known

    def calls(self, db: Connection, attempt_pk: int) -> tuple[CallRecord, ...]:
        """An attempt's calls as they were recorded, without rewards."""
        place = db.execute(_PLACE, {"pk": attempt_pk}).one()
        rows = db.execute(select(calls).where(calls.c.attempt_pk == attempt_pk).order_by(calls.c.idx)).all()
        tokens = prompts_and_completions(rows)
        return tuple(
            CallRecord(
                rollout_id=place.id,
                attempt=place.number,
                call_key=row.call_key,
                history_key=row.history_key,
                transition=build_transition(
                    row,
                    *tokens[row.idx],
                    policy=self.text(db, row.policy),
                    sampling=self.sampling(db, row),
                    agent=self.word(db, row.agent),
                    offered=self.offered(db, row.toolset),
                    parent_id=None if row.parent is None else rows[row.parent].id,
                    rewards={},
                    reported={},
                ),
            )
            for row in rows
        )

    def running(self, db: Connection, workers: str) -> tuple[RunningAttempt, ...]:
        running = select(rollouts.c.id, rollouts.c.timeout_s, attempts.c.number, attempts.c.worker_id).join(
            rollouts, rollouts.c.pk == attempts.c.rollout_pk
        )
        return tuple(
            RunningAttempt(rollout_id=row.id, attempt=row.number, worker_id=row.worker_id, timeout_s=row.timeout_s)
            for row in db.execute(running.where(attempts.c.outcome.is_(None)))
            if row.worker_id.startswith(workers)
        )

    def attempt_pk(self, db: Connection, rollout_id: str, attempt: int) -> int:
        row = db.execute(
            select(attempts.c.pk)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(rollouts.c.id == rollout_id, attempts.c.number == as_number(attempt))
        ).one_or_none()
        if row is None:
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {attempt}; attempts start with a lease")
        return int(row.pk)

    def attempt_calls(self, db: Connection, rollout_id: str, attempt: int) -> tuple[CallRecord, ...]:
        return self.calls(db, self.attempt_pk(db, rollout_id, attempt))

    def call_ids(self, db: Connection, rollout_id: str, attempt: int) -> frozenset[str]:
        return frozenset(db.execute(select(calls.c.id).where(calls.c.attempt_pk == self.attempt_pk(db, rollout_id, attempt))).scalars())

    def tool_call_ids(self, db: Connection, rollout_id: str, attempt: int) -> frozenset[str]:
        attempt_pk = self.attempt_pk(db, rollout_id, attempt)
        ids = select(tool_calls.c.id).where(tool_calls.c.attempt_pk == attempt_pk, func.coalesce(~is_shown, True))
        return frozenset(db.execute(ids).scalars())

    def attempt_other_calls(self, db: Connection, rollout_id: str, attempt: int) -> tuple[OtherCall, ...]:
        return self.other_calls(db, OTHER_CALLS.read(db, pks=[self.attempt_pk(db, rollout_id, attempt)]))

    def other_calls(self, db: Connection, rows: Sequence[Any]) -> tuple[OtherCall, ...]:
        return tuple(OtherCall(**_columns(row, OtherCall, but=("agent",)), agent=self.word(db, row.agent)) for row in rows)

    def attempt_key(self, db: Connection, rollout_id: str, attempt: int) -> tuple[bytes, Outcome | None, AttemptInfo] | None:
        """Digest of the scoped key, how the attempt ended, what the key stands for."""
        row = db.execute(
            select(
                attempts.c.key_digest,
                attempts.c.outcome,
                rollouts.c.mode,
                rollouts.c.step,
                rollouts.c.sampling,
                rollouts.c.timeout_s,
                rollouts.c.branch,
                select(func.count()).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("calls"),
            )
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(rollouts.c.id == rollout_id, attempts.c.number == as_number(attempt))
        ).one_or_none()
        if row is None:
            return None
        info = AttemptInfo(
            rollout_id=rollout_id,
            attempt=attempt,
            mode=row.mode,
            step=row.step,
            sampling=row.sampling,
            timeout_s=row.timeout_s,
            branch=row.branch,
            calls=row.calls,
        )
        return row.key_digest, row.outcome, info

    def finished(self, db: Connection, rollout_ids: Sequence[str]) -> set[str]:
        """Those that succeeded or failed. Raises UnknownRecord."""
        states: dict[str, RolloutState] = {}
        for ids in chunks(rollout_ids):
            states |= {row.id: row.state for row in db.execute(select(rollouts.c.id, rollouts.c.state).where(rollouts.c.id.in_(ids)))}
        for rollout_id in rollout_ids:
            if rollout_id not in states:
                raise UnknownRecord(f"no rollout {rollout_id!r} to wait for; create it first")
        return {rollout_id for rollout_id, state in states.items() if state in (RolloutState.SUCCEEDED, RolloutState.FAILED)}

    def scores(self, db: Connection, rollout_ids: Sequence[str]) -> tuple[Score, ...]:
        found: dict[str, Score] = {}
        for ids in chunks(rollout_ids):
            rows = db.execute(
                select(rollouts.c.id, attempts.c.pk, attempts.c.number, scores.c.reward, scores.c.unrewarded)
                .join(attempts, (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding))
                .outerjoin(scores, scores.c.attempt_pk == attempts.c.pk)
                .where(rollouts.c.id.in_(ids))
            ).all()
            pks = [row.pk for row in rows]
            terminal, turns = self.computed(db, pks)
            computed_by, found_by_score = self.digests(db, pks), self.evidence(db, pks)
            lengths: dict[tuple[int, int], tuple[str, int]] = {
                (call.attempt_pk, call.idx): (call.id, call.bytes // 4)
                for call in db.execute(
                    select(calls.c.attempt_pk, calls.c.idx, calls.c.id, func.length(calls.c.logprobs).label("bytes")).where(
                        calls.c.attempt_pk.in_(pks)
                    )
                )
            }
            credit: dict[int, dict[str, Array | None]] = defaultdict(dict)
            for one in db.execute(select(advantages).where(advantages.c.attempt_pk.in_(pks)).order_by(advantages.c.idx)):
                transition_id, length = lengths[one.attempt_pk, one.idx]
                credit[one.attempt_pk][transition_id] = None if one.data is None else decode_advantages(one.data, length)
            for row in rows:
                found[row.id] = Score(
                    rollout_id=row.id,
                    attempt=row.number,
                    rewards=terminal.get(row.pk, {}),
                    reward=row.reward,
                    unrewarded=row.unrewarded,
                    digests=computed_by.get(row.pk, {}),
                    evidence=found_by_score.get(row.pk),
                    transition_rewards={lengths[row.pk, idx][0]: values for idx, values in turns.get(row.pk, {}).items()},
                    advantages=credit.get(row.pk, {}),
                )
        return tuple(found[rollout_id] for rollout_id in rollout_ids if rollout_id in found)

    def reported(self, db: Connection, attempt_pks: Sequence[int]) -> _Rewards:
        """Reports of agents, of each attempt, and of its calls by index."""
        return self._rewards(_REWARDS.read(db, pks=attempt_pks), db)

    def computed(self, db: Connection, attempt_pks: Sequence[int]) -> _Rewards:
        """Scores of the run's rewards, of each attempt, and of its calls by index."""
        return self._rewards(_COMPUTED.read(db, pks=attempt_pks), db)

    def _rewards(self, rows: Sequence[Any], db: Connection) -> _Rewards:
        terminal: dict[int, dict[str, float | None]] = defaultdict(dict)
        turns: dict[int, dict[int, dict[str, float | None]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            by_name = terminal[row.attempt_pk] if row.idx < 0 else turns[row.attempt_pk][row.idx]
            by_name[self.text(db, row.name)] = row.value
        return terminal, turns

    def evidence(self, db: Connection, attempt_pks: Sequence[int]) -> dict[int, Evidence]:
        return {row.attempt_pk: row.data for row in _EVIDENCE.read(db, pks=attempt_pks)}

    def digests(self, db: Connection, attempt_pks: Sequence[int]) -> dict[int, dict[str, str]]:
        """Of each attempt, by the recipe's key."""
        found: dict[int, dict[str, str]] = defaultdict(dict)
        for row in _DIGESTS.read(db, pks=attempt_pks):
            found[row.attempt_pk][self.text(db, row.part)] = self.text(db, row.digest)
        return found

    def steps(self, db: Connection) -> tuple[StepRecord, ...]:
        ids: dict[int, list[str]] = defaultdict(list)
        for row in db.execute(
            select(trained.c.step, rollouts.c.id).join(rollouts, rollouts.c.pk == trained.c.rollout_pk).order_by(rollouts.c.pk)
        ):
            ids[row.step].append(row.id)
        last, _ = read_forgotten(db)
        return tuple(
            StepRecord(step=row.step, rollout_ids=tuple(ids[row.step]), metrics=row.metrics, at=row.at, is_forgotten=row.step <= last)
            for row in db.execute(select(steps).order_by(steps.c.step))
        )

    def rollout(self, db: Connection, rollout_id: str) -> RolloutRecord:
        found = self._rollouts(db, [rollouts.c.id == rollout_id], 1, 0)
        if not found:
            raise UnknownRecord(f"no rollout {rollout_id!r}; {self._near(db, rollout_id)}")
        return found[0]

    def _near(self, db: Connection, rollout_id: str) -> str:
        """Names beside one that does not exist, in their order."""
        ids = rollouts.c.id
        below = db.execute(select(ids).where(ids < rollout_id).order_by(ids.desc()).limit(2)).scalars().all()
        above = db.execute(select(ids).where(ids > rollout_id).order_by(ids).limit(2)).scalars().all()
        near = ", ".join(map(repr, (*reversed(below), *above)))
        return f"near it are {near}" if near else "there is none yet"

    def list_rollouts(self, db: Connection, where: RolloutFilter = RolloutFilter()) -> tuple[RolloutRecord, ...]:  # noqa: B008
        wanted = {
            rollouts.c.state: where.state,
            rollouts.c.outcome: where.outcome,
            rollouts.c.mode: where.mode,
            STEP: where.step,
            rollouts.c.group_id: where.group_id,
            tasks.c.task_id: where.task_id,
        }
        return self._rollouts(db, [column == value for column, value in wanted.items() if value is not None], where.limit, where.offset)

    def _rollouts(self, db: Connection, where: list[ColumnElement[bool]], limit: int, offset: int) -> tuple[RolloutRecord, ...]:
        deciding = attempts.alias("deciding")
        rows = db.execute(
            select(rollouts, tasks.c.body, trained.c.step.label("trained_step"), scores.c.reward)
            .join(tasks, tasks.c.pk == rollouts.c.task_pk)
            .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
            .outerjoin(deciding, (deciding.c.rollout_pk == rollouts.c.pk) & (deciding.c.number == rollouts.c.deciding))
            .outerjoin(scores, scores.c.attempt_pk == deciding.c.pk)
            .where(*where)
            .order_by(rollouts.c.pk.desc())
            .limit(limit)
            .offset(offset)
        ).all()
        tries: dict[int, list[AttemptRecord]] = defaultdict(list)
        count = select(func.count()).select_from(calls).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("calls")
        for pks in chunks([row.pk for row in rows]):
            for one in db.execute(select(attempts, count).where(attempts.c.rollout_pk.in_(pks)).order_by(attempts.c.number)):
                tries[one.rollout_pk].append(_attempt_record(one))
        return tuple(
            RolloutRecord(
                spec=_spec(row),
                state=row.state,
                outcome=row.outcome,
                attempts=tuple(tries[row.pk]),
                reward=row.reward,
                trained_step=row.trained_step,
                created_at=row.created_at,
            )
            for row in rows
        )

    def counts(self, db: Connection, late: int) -> StoreCounts:
        states = db.execute(select(rollouts.c.state, func.count()).group_by(rollouts.c.state)).all()
        outcomes = db.execute(
            select(rollouts.c.outcome, func.count()).where(rollouts.c.outcome.is_not(None)).group_by(rollouts.c.outcome)
        ).all()
        total, breaks = db.execute(select(func.count(), func.count().filter(calls.c.is_break)).select_from(calls)).one()
        return StoreCounts(
            states=dict(states),
            outcomes=dict(outcomes),
            attempts=db.execute(select(func.count()).select_from(attempts)).scalar_one(),
            calls=total,
            breaks=breaks,
            late=late,
        )


def read_forgotten(db: Connection) -> tuple[int, int]:
    """The last step whose rollouts were deleted, and how many rollouts were."""
    value = db.execute(select(meta.c.value).where(meta.c.key == FORGOTTEN)).scalar()
    if value is None:
        return -1, 0
    step, count = value.split()
    return int(step), int(count)


def _spec(row: Any) -> RolloutSpec:
    return RolloutSpec(task=decode_task(row.body), **_columns(row, RolloutSpec, but=("task",)))


def _attempt_record(row: Any) -> AttemptRecord:
    return AttemptRecord(
        attempt=row.number,
        output=decode_output(row.output),
        error=row.error or None,
        **_columns(row, AttemptRecord, but=("attempt", "output", "error")),
    )


def _columns(row: Any, kind: type[Any], but: Sequence[str]) -> dict[str, Any]:
    """Fields of a record that are columns of the row."""
    return {name: getattr(row, name) for name in kind.__slots__ if name not in but}


def decode_task(body: str) -> Task:
    return _task.decode(body)
