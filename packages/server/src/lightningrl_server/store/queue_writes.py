"""Writes of the queue: rollouts that are ordered, leased, ended, cancelled. Plain functions of a transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, text, update

from lightningrl.errors import StoreError
from lightningrl.records import DIVERGED_CODE
from lightningrl.sanitize import clean_text
from lightningrl.types import BranchPoint, FinishReason, Outcome, RolloutSpec, RolloutState
from lightningrl_server.records import AttemptEnd
from lightningrl_server.store import call_log
from lightningrl_server.store.columns import encode_json
from lightningrl_server.store.databases import EndEvent, LeaseEvent, QueueEvent
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.protocol import RETRYABLE
from lightningrl_server.store.reader import chunks
from lightningrl_server.store.tables import attempts, calls, other_calls, rewards, rollouts, spans, tasks, tool_calls
from lightningrl_server.store.tool_calls import append_spans, append_tool_calls
from lightningrl_server.store.transaction import WITH_ROLLOUT, PreparedStatement, Transaction, over

__all__ = ["cancel", "create_rollouts", "expire", "finish", "heartbeat", "interrupt", "lease", "release", "retry"]

OUTPUT_LIMIT = 16 * 2**20
"""Bytes of JSON that an agent may return."""
MOST_FORGIVEN = 10
"""Tries of one rollout that are not charged: what ends its worker each time would else be tried for ever."""
ERROR_LIMIT = 100_000
"""Characters of an agent's error; the rest is cut off."""


def create_rollouts(tx: Transaction, specs: Sequence[RolloutSpec]) -> int:
    existing: dict[str, Any] = {}
    for ids in chunks([spec.id for spec in specs]):
        existing |= {row.id: row for row in tx.db.execute(select(rollouts).where(rollouts.c.id.in_(ids)))}
    new: list[dict[str, Any]] = []
    task_pks: dict[str, int] = {}
    for spec in specs:
        row: dict[str, Any] = {"task_pk": _task(tx, spec, task_pks)}
        row |= {name: getattr(spec, name) for name in ("id", "group_id", "mode", "step", "sampling", "branch")}
        before = existing.get(spec.id)
        if before is not None:
            _check_same(before, row, spec.id)
            continue
        if spec.branch is not None:
            _check_branch(tx, spec.id, spec.branch)
        existing[spec.id] = SimpleNamespace(**row)
        limits = {"max_attempts": spec.max_attempts, "timeout_s": spec.timeout_s}
        new.append(row | limits | {"state": RolloutState.QUEUED, "created_at": tx.now})
    tx.run_many(_CREATE, new)
    if new:
        tx.add_event(QueueEvent())
    return len(new)


def _check_same(before: Any, row: Mapping[str, Any], rollout_id: str) -> None:
    for name, value in row.items():
        if getattr(before, name) != value:
            what = "task" if name == "task_pk" else name
            raise Conflict(
                f"rollout id {rollout_id!r} is already used with another {what}; choose a new id for another rollout"
            )


def _check_branch(tx: Transaction, rollout_id: str, point: BranchPoint) -> None:
    source = tx.attempt(point.rollout_id, point.attempt)
    made = tx.db.execute(_count_calls(source.pk)).scalar_one()
    where = f"rollout {rollout_id!r} is to branch from {point.rollout_id!r} after {point.calls} calls"
    if source.outcome is None:
        raise Conflict(f"{where}, and attempt {point.attempt} of that still runs; wait for its end")
    if not 0 <= point.calls <= made:
        raise Conflict(f"{where}, and attempt {point.attempt} of that has {made}; branch after 0 to {made}")
    is_next = (calls.c.attempt_pk == source.pk) & (calls.c.idx == point.calls)
    next_key = tx.db.execute(select(calls.c.call_key).where(is_next)).scalar()
    if next_key is not None and "#" in next_key:
        raise Conflict(f"{where}, which is between the choices of one call; branch before or after it")


def _count_calls(attempt_pk: int) -> Any:
    return select(func.count()).select_from(calls).where(calls.c.attempt_pk == attempt_pk)


def _task(tx: Transaction, spec: RolloutSpec, pks: dict[str, int]) -> int:
    """Look up or store the task; returns its key. `pks`: this request's tasks' keys by JSON; a group shares one."""
    body = encode_json(spec.task, f"task {spec.task.id!r} of rollout {spec.id!r}")
    if body not in pks:
        digest = hashlib.blake2b(body.encode(), digest_size=16).digest()
        rows = tx.rows(_FIND_TASK, of_digest=digest)
        if not rows:
            tx.run(_ADD_TASK, digest=digest, task_id=spec.task.id, body=body)
            rows = tx.rows(_FIND_TASK, of_digest=digest)
        pks[body] = rows[0].pk
    return pks[body]


