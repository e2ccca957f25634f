"""The operations that write. Each is a plain function of a transaction and its arguments, so that it can run again alone."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Integer, and_, bindparam, delete, func, insert, or_, select, text, update

from lightningrl.errors import StoreError
from lightningrl.records import DIALOGUE, DIVERGED_CODE, AttemptEnd, CallRecord, Score, SpanRecord, ToolCallRecord
from lightningrl.sanitize import clean_text
from lightningrl.types import (
    BranchPoint,
    FinishReason,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutMode,
    RolloutSpec,
    RolloutState,
    ToolCall,
    ToolStatus,
)
from lightningrl_server.store import schema
from lightningrl_server.store.codec import column_text, encode_advantages, encode_json, encode_tokens
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.events import EndEvent, LeaseEvent, QueueEvent
from lightningrl_server.store.participants import SpanNode
from lightningrl_server.store.prepared import PreparedStatement
from lightningrl_server.store.protocol import RETRYABLE
from lightningrl_server.store.reads import chunks, read_forgotten
from lightningrl_server.store.schema import (
    FORGOTTEN,
    attempts,
    calls,
    is_shown,
    meta,
    other_calls,
    rewards,
    rollouts,
    spans,
    steps,
    tasks,
    tool_calls,
    trained,
)
from lightningrl_server.store.tokens import AS_THEY_ARE
from lightningrl_server.store.transaction import ATTEMPT_COLUMNS, LiveAttempt, Transaction, over

__all__ = [
    "add_rewards",
    "append_calls",
    "append_other_calls",
    "append_spans",
    "append_tool_calls",
    "cancel",
    "create_rollouts",
    "expire",
    "finish",
    "forget_some",
    "heartbeat",
    "interrupt",
    "lease",
    "mark_trained",
    "release",
    "retry",
    "rollback_steps",
    "set_scores",
]

OUTPUT_LIMIT = 16 * 2**20
"""Bytes of JSON that an agent may return."""

MOST_FORGIVEN = 10
"""Tries of one rollout that are not charged: what ends its worker each time would else be tried for ever."""
MOST_TOLD = 50_000
"""Tool calls of an attempt, and as many spans: they are kept in memory while it runs."""
_BADNESS = (
    ToolStatus.UNKNOWN,
    ToolStatus.OK,
    ToolStatus.UNKNOWN_TOOL,
    ToolStatus.INVALID_ARGUMENTS,
    ToolStatus.TIMEOUT,
    ToolStatus.ERROR,
)
"""Of reports that contradict each other the last of these stands: who says that a tool failed has no gain of it."""
ERROR_LIMIT = 100_000
"""Characters of what an agent raised; the rest is cut off."""


def create_rollouts(tx: Transaction, specs: Sequence[RolloutSpec]) -> int:
    known: dict[str, Any] = {}
    for ids in chunks([spec.id for spec in specs]):
        known |= {one.id: one for one in tx.db.execute(select(rollouts).where(rollouts.c.id.in_(ids)))}
    new: list[dict[str, Any]] = []
    task_pks: dict[str, int] = {}
    for spec in specs:
        row: dict[str, Any] = {
            "id": spec.id,
            "task_pk": _task(tx, spec, task_pks),
            "group_id": spec.group_id,
            "mode": spec.mode,
            "step": spec.step,
            "sampling": spec.sampling,
            "branch": spec.branch,
        }
        before = known.get(spec.id)
        if before is not None:
            _same(before, row, spec.id)
            continue
        if spec.branch is not None:
            _check_branch(tx, spec.id, spec.branch)
        known[spec.id] = SimpleNamespace(**row)
        more = {"max_attempts": spec.max_attempts, "timeout_s": spec.timeout_s, "state": RolloutState.QUEUED, "created_at": tx.now}
        new.append(row | more)
    tx.run_many(_CREATE, new)
    if new:
        tx.add_event(QueueEvent())
    return len(new)


def _same(before: Any, row: Mapping[str, Any], rollout_id: str) -> None:
    for name, value in row.items():
        if getattr(before, name) != value:
            what = "task" if name == "task_pk" else name
            raise Conflict(f"rollout id {rollout_id!r} is already used with another {what}; choose a new id for another rollout")


def _check_branch(tx: Transaction, rollout_id: str, point: BranchPoint) -> None:
    source = tx.attempt(point.rollout_id, point.attempt)
    made = tx.db.execute(select(func.count()).select_from(calls).where(calls.c.attempt_pk == source.pk)).scalar_one()
    where = f"rollout {rollout_id!r} is to branch from {point.rollout_id!r} after {point.calls} calls"
    if source.outcome is None:
        raise Conflict(f"{where}, and attempt {point.attempt} of that still runs; wait for its end")
    if not 0 <= point.calls <= made:
        raise Conflict(f"{where}, and attempt {point.attempt} of that has {made}; branch after 0 to {made}")
    next_key = tx.db.execute(select(calls.c.call_key).where(calls.c.attempt_pk == source.pk, calls.c.idx == point.calls)).scalar()
    if next_key is not None and "#" in next_key:
        raise Conflict(f"{where}, which is between the choices of one call; branch before or after it")


def _task(tx: Transaction, spec: RolloutSpec, known: dict[str, int]) -> int:
    """`known`: of this request, by what they are as JSON; a group's rollouts have one."""
    body = encode_json(spec.task, f"task {spec.task.id!r} of rollout {spec.id!r}")
    if body not in known:
        digest = hashlib.blake2b(body.encode(), digest_size=16).digest()
        found = tx.rows(_FIND_TASK, of_digest=digest)
        if not found:
            tx.run(_ADD_TASK, digest=digest, task_id=spec.task.id, body=body)
            found = tx.rows(_FIND_TASK, of_digest=digest)
        known[body] = found[0].pk
    return known[body]


