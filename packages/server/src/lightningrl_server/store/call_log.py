"""The call log: model calls of running attempts, their keys, and what agents report of them."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select

from lightningrl.errors import StoreError
from lightningrl.types import OtherCall, Outcome
from lightningrl_server.records import AttemptInfo, CallRecord, ToolCallRecord
from lightningrl_server.store import tables
from lightningrl_server.store.columns import as_number, column_text, encode_json, encode_tokens
from lightningrl_server.store.databases import Database, EndEvent, Event, StartEvent
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.participants import LiveAttempt
from lightningrl_server.store.reader import CALL_COLUMNS, OTHER_CALLS, Reader, chunks, same_columns
from lightningrl_server.store.tables import attempts, calls, is_shown, other_calls, rollouts, tool_calls
from lightningrl_server.store.tool_calls import append_spans, append_tool_calls
from lightningrl_server.store.transaction import PreparedStatement, Transaction, over
from lightningrl_server.store.writer import StorePart, reading_attempt, writing

__all__ = [
    "SqlCallLog",
    "add_other_calls",
    "append_calls",
    "call_index",
    "call_indices",
    "check_finite",
    "key_digest",
    "reward_rows",
]


# ------------------------------------------------------------------ writes


def append_calls(
    tx: Transaction, records: Sequence[CallRecord], tools: Sequence[ToolCallRecord] = ()
) -> tuple[CallRecord | None, ...]:
    first = records[0]
    live = tx.live(first.rollout_id, first.attempt, f"call {first.transition.id!r}")
    keys = [column_text(record.call_key) for record in records]
    is_repeated = any(key in live.keys for key in keys)  # read without a cache: a rollback gives a word's number anew
    before = {call.call_key: call for call in Reader().calls(tx.db, live.pk)} if is_repeated else {}
    for key, record in zip(keys, records, strict=True):
        if key not in before:
            tx.add_call(_call_row(tx, live, key, record))
    if tools:
        append_tool_calls(tx, first.rollout_id, first.attempt, tools)
    return tuple(map(before.get, keys))


def _call_row(tx: Transaction, live: LiveAttempt, key: str, record: CallRecord) -> dict[str, Any]:
    # A prompt of [1, 2, 3, 4, 5] whose parent's prompt and completion are [1, 2, 3] is stored as `suffix` [4, 5].
    call = record.transition
    if call.id in live.ids:
        problem = f"transition id {call.id!r} is already used in rollout {record.rollout_id!r}"
        raise Conflict(f"{problem}; choose a new one per call")
    parent, shared = None, 0
    if call.parent_id is not None:
        parent = live.ids.get(call.parent_id)
        if parent is None:
            place = f"attempt {record.attempt} of rollout {record.rollout_id!r}"
            problem = f"call {call.id!r} names parent {call.parent_id!r}, no call of {place}"
            raise UnknownRecord(f"{problem}; append the parent first")
        shared = live.ends[parent]
        if len(call.prompt_ids) < shared:
            size = len(call.prompt_ids)
            raise StoreError(f"call {call.id!r}: its prompt of {size} tokens does not hold the {shared} of its parent")
    index = len(live.ids)
    row = {name: getattr(call, name) for name in CALL_COLUMNS}
    settings = encode_json(replace(call.sampling, seed=None), f"sampling of call {call.id!r}")
    row |= {
        "attempt_pk": live.pk,
        "idx": index,
        "call_key": key,
        "history_key": record.history_key,
        "parent": parent,
        "suffix": encode_tokens(call.prompt_ids[shared:]),
        "completion": encode_tokens(call.completion_ids),
        "policy": tx.word(call.policy),
        "agent": tx.word_or_none(call.agent),
        "sampling": tx.word(settings),
        "toolset": tx.toolset_or_none(call.offered),
        "seed": None if call.sampling.seed is None else str(call.sampling.seed),
    }
    live.ids[call.id] = live.keys[key] = index
    live.ends.append(len(call.prompt_ids) + len(call.completion_ids))
    live.callers.add((row["agent"], call.span_id or call.id))
    return row


def _append_other_calls(tx: Transaction, rollout_id: str, attempt: int, calls: Sequence[OtherCall]) -> None:
    add_other_calls(tx, tx.live(rollout_id, attempt, "a call").pk, calls)


def add_other_calls(tx: Transaction, attempt_pk: int, calls: Sequence[OtherCall]) -> None:
    rows = [
        {name: getattr(call, name) for name in OtherCall.__slots__}
        | {"attempt_pk": attempt_pk, "agent": tx.word_or_none(call.agent)}
        for call in calls
    ]
    tx.run_many(_ADD_OTHER_CALLS, rows)


def _add_rewards(
    tx: Transaction,
    rollout_id: str,
    attempt: int,
    rewards: Mapping[str, float | None],
    transition_id: str | None = None,
) -> None:
    row = tx.attempt(rollout_id, attempt)
    indices = {} if transition_id is None else call_indices(tx, [row.pk])[row.pk]
    tx.replace(tables.rewards, reward_rows(tx, row.pk, rollout_id, indices, {transition_id: rewards}))


def reward_rows(
    tx: Transaction,
    attempt_pk: int,
    rollout_id: str,
    indices: Mapping[str, int],
    values: Mapping[str | None, Mapping[str, float | None]],
) -> list[dict[str, Any]]:
    """Make rows of `rewards` or `computed`. `indices`: the calls'; `values` by transition id (None = attempt), name."""
    return [
        {
            "attempt_pk": attempt_pk,
            "idx": -1 if transition_id is None else call_index(indices, transition_id, rollout_id),
            "name": tx.word(name),
            "value": check_finite(value, name, rollout_id),
        }
        for transition_id, by_name in values.items()
        for name, value in by_name.items()
    ]