def lease(tx: Transaction, worker_id: str, digest: bytes, lease_s: float, now: float, *, exclusive: bool) -> Any:
    """Start an attempt of the oldest queued rollout; returns the rollout's row with `number`, its new attempt's. None =
    nothing is queued. `now`: by the clock of leases, here and in `heartbeat` and `expire`."""
    _end_expired(tx, now)
    if exclusive:
        held = tx.rows(_RUNNING_AT, of_worker=worker_id)
        _interrupt(tx, held, f"worker {worker_id!r} asked for other work, so it does not run this attempt")
    rows = tx.rows(_OLDEST)
    if not rows:
        return None
    row, expires_at = rows[0], now + lease_s
    of_worker = {"worker_id": worker_id, "key_digest": digest, "expires_at": expires_at, "started_at": tx.now}
    tx.run(_START_ATTEMPT, rollout_pk=row.pk, number=row.number, **of_worker)
    tx.run(_START_ROLLOUT, of_pk=row.pk, state=RolloutState.RUNNING, started=row.number)
    tx.add_event(LeaseEvent(expires_at))
    return row


def release(tx: Transaction, rollout_id: str, attempt: int) -> None:
    row = tx.attempt(rollout_id, attempt)
    if row.outcome is not None or tx.db.execute(_count_calls(row.pk)).scalar_one():
        return
    for table in (tool_calls, other_calls, spans, rewards):
        tx.db.execute(delete(table).where(table.c.attempt_pk == row.pk))
    tx.db.execute(delete(attempts).where(attempts.c.pk == row.pk))
    before = {"state": RolloutState.QUEUED, "started": attempt - 1}
    tx.db.execute(update(rollouts).where(rollouts.c.pk == row.rollout_pk).values(before))
    tx.forget(rollout_id, attempt)
    tx.add_event(EndEvent(rollout_id, attempt, RolloutState.QUEUED))
    tx.add_event(QueueEvent())


def heartbeat(
    tx: Transaction, rollout_id: str, attempt: int, lease_s: float, now: float, worker_id: str | None
) -> bool:
    row = tx.attempt(rollout_id, attempt)
    if row.outcome is not None or (worker_id is not None and row.worker_id.partition("/")[0] != worker_id):
        return False
    tx.run(_KEEP_LEASE, of_pk=row.pk, expires_at=now + lease_s)
    tx.add_event(LeaseEvent(now + lease_s))
    return True


def expire(tx: Transaction, now: float) -> float | None:
    """End attempts whose lease is over; returns when the next one will be."""
    _end_expired(tx, now)
    soonest = tx.db.execute(select(func.min(attempts.c.expires_at)).where(attempts.c.outcome.is_(None))).scalar()
    return None if soonest is None else float(soonest)


def _end_expired(tx: Transaction, now: float) -> None:
    for row in tx.rows(_EXPIRED, now=now):
        error = f"lease expired: worker {row.worker_id!r} sent no heartbeat in time"
        again = row.number < row.max_attempts + row.forgiven
        _end(tx, row, Outcome.INFRASTRUCTURE_ERROR, again=again, error=error)


def interrupt(tx: Transaction, reason: str, workers: str = "") -> int:
    """End the running attempts of workers whose id begins with `workers`; returns how many."""
    rows = [row for row in tx.rows(_RUNNING) if row.worker_id.startswith(workers)]
    _interrupt(tx, rows, reason)
    return len(rows)


def _interrupt(tx: Transaction, rows: Sequence[Any], reason: str) -> None:
    """End attempts without charging them, the first `MOST_FORGIVEN` times of a rollout."""
    # max_attempts = 2. Attempt 1 is interrupted: forgiven = 1, so 1 + 2 attempts may be made. Attempt 2 fails:
    # 2 < 2 + 1, attempt 3 is queued. It fails: 3 < 2 + 1 does not hold, the rollout is over after two failures.
    for row in rows:
        forgive = row.forgiven < MOST_FORGIVEN
        again = forgive or row.number < row.max_attempts + row.forgiven
        _end(tx, row, Outcome.INFRASTRUCTURE_ERROR, again=again, forgive=forgive, error=reason)