def lease(tx: Transaction, worker_id: str, digest: bytes, lease_s: float, now: float, *, exclusive: bool) -> Any:
    """The rollout's row, with `number`, its new attempt's; None = nothing is queued. `now`: by the clock of leases, here and in
    `heartbeat` and `expire`."""
    _end_expired(tx, now)
    if exclusive:
        held = tx.rows(_RUNNING_AT, of_worker=worker_id)
        _interrupt(tx, held, f"worker {worker_id!r} asked for other work, so it does not run this attempt")
    found = tx.rows(_OLDEST)
    if not found:
        return None
    row = found[0]
    tx.run(
        _START_ATTEMPT,
        rollout_pk=row.pk,
        number=row.number,
        worker_id=worker_id,
        key_digest=digest,
        expires_at=now + lease_s,
        started_at=tx.now,
    )
    tx.run(_START_ROLLOUT, of_pk=row.pk, state=RolloutState.RUNNING, started=row.number)
    tx.add_event(LeaseEvent(now + lease_s))
    return row


def release(tx: Transaction, rollout_id: str, attempt: int) -> None:
    row = tx.attempt(rollout_id, attempt)
    used = tx.db.execute(select(func.count()).select_from(calls).where(calls.c.attempt_pk == row.pk)).scalar_one()
    if row.outcome is not None or used:
        return
    for table in (tool_calls, other_calls, spans, rewards):
        tx.db.execute(delete(table).where(table.c.attempt_pk == row.pk))
    tx.db.execute(delete(attempts).where(attempts.c.pk == row.pk))
    tx.db.execute(update(rollouts).where(rollouts.c.pk == row.rollout_pk).values(state=RolloutState.QUEUED, started=attempt - 1))
    tx.forget(rollout_id, attempt)
    tx.add_event(EndEvent(rollout_id, attempt, RolloutState.QUEUED))
    tx.add_event(QueueEvent())


def heartbeat(tx: Transaction, rollout_id: str, attempt: int, lease_s: float, now: float, worker_id: str | None) -> bool:
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
        tx.end(row, Outcome.INFRASTRUCTURE_ERROR, again=again, error=error)


def interrupt(tx: Transaction, reason: str, workers: str = "") -> int:
    """The running attempts of workers whose id begins with `workers`."""
    rows = [row for row in tx.rows(_RUNNING) if row.worker_id.startswith(workers)]
    _interrupt(tx, rows, reason)
    return len(rows)


def _interrupt(tx: Transaction, rows: Sequence[Any], reason: str) -> None:
    """Not charged, the first `MOST_FORGIVEN` times of a rollout."""
    # max_attempts = 2. Attempt 1 is interrupted: forgiven = 1, so 1 + 2 attempts may be made. Attempt 2 fails: 2 < 2 + 1, attempt 3
    # is queued. It fails: 3 < 2 + 1 does not hold, the rollout is over after two failures of its own.
    for row in rows:
        forgive = row.forgiven < MOST_FORGIVEN
        again = forgive or row.number < row.max_attempts + row.forgiven
        tx.end(row, Outcome.INFRASTRUCTURE_ERROR, again=again, forgive=forgive, error=reason)