def call_indices(tx: Transaction, attempt_pks: Sequence[int]) -> Mapping[int, dict[str, int]]:
    """Read the indices of calls, by attempt and id."""
    indices: dict[int, dict[str, int]] = defaultdict(dict)
    for pks in chunks(attempt_pks):
        for row in tx.db.execute(_CALL_IDS, {"pks": pks}):
            indices[row.attempt_pk][row.id] = row.idx
    return indices


def call_index(indices: Mapping[str, int], transition_id: str, rollout_id: str) -> int:
    try:
        return indices[transition_id]
    except KeyError:
        raise UnknownRecord(
            f"rollout {rollout_id!r} has no transition {transition_id!r}; use the ids of its trajectory"
        ) from None


def check_finite(value: float | None, name: str, rollout_id: str) -> float | None:
    if value is not None and not math.isfinite(value):
        raise StoreError(f"{name!r} of rollout {rollout_id!r} is {value!r}, no finite number; return a number or None")
    return value


# ------------------------------------------------------------------ reads


def _read_call_ids(_: Reader, db: Connection, attempt_pk: int) -> frozenset[str]:
    return frozenset(db.execute(select(calls.c.id).where(calls.c.attempt_pk == attempt_pk)).scalars())


def _read_tool_call_ids(_: Reader, db: Connection, attempt_pk: int) -> frozenset[str]:
    ids = select(tool_calls.c.id).where(tool_calls.c.attempt_pk == attempt_pk, func.coalesce(~is_shown, True))
    return frozenset(db.execute(ids).scalars())


def _read_other_calls(reader: Reader, db: Connection, attempt_pk: int) -> tuple[OtherCall, ...]:
    return reader.other_calls(db, OTHER_CALLS.read(db, pks=[attempt_pk]))