def finish(
    tx: Transaction, rollout_id: str, attempt: int, end: AttemptEnd
) -> tuple[RolloutState, bool, AttemptOver | None]:
    """End an attempt. Returns the rollout's state; True if the attempt ended with this, False if this repeats its
    result; and, where the attempt ended otherwise, the refusal, which is counted."""
    row = tx.attempt(rollout_id, attempt)
    if row.outcome is not None:
        return _finish_again(tx, row, end)
    body = encode_json(end.output, f"the output of rollout {rollout_id!r}")
    if len(body) > OUTPUT_LIMIT:
        raise StoreError(
            f"the output of rollout {rollout_id!r} has {len(body)} bytes of JSON, more than {OUTPUT_LIMIT}; return less"
        )
    if end.tool_calls:
        append_tool_calls(tx, rollout_id, attempt, end.tool_calls)
    if end.spans:
        append_spans(tx, rollout_id, attempt, end.spans)
    if end.other_calls:
        call_log.add_other_calls(tx, row.pk, end.other_calls)
    if end.rewards:
        indices = call_log.call_indices(tx, [row.pk])[row.pk]
        tx.replace(rewards, call_log.reward_rows(tx, row.pk, rollout_id, indices, end.rewards))
    for key in end.untrained:
        tx.run(_LEAVE_OUT, of_pk=row.pk, key=key)
    outcome, error = end.outcome, end.error
    may_diverge = row.branch is not None and outcome in (Outcome.SUCCEEDED, Outcome.AGENT_ERROR)
    if may_diverge and (why := _divergence(tx, row)):
        outcome, error = Outcome.DIVERGED, why
    again = outcome in RETRYABLE and end.may_go_again and attempt < row.max_attempts + row.forgiven
    state = _end(
        tx,
        row,
        outcome,
        again=again,
        output=None if end.output is None else body,
        error=None if error is None else error[:ERROR_LIMIT],
        duration_s=end.duration_s,
        left_threads=tuple(map(clean_text, end.left_threads)),
    )
    return state, True, None


def _end(
    tx: Transaction, row: Any, outcome: Outcome, *, again: bool, forgive: bool = False, **values: Any
) -> RolloutState:
    """End the running attempt of `row`; its rollout succeeds, fails, or is queued `again`. `forgive`: uncharged."""
    no_result = {"output": None, "error": None, "duration_s": 0.0, "left_threads": ()}
    participants = tx.take_live(row).columns()
    tx.run(_END_ATTEMPT, of_pk=row.pk, **{"outcome": outcome, "ended_at": tx.now, **no_result, **values})
    state = RolloutState.SUCCEEDED if outcome is Outcome.SUCCEEDED else RolloutState.FAILED
    state = RolloutState.QUEUED if again else state
    after = {"state": state, "outcome": None if again else outcome, "deciding": row.number, "more": int(forgive)}
    tx.run(_END_ROLLOUT, of_pk=row.rollout_pk, **after, **participants)
    tx.add_event(EndEvent(row.rollout_id, row.number, state))
    if again:
        tx.add_event(QueueEvent())
    return state


def _finish_again(tx: Transaction, row: Any, end: AttemptEnd) -> tuple[RolloutState, bool, AttemptOver | None]:
    """Acknowledge a repeated result, or count and refuse another one."""
    # The server keeps an agent_error as context_overflow where a call overflowed, and the end of a branch that diverged
    # as diverged: a worker that repeats its result, because the answer was lost, has sent the same result.
    state, outcome = RolloutState(row.state), end.outcome
    is_overflow = outcome is Outcome.AGENT_ERROR and row.outcome == Outcome.CONTEXT_OVERFLOW
    output = "" if end.output is None else encode_json(end.output, f"the output of rollout {row.rollout_id!r}")
    has_other_output = tx.rows(_OUTPUT, of_pk=row.pk)[0].output != output
    if (row.outcome in (outcome, Outcome.DIVERGED) or is_overflow) and not has_other_output:
        return state, False, None
    tx.run(_COUNT_REFUSED, of_pk=row.pk)
    what = f"the result {outcome.value!r}" + (" with another output" if has_other_output else "")
    return state, False, over(row.rollout_id, row.number, row.outcome, what)


def _divergence(tx: Transaction, row: Any) -> str | None:
    """Say why a branch did not repeat its calls: it asked what was not recorded, or it ended before; None = it did."""
    query = select(other_calls.c.message).where(other_calls.c.attempt_pk == row.pk, other_calls.c.code == DIVERGED_CODE)
    message: str | None = tx.db.execute(query.order_by(other_calls.c.pk).limit(1)).scalar()
    if message is not None:
        return message
    point: BranchPoint = row.branch
    source = tx.attempt(point.rollout_id, point.attempt)
    recorded = _count_calls(source.pk).where(
        calls.c.idx < point.calls, calls.c.finish_reason != FinishReason.BROKEN_OFF
    )
    repeated = _count_calls(row.pk).where(calls.c.replayed_from.is_not(None))
    missing = tx.db.execute(recorded).scalar_one() - tx.db.execute(repeated).scalar_one()
    if not missing:
        return None
    where = f"the branch point, which is after call {point.calls} of the recorded rollout"
    return f"the agent ended {missing} calls before {where}"