def finish(tx: Transaction, rollout_id: str, attempt: int, end: AttemptEnd) -> tuple[RolloutState, bool, AttemptOver | None]:
    """The rollout's state; whether the attempt ended with this, False = it is told again; and, of an attempt that ended otherwise, the
    refusal, which is counted."""
    outcome, error = end.outcome, end.error
    row = tx.attempt(rollout_id, attempt)
    if row.outcome is not None:
        # The server keeps an agent_error as context_overflow where a call overflowed, and what a branch that diverged ended with as
        # diverged: a worker that repeats its result, because the answer was lost, has said the same thing.
        is_overflow = outcome is Outcome.AGENT_ERROR and row.outcome == Outcome.CONTEXT_OVERFLOW
        output = "" if end.output is None else encode_json(end.output, f"the output of rollout {rollout_id!r}")
        has_other_output = tx.rows(_OUTPUT, of_pk=row.pk)[0].output != output
        if (row.outcome in (outcome, Outcome.DIVERGED) or is_overflow) and not has_other_output:
            return RolloutState(row.state), False, None
        tx.run(_COUNT_REFUSED, of_pk=row.pk)
        what = f"the result {outcome.value!r}" + (" with another output" if has_other_output else "")
        return RolloutState(row.state), False, over(rollout_id, attempt, row.outcome, what)
    body = encode_json(end.output, f"the output of rollout {rollout_id!r}")
    if len(body) > OUTPUT_LIMIT:
        raise StoreError(f"the output of rollout {rollout_id!r} has {len(body)} bytes of JSON, more than {OUTPUT_LIMIT}; return less")
    if end.tool_calls:
        append_tool_calls(tx, rollout_id, attempt, end.tool_calls)
    if end.spans:
        append_spans(tx, rollout_id, attempt, end.spans)
    if end.other_calls:
        _add_other_calls(tx, row.pk, end.other_calls)
    if end.rewards:
        tx.replace(schema.rewards, _reward_rows(tx, row.pk, rollout_id, _indices(tx, [row.pk])[row.pk], end.rewards))
    if row.branch is not None and outcome in (Outcome.SUCCEEDED, Outcome.AGENT_ERROR) and (why := _divergence(tx, row)):
        outcome, error = Outcome.DIVERGED, why
    again = outcome in RETRYABLE and end.may_go_again and attempt < row.max_attempts + row.forgiven
    state = tx.end(
        row,
        outcome,
        again=again,
        output=None if end.output is None else body,
        error=None if error is None else error[:ERROR_LIMIT],
        duration_s=end.duration_s,
        left_threads=tuple(map(clean_text, end.left_threads)),
    )
    return state, True, None


def _divergence(tx: Transaction, row: Any) -> str | None:
    """Why a branch did not repeat its calls: what it asked that was not recorded, or that it ended before; None = it did."""
    said = select(other_calls.c.message).where(other_calls.c.attempt_pk == row.pk, other_calls.c.code == DIVERGED_CODE)
    message: str | None = tx.db.execute(said.order_by(other_calls.c.pk).limit(1)).scalar()
    if message is not None:
        return message
    point: BranchPoint = row.branch
    count = select(func.count()).select_from(calls)
    source = tx.attempt(point.rollout_id, point.attempt)
    recorded = count.where(calls.c.attempt_pk == source.pk, calls.c.idx < point.calls, calls.c.finish_reason != FinishReason.BROKEN_OFF)
    repeated = count.where(calls.c.attempt_pk == row.pk, calls.c.replayed_from.is_not(None))
    missing = tx.db.execute(recorded).scalar_one() - tx.db.execute(repeated).scalar_one()
    if not missing:
        return None
    return f"the agent ended {missing} calls before the branch point, which is after call {point.calls} of the recorded rollout"


def cancel(tx: Transaction, rollout_ids: Sequence[str]) -> int:
    cancelled = 0
    for rollout_id in rollout_ids:
        row = tx.db.execute(select(rollouts.c.pk, rollouts.c.state, rollouts.c.started).where(rollouts.c.id == rollout_id)).one_or_none()
        if row is None:
            raise UnknownRecord(f"no rollout {rollout_id!r} to cancel; create it first")
        if row.state in (RolloutState.SUCCEEDED, RolloutState.FAILED):
            continue
        if row.state == RolloutState.QUEUED:  # an attempt of no worker, so that every finished rollout has a deciding attempt
            number = row.started + 1
            tx.db.execute(
                insert(attempts).values(
                    rollout_pk=row.pk, number=number, worker_id="", key_digest=b"", expires_at=tx.now, started_at=tx.now
                )
            )
            tx.db.execute(update(rollouts).where(rollouts.c.pk == row.pk).values(started=number))
        else:
            number = row.started
        tx.end(tx.attempt(rollout_id, number), Outcome.CANCELLED, again=False, error="cancelled")
        cancelled += 1
    return cancelled