def _read_key(db: Connection, rollout_id: str, attempt: int) -> tuple[bytes, Outcome | None, AttemptInfo] | None:
    """Read the digest of the scoped key, the attempt's outcome, and what the key stands for."""
    made = select(func.count()).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("calls")
    of_rollout = (rollouts.c[name] for name in ("mode", "step", "sampling", "timeout_s", "branch"))
    row = db.execute(
        select(attempts.c.key_digest, attempts.c.outcome, *of_rollout, made)
        .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
        .where(rollouts.c.id == rollout_id, attempts.c.number == as_number(attempt))
    ).one_or_none()
    if row is None:
        return None
    of_row = same_columns(row, AttemptInfo, but=("rollout_id", "attempt"))
    return row.key_digest, row.outcome, AttemptInfo(rollout_id=rollout_id, attempt=attempt, **of_row)


def key_digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class SqlCallLog(StorePart):
    """`lightningrl_server.store.protocol.CallLog`."""

    def __init__(self, database: Database, *, read_only: bool = False) -> None:
        super().__init__(database, read_only=read_only)
        self._keys: dict[tuple[str, int], tuple[bytes, AttemptInfo]] = {}
        """Digests of the keys of running attempts, and what they stand for; empty where other servers may write."""
        self._ended = 0
        """Grows whenever an attempt ends, so that a key read before is not remembered after."""

    async def append_call(self, record: CallRecord) -> CallRecord | None:
        return (await self.append_calls((record,)))[0]

    async def append_calls(
        self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()
    ) -> tuple[CallRecord | None, ...]:
        if not records:
            return ()
        if len({(record.rollout_id, record.attempt) for record in records}) > 1:
            raise StoreError("append_calls got calls of several attempts; append them one attempt at a time")
        before = await self._write(lambda tx: append_calls(tx, records, tool_calls))
        place = records[0].rollout_id, records[0].attempt
        entry = self._keys.get(place)
        if entry is not None and not entry[1].calls:
            self._keys[place] = entry[0], replace(entry[1], calls=1)
        return before

    append_tool_calls = writing(append_tool_calls)
    append_other_calls = writing(_append_other_calls)
    append_spans = writing(append_spans)
    add_rewards = writing(_add_rewards)
    calls = reading_attempt(Reader.calls)
    call_ids = reading_attempt(_read_call_ids)
    tool_call_ids = reading_attempt(_read_tool_call_ids)
    other_calls = reading_attempt(_read_other_calls)

    async def authorise(self, rollout_id: str, attempt: int, key: str) -> AttemptInfo | None:
        entry = self._keys.get((rollout_id, attempt))
        if entry is None:
            ended = self._ended
            stored = await self.read(lambda db: _read_key(db, rollout_id, attempt))
            if stored is None or stored[1] is not None:
                return None
            entry = stored[0], stored[2]
            if ended == self._ended and not self._database.is_shared:
                self._keys[rollout_id, attempt] = entry
        return entry[1] if hmac.compare_digest(entry[0], key_digest(key)) else None

    async def refusal(self, rollout_id: str, attempt: int, key: str) -> StoreError:
        stored = await self.read(lambda db: _read_key(db, rollout_id, attempt))
        if stored is None:
            return UnknownRecord(f"there is no attempt {attempt} of rollout {rollout_id!r}; lease one first")
        if not hmac.compare_digest(stored[0], key_digest(key)):
            return StoreError(f"wrong key for attempt {attempt} of rollout {rollout_id!r}; use the key of its lease")
        self._late += 1
        why = "a process that is kept for later rollouts has the address of the one that started it"
        return AttemptOver(f"{over(rollout_id, attempt, stored[1] or 'ended', 'this request')}; {why}")

    def _on_events(self, events: Sequence[Event]) -> None:
        super()._on_events(events)
        for event in events:
            match event:
                case EndEvent():
                    self._ended += 1
                    self._keys.pop((event.rollout_id, event.attempt), None)
                case StartEvent():
                    if not self._database.is_shared:
                        self._keys[event.info.rollout_id, event.info.attempt] = event.key_digest, event.info


_CALL_IDS = select(calls.c.attempt_pk, calls.c.id, calls.c.idx).where(
    calls.c.attempt_pk.in_(bindparam("pks", expanding=True))
)
_ADD_OTHER_CALLS = PreparedStatement(insert(other_calls))