def cancel(tx: Transaction, rollout_ids: Sequence[str]) -> int:
    cancelled = 0
    for rollout_id in rollout_ids:
        columns = rollouts.c.pk, rollouts.c.state, rollouts.c.started
        row = tx.db.execute(select(*columns).where(rollouts.c.id == rollout_id)).one_or_none()
        if row is None:
            raise UnknownRecord(f"no rollout {rollout_id!r} to cancel; create it first")
        if row.state in (RolloutState.SUCCEEDED, RolloutState.FAILED):
            continue
        number = row.started
        if row.state == RolloutState.QUEUED:  # an attempt of no worker: every finished rollout has a deciding attempt
            number = row.started + 1
            nobody = {"worker_id": "", "key_digest": b"", "expires_at": tx.now, "started_at": tx.now}
            tx.run(_START_ATTEMPT, rollout_pk=row.pk, number=number, **nobody)
            tx.db.execute(update(rollouts).where(rollouts.c.pk == row.pk).values(started=number))
        _end(tx, tx.attempt(rollout_id, number), Outcome.CANCELLED, again=False, error="cancelled")
        cancelled += 1
    return cancelled


def retry(tx: Transaction, rollout_ids: Sequence[str], timeout_s: float) -> int:
    retried = 0
    for rollout_id in rollout_ids:
        state = tx.db.execute(select(rollouts.c.state).where(rollouts.c.id == rollout_id)).scalar()
        if state is None:
            raise UnknownRecord(f"no rollout {rollout_id!r} to run again; create it first")
        if state == RolloutState.FAILED:
            anew = {"state": RolloutState.QUEUED, "outcome": None, "forgiven": rollouts.c.started}
            tx.db.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(anew | {"timeout_s": timeout_s}))
            retried += 1
    if retried:
        tx.add_event(QueueEvent())
    return retried


_running = WITH_ROLLOUT.where(attempts.c.outcome.is_(None))
_RUNNING = PreparedStatement(_running)
_RUNNING_AT = PreparedStatement(_running.where(attempts.c.worker_id == bindparam("of_worker")))
_EXPIRED = PreparedStatement(_running.where(attempts.c.expires_at <= bindparam("now")))
_OLDEST = PreparedStatement(
    select(
        *(rollouts.c[name] for name in ("pk", "id", "mode", "step", "sampling", "timeout_s", "branch")),
        (rollouts.c.started + 1).label("number"),
        tasks.c.body,
    )
    .join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .where(text("rollouts.state = 'queued'"))  # in the words of its index
    .order_by(rollouts.c.pk)
    .limit(1)
)
_START_ATTEMPT = PreparedStatement(
    insert(attempts), columns=("rollout_pk", "number", "worker_id", "key_digest", "expires_at", "started_at")
)
_attempt = update(attempts).where(attempts.c.pk == bindparam("of_pk"))
_rollout = update(rollouts).where(rollouts.c.pk == bindparam("of_pk"))
_START_ROLLOUT = PreparedStatement(_rollout, columns=("state", "started"))
_KEEP_LEASE = PreparedStatement(_attempt, columns=("expires_at",))
_FIND_TASK = PreparedStatement(select(tasks.c.pk).where(tasks.c.digest == bindparam("of_digest")))
_ADD_TASK = PreparedStatement(insert(tasks), columns=("digest", "task_id", "body"))
_ORDERED = ("id", "task_pk", "group_id", "mode", "step", "sampling", "branch", "max_attempts", "timeout_s")
_CREATE = PreparedStatement(insert(rollouts), columns=(*_ORDERED, "state", "created_at"))
_COUNT_REFUSED = PreparedStatement(_attempt.values(results_refused=attempts.c.results_refused + 1))
_OUTPUT = PreparedStatement(select(attempts.c.output).where(attempts.c.pk == bindparam("of_pk")))
_of_key = (calls.c.attempt_pk == bindparam("of_pk"), calls.c.call_key == bindparam("key"))
_LEAVE_OUT = PreparedStatement(update(calls).where(*_of_key).values(trainable=False))
_END_ATTEMPT = PreparedStatement(
    _attempt, columns=("outcome", "ended_at", "output", "error", "duration_s", "left_threads")
)
_END_ROLLOUT = PreparedStatement(
    _rollout.values(forgiven=rollouts.c.forgiven + bindparam("more")),
    columns=("state", "outcome", "deciding", "roles", "tools", "failed_tools"),
)