def retry(tx: Transaction, rollout_ids: Sequence[str], timeout_s: float) -> int:
    retried = 0
    for rollout_id in rollout_ids:
        state = tx.db.execute(select(rollouts.c.state).where(rollouts.c.id == rollout_id)).scalar()
        if state is None:
            raise UnknownRecord(f"no rollout {rollout_id!r} to run again; create it first")
        if state == RolloutState.FAILED:
            anew = {"state": RolloutState.QUEUED, "outcome": None, "forgiven": rollouts.c.started, "timeout_s": timeout_s}
            tx.db.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(anew))
            retried += 1
    if retried:
        tx.add_event(QueueEvent())
    return retried


def append_calls(
    tx: Transaction, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()
) -> tuple[CallRecord | None, ...]:
    first = records[0]
    live = tx.live(first.rollout_id, first.attempt, f"call {first.transition.id!r}")
    keys = [column_text(record.call_key) for record in records]
    kept = {call.call_key: call for call in tx.reader.calls(tx.db, live.pk)} if any(key in live.keys for key in keys) else {}
    for key, record in zip(keys, records, strict=True):
        if key not in kept:
            tx.add_call(_call_row(tx, live, key, record))
    if tool_calls:
        append_tool_calls(tx, first.rollout_id, first.attempt, tool_calls)
    return tuple(map(kept.get, keys))


def _call_row(tx: Transaction, live: LiveAttempt, key: str, record: CallRecord) -> dict[str, Any]:
    call = record.transition
    if call.id in live.ids:
        raise Conflict(f"transition id {call.id!r} is already used in rollout {record.rollout_id!r}; choose a new one per call")
    parent, shared = None, 0
    if call.parent_id is not None:
        parent = live.ids.get(call.parent_id)
        if parent is None:
            raise UnknownRecord(
                f"call {call.id!r} names parent {call.parent_id!r}, no call of attempt {record.attempt} of rollout "
                f"{record.rollout_id!r}; append the parent first"
            )
        shared = live.ends[parent]
        if len(call.prompt_ids) < shared:
            raise StoreError(f"call {call.id!r}: its prompt of {len(call.prompt_ids)} tokens does not hold the {shared} of its parent")
    index = len(live.ids)
    row = {name: getattr(call, name) for name in AS_THEY_ARE} | {
        "attempt_pk": live.pk,
        "idx": index,
        "call_key": key,
        "history_key": record.history_key,
        "parent": parent,
        "policy": tx.word(call.policy),
        "agent": tx.word_or_none(call.agent),
        "suffix": encode_tokens(call.prompt_ids[shared:]),
        "completion": encode_tokens(call.completion_ids),
        "sampling": tx.word(encode_json(replace(call.sampling, seed=None), f"sampling of call {call.id!r}")),
        "toolset": tx.toolset_or_none(call.offered),
        "seed": None if call.sampling.seed is None else str(call.sampling.seed),
    }
    live.ids[call.id] = live.keys[key] = index
    live.ends.append(len(call.prompt_ids) + len(call.completion_ids))
    live.participants.callers.add((row["agent"], call.span_id or call.id))
    return row


def append_tool_calls(tx: Transaction, rollout_id: str, attempt: int, tool_calls: Sequence[ToolCallRecord]) -> int:
    """How many are new. Of one that is told again, by its id or its span, the worst status stands."""
    live = tx.live(rollout_id, attempt, "a tool call")
    rows, replaced = list[dict[str, Any]](), set[str]()
    for record in tool_calls:
        tool_call, call_id = record.tool_call, column_text(record.tool_call.id)
        span = None if record.span_id is None else clean_text(record.span_id)
        if call_id in live.told_tools or span in live.tool_spans:
            if record.is_of_dialogue and call_id in live.gaps:
                _fill_gaps(tx, live, call_id, tool_call)
            if not record.is_of_dialogue or (call_id in live.told_tools and tool_call.status is ToolStatus.ERROR):
                _tell_again(tx, live, rows, record)
            continue
        if not record.is_of_dialogue:
            shown = f"{DIALOGUE}{call_id}"
            if shown in live.participants.shown:
                replaced.add(shown)
                tool_call = _without_gaps(tx, live, shown, tool_call)
                if live.participants.shown[shown][1] is ToolStatus.ERROR and tool_call.status is ToolStatus.OK:
                    tool_call = replace(tool_call, status=ToolStatus.ERROR, contradicted=1)
            live.note_told(call_id, has_gaps=_has_gaps(tool_call))
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
        live.participants.add_tool(row["name"], tool_call.status, shown=span if record.is_of_dialogue else None)
        rows.append(row)
    live.tool_calls += len(rows)
    _check_told(live.tool_calls, "tool calls", rollout_id)
    tx.run_many(_ADD_TOOL_CALLS, rows)
    for shown in replaced:
        tx.run(_DROP_SHOWN, of_attempt=live.pk, of_span=shown)
        live.drop_shown(shown)
    return len(rows)


def _tell_again(tx: Transaction, live: LiveAttempt, rows: Sequence[dict[str, Any]], record: ToolCallRecord) -> None:
    """Change a tool call, one of the new `rows` or a kept one, as another report of it wants."""
    tool_call, call_id = record.tool_call, column_text(record.tool_call.id)
    span = None if record.span_id is None else clean_text(record.span_id)
    row = next((row for row in rows if column_text(row["id"]) == call_id or (span is not None and row["span"] == span)), None)
    if row is not None:
        changes = _merged(row, record)
        row |= changes
    else:
        (kept,) = tx.rows(_KEPT_TOOL_CALL, of_attempt=live.pk, of_id=call_id)[:1] or tx.rows(
            _KEPT_TOOL_SPAN, of_attempt=live.pk, of_span=span
        )
        changes = _merged(kept._asdict(), record)
        if changes:
            tx.run(_CHANGE_TOOL_CALL, of_pk=kept.pk, **{name: getattr(kept, name) for name in _TOLD_OF_STATUS} | changes)
    if "status" in changes:
        live.participants.add_tool(tx.word(tool_call.name), tool_call.status)


def _merged(kept: Mapping[str, Any], record: ToolCallRecord) -> dict[str, Any]:
    """The changes: the status, and what belongs to it, where the other report is worse; the count, where both say something. What the
    dialogue calls an error contradicts only what was told to be ok: of what kind a failure is, others know better."""
    tool_call = record.tool_call
    if tool_call.status == kept["status"] or (record.is_of_dialogue and kept["status"] is not ToolStatus.OK):
        return {}
    is_worse = _BADNESS.index(tool_call.status) > _BADNESS.index(kept["status"])
    changes: dict[str, Any] = (
        {"status": tool_call.status, "result": tool_call.result, "error_type": tool_call.error_type} if is_worse else {}
    )
    if ToolStatus.UNKNOWN not in (tool_call.status, kept["status"]):
        changes["contradicted"] = kept["contradicted"] + 1
    return changes


def _has_gaps(told: ToolCall) -> bool:
    """Whether a tool call leaves out what the dialogue may show of it."""
    return not (told.arguments and told.result) or told.status is ToolStatus.UNKNOWN


def _without_gaps(tx: Transaction, live: LiveAttempt, shown: str, told: ToolCall) -> ToolCall:
    """A tool call as somebody tells it, with what only the dialogue has shown of it."""
    if not _has_gaps(told):
        return told
    (row,) = tx.rows(_SHOWN, of_attempt=live.pk, of_span=shown)
    status = row.status if told.status is ToolStatus.UNKNOWN else told.status
    return replace(told, arguments=told.arguments or row.arguments, result=told.result or row.result, status=status)


def _fill_gaps(tx: Transaction, live: LiveAttempt, call_id: str, shown: ToolCall) -> None:
    """The same where the dialogue shows it afterwards."""
    live.gaps.discard(call_id)
    for row in tx.rows(_TOLD, of_attempt=live.pk, of_id=call_id):
        status = shown.status if row.status is ToolStatus.UNKNOWN else row.status
        values = {"arguments": row.arguments or shown.arguments, "result": row.result or shown.result, "status": status}
        tx.run(_FILL_TOLD, of_pk=row.pk, **values)
        live.participants.add_tool(row.name, status)


def append_other_calls(tx: Transaction, rollout_id: str, attempt: int, calls: Sequence[OtherCall]) -> None:
    _add_other_calls(tx, tx.live(rollout_id, attempt, "a call").pk, calls)


def _add_other_calls(tx: Transaction, attempt_pk: int, calls: Sequence[OtherCall]) -> None:
    rows = [
        {name: getattr(record, name) for name in OtherCall.__slots__} | {"attempt_pk": attempt_pk, "agent": tx.word_or_none(record.agent)}
        for record in calls
    ]
    tx.run_many(_ADD_OTHER_CALLS, rows)


def append_spans(tx: Transaction, rollout_id: str, attempt: int, spans: Sequence[SpanRecord]) -> None:
    live = tx.live(rollout_id, attempt, "a span")
    rows = [
        {
            "attempt_pk": live.pk,
            "span": record.span_id,
            "parent": record.parent_span_id,
            "agent": tx.word_or_none(record.agent),
        }
        for record in spans
    ]
    for record in spans:
        live.participants.tree[record.span_id] = SpanNode(record.parent_span_id, tx.word_or_none(record.agent))
    _check_told(len(live.participants.tree), "spans", rollout_id)
    tx.replace(schema.spans, rows)


def _check_told(count: int, what: str, rollout_id: str) -> None:
    if count > MOST_TOLD:
        raise StoreError(f"rollout {rollout_id!r} would have {count} {what}, more than {MOST_TOLD}; report fewer")


def add_rewards(
    tx: Transaction, rollout_id: str, attempt: int, rewards: Mapping[str, float | None], transition_id: str | None = None
) -> None:
    row = tx.attempt(rollout_id, attempt)
    indices = {} if transition_id is None else _indices(tx, [row.pk])[row.pk]
    tx.replace(schema.rewards, _reward_rows(tx, row.pk, rollout_id, indices, {transition_id: rewards}))


def set_scores(tx: Transaction, scores: Sequence[Score]) -> None:
    """One statement for each table, whatever the number of scores."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    found = tx.attempts([score.rollout_id for score in scores])
    places = [(score.rollout_id, score.attempt) for score in scores if score.transition_rewards or score.advantages]
    calls_of = _indices(tx, [found[place].pk for place in places if place in found])
    for score in scores:
        row = found.get((score.rollout_id, score.attempt)) or tx.attempt(score.rollout_id, score.attempt)  # which says what is wrong
        if row.outcome is None:
            raise Conflict(f"attempt {score.attempt} of rollout {score.rollout_id!r} still runs; score it when it has ended")
        indices = calls_of[row.pk]
        values: dict[str | None, Mapping[str, float | None]] = {None: score.rewards}
        values.update(score.transition_rewards)
        rows["computed"] += _reward_rows(tx, row.pk, score.rollout_id, indices, values)
        rows["digests"] += [
            {"attempt_pk": row.pk, "part": tx.word(part), "digest": tx.word(digest)} for part, digest in score.digests.items()
        ]
        if score.evidence is not None:
            rows["evidence"].append({"attempt_pk": row.pk, "data": score.evidence})
        if score.asked:
            of_judges = (other_calls.c.attempt_pk == row.pk) & (other_calls.c.kind == OtherCallKind.JUDGE)
            known = set(tx.db.execute(select(other_calls.c.started_at).where(of_judges)).scalars())
            _add_other_calls(tx, row.pk, [call for call in score.asked if call.started_at not in known])
        total = _finite(score.reward, "reward", score.rollout_id)
        rows["scores"].append({"attempt_pk": row.pk, "reward": total, "unrewarded": score.unrewarded})
        rows["advantages"] += [
            {
                "attempt_pk": row.pk,
                "idx": _index(indices, transition_id, score.rollout_id),
                "data": None if values_ is None else encode_advantages(values_),
            }
            for transition_id, values_ in score.advantages.items()
        ]
    for table, of_table in rows.items():
        tx.replace(getattr(schema, table), of_table)


def _indices(tx: Transaction, attempt_pks: Sequence[int]) -> Mapping[int, dict[str, int]]:
    """Of the calls of attempts, by attempt and id."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for pks in chunks(attempt_pks):
        for row in tx.db.execute(_CALL_IDS, {"pks": pks}):
            found[row.attempt_pk][row.id] = row.idx
    return found


def _index(indices: Mapping[str, int], transition_id: str, rollout_id: str) -> int:
    try:
        return indices[transition_id]
    except KeyError:
        raise UnknownRecord(f"rollout {rollout_id!r} has no transition {transition_id!r}; use the ids of its trajectory") from None


def _reward_rows(
    tx: Transaction, attempt_pk: int, rollout_id: str, indices: Mapping[str, int], values: Mapping[str | None, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    return [
        {
            "attempt_pk": attempt_pk,
            "idx": -1 if transition_id is None else _index(indices, transition_id, rollout_id),
            "name": tx.word(name),
            "value": _finite(value, name, rollout_id),
        }
        for transition_id, by_name in values.items()
        for name, value in by_name.items()
    ]


def _finite(value: float | None, name: str, rollout_id: str) -> float | None:
    if value is not None and not math.isfinite(value):
        raise StoreError(f"{name!r} of rollout {rollout_id!r} is {value!r}, no finite number; return a number or None")
    return value


def mark_trained(tx: Transaction, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
    wanted = tuple(dict.fromkeys(rollout_ids))
    if len(wanted) != len(rollout_ids):
        raise Conflict(f"step {step} names a rollout twice; a rollout is trained once")
    pks: dict[str, int] = {}
    for ids in chunks(wanted):
        pks |= {row.id: row.pk for row in tx.db.execute(select(rollouts.c.id, rollouts.c.pk).where(rollouts.c.id.in_(ids)))}
    for rollout_id in wanted:
        if rollout_id not in pks:
            raise UnknownRecord(f"step {step} trains rollout {rollout_id!r}, which does not exist; create it first")
    if tx.db.execute(select(steps.c.step).where(steps.c.step == step)).scalar() is not None:
        before = set(tx.db.execute(select(trained.c.rollout_pk).where(trained.c.step == step)).scalars())
        if before == set(pks.values()):
            return
        raise Conflict(f"step {step} is already recorded with other rollouts; roll back to step {step - 1} to train it again")
    names = {pk: rollout_id for rollout_id, pk in pks.items()}
    for some in chunks(tuple(names)):
        taken = tx.db.execute(select(trained).where(trained.c.rollout_pk.in_(some)).limit(1)).one_or_none()
        if taken is not None:
            raise Conflict(f"rollout {names[taken.rollout_pk]!r} was trained in step {taken.step}; a rollout is trained once")
    tx.db.execute(insert(steps).values(step=step, metrics=dict(metrics), at=tx.now))
    if pks:
        tx.run_many(_TRAIN, [{"rollout_pk": pks[rollout_id], "step": step} for rollout_id in wanted])


def rollback_steps(tx: Transaction, after: int) -> int:
    tx.db.execute(delete(trained).where(trained.c.step > after))
    return tx.db.execute(delete(steps).where(steps.c.step > after)).rowcount


def forget_some(tx: Transaction, through: int, slack: int) -> int:
    """Some of the rollouts that `Ledger.forget_rollouts` deletes, a step's all at once; 0 = none is left."""
    last, count = read_forgotten(tx.db)
    oldest = tx.db.execute(select(func.min(trained.c.step)).where(trained.c.step <= through)).scalar()
    if oldest is not None:
        last = max(last, oldest)
        pks = list(tx.db.execute(select(trained.c.rollout_pk).where(trained.c.step == oldest)).scalars())
    else:
        pks = list(tx.db.execute(_PLANNED_THROUGH, {"through": through, "slack": slack}).scalars())
    if not pks:
        return 0
    of_rollouts = [
        pk for some in chunks(pks) for pk in tx.db.execute(select(attempts.c.pk).where(attempts.c.rollout_pk.in_(some))).scalars()
    ]
    columns = [(table.c.attempt_pk, of_rollouts) for table in _OF_ATTEMPTS]
    columns += [(column, pks) for column in (attempts.c.rollout_pk, trained.c.rollout_pk, rollouts.c.pk)]
    for column, gone in columns:
        for some in chunks(gone):
            tx.db.execute(delete(column.table).where(column.in_(some)))
    tx.replace(meta, [{"key": FORGOTTEN, "value": f"{last} {count + len(pks)}"}])
    return len(pks)


_HAS_ENDED = rollouts.c.state.not_in((RolloutState.QUEUED, RolloutState.RUNNING))
_AT_ONCE = 100
"""Rollouts that no step trained, forgotten in one commit: others wait for it."""
_PLANNED_THROUGH = (
    select(rollouts.c.pk)
    .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .where(
        trained.c.step.is_(None),
        _HAS_ENDED,
        # a validation's `step` is that of its weights; a training rollout's is one less than that of the step which takes it
        or_(
            and_(rollouts.c.mode == RolloutMode.VALIDATION, rollouts.c.step <= bindparam("through")),
            and_(rollouts.c.mode != RolloutMode.VALIDATION, rollouts.c.step < bindparam("through") - bindparam("slack", type_=Integer)),
        ),
    )
    .limit(_AT_ONCE)
)
_OF_ATTEMPTS = tuple(table for table in schema.metadata.sorted_tables if "attempt_pk" in table.c)
_RUNNING_ATTEMPTS = select(*ATTEMPT_COLUMNS).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk).where(attempts.c.outcome.is_(None))
_RUNNING = PreparedStatement(_RUNNING_ATTEMPTS)
_RUNNING_AT = PreparedStatement(_RUNNING_ATTEMPTS.where(attempts.c.worker_id == bindparam("of_worker")))
_EXPIRED = PreparedStatement(_RUNNING_ATTEMPTS.where(attempts.c.expires_at <= bindparam("now")))
_OLDEST = PreparedStatement(
    select(
        rollouts.c.pk,
        rollouts.c.id,
        (rollouts.c.started + 1).label("number"),
        rollouts.c.mode,
        rollouts.c.step,
        rollouts.c.sampling,
        rollouts.c.timeout_s,
        rollouts.c.branch,
        tasks.c.body,
    )
    .join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .where(text("rollouts.state = 'queued'"))  # as the index says it
    .order_by(rollouts.c.pk)
    .limit(1)
)
_START_ATTEMPT = PreparedStatement(
    insert(attempts), columns=("rollout_pk", "number", "worker_id", "key_digest", "expires_at", "started_at")
)
_START_ROLLOUT = PreparedStatement(update(rollouts).where(rollouts.c.pk == bindparam("of_pk")), columns=("state", "started"))
_KEEP_LEASE = PreparedStatement(update(attempts).where(attempts.c.pk == bindparam("of_pk")), columns=("expires_at",))
_FIND_TASK = PreparedStatement(select(tasks.c.pk).where(tasks.c.digest == bindparam("of_digest")))
_ADD_TASK = PreparedStatement(insert(tasks), columns=("digest", "task_id", "body"))
_CREATE = PreparedStatement(
    insert(rollouts),
    columns=(
        "id",
        "task_pk",
        "group_id",
        "mode",
        "step",
        "sampling",
        "branch",
        "max_attempts",
        "timeout_s",
        "state",
        "created_at",
    ),
)
_CALL_IDS = select(calls.c.attempt_pk, calls.c.id, calls.c.idx).where(calls.c.attempt_pk.in_(bindparam("pks", expanding=True)))
_ADD_TOOL_CALLS = PreparedStatement(insert(tool_calls), columns=[column.name for column in tool_calls.c if column.name != "pk"])
_OF_SPAN = (tool_calls.c.attempt_pk == bindparam("of_attempt"), tool_calls.c.span == bindparam("of_span"))
_SHOWN = PreparedStatement(select(tool_calls.c.arguments, tool_calls.c.result, tool_calls.c.status).where(*_OF_SPAN))
_TOLD = PreparedStatement(
    select(tool_calls).where(tool_calls.c.attempt_pk == bindparam("of_attempt"), tool_calls.c.id == bindparam("of_id"))
)
_TOLD_OF_STATUS = ("status", "result", "error_type", "contradicted")
_KEPT_TOOL_CALLS = select(tool_calls.c.pk, *(tool_calls.c[name] for name in _TOLD_OF_STATUS)).where(
    tool_calls.c.attempt_pk == bindparam("of_attempt")
)
_KEPT_TOOL_CALL = PreparedStatement(
    _KEPT_TOOL_CALLS.where(tool_calls.c.id == bindparam("of_id"), func.coalesce(~is_shown, True)).order_by(tool_calls.c.pk)
)
_KEPT_TOOL_SPAN = PreparedStatement(_KEPT_TOOL_CALLS.where(tool_calls.c.span == bindparam("of_span")))
_CHANGE_TOOL_CALL = PreparedStatement(update(tool_calls).where(tool_calls.c.pk == bindparam("of_pk")), columns=_TOLD_OF_STATUS)
_COUNT_REFUSED = PreparedStatement(
    update(attempts).where(attempts.c.pk == bindparam("of_pk")).values(results_refused=attempts.c.results_refused + 1)
)
_OUTPUT = PreparedStatement(select(attempts.c.output).where(attempts.c.pk == bindparam("of_pk")))
_FILL_TOLD = PreparedStatement(update(tool_calls).where(tool_calls.c.pk == bindparam("of_pk")), columns=("arguments", "result", "status"))
_DROP_SHOWN = PreparedStatement(delete(tool_calls).where(*_OF_SPAN))
_ADD_OTHER_CALLS = PreparedStatement(insert(other_calls), columns=[column.name for column in other_calls.c if column.name != "pk"])
_TRAIN = PreparedStatement(insert(trained), columns=("rollout_pk", "step"))
