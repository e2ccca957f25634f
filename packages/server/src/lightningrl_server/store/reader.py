"""`Reader`: rows to records, with a cache of interned words; any thread may use it with a connection of its own. A read
of what is not committed yet takes a Reader of its own: after a rollback a word's number may be given anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import BindParameter, Connection, Row, bindparam, case, func, select

from lightningrl.types import Evidence, OtherCall, RolloutMode, SamplingSettings, Task, Transition
from lightningrl.wire import assemble
from lightningrl_server.lru import LruCache
from lightningrl_server.records import CallRecord
from lightningrl_server.store.columns import as_number, decode_many, decode_sampling
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.participants import SpanNode, named_agent
from lightningrl_server.store.tables import (
    FORGOTTEN,
    attempts,
    calls,
    computed,
    digests,
    evidence,
    meta,
    other_calls,
    rewards,
    rollouts,
    toolsets,
    trained,
    words,
)
from lightningrl_server.store.transaction import PreparedStatement

__all__ = [
    "CALL_COLUMNS",
    "OTHER_CALLS",
    "PKS",
    "STEP",
    "Reader",
    "chunks",
    "decode_task",
    "read_forgotten",
    "same_columns",
]

_K = TypeVar("_K")
CallRewards = Mapping[int, Mapping[str, float | None]]
"""Rewards of an attempt's calls, by index and name."""
Rewards = tuple[dict[int, dict[str, float | None]], dict[int, dict[int, dict[str, float | None]]]]
"""Rewards by name: of each attempt, and of its calls by index."""
_IN_MOST = 500
_MOST_TOOLSETS = 256
"""Toolsets in memory."""
_LONGEST_TOOLSET = 64 * 1024
"""Characters of one of these; longer ones are read each time."""
PKS: BindParameter[Any] = bindparam("pks", expanding=True)
"""Keys of attempts."""
STEP = case(
    (rollouts.c.mode == RolloutMode.VALIDATION, rollouts.c.step),
    else_=func.coalesce(trained.c.step, rollouts.c.step + 1),
)
"""Step of a rollout beside `trained`, as it is counted on screen: see `RolloutFilter.step`."""


def chunks(values: Sequence[_K]) -> Iterator[Sequence[_K]]:
    """Yield a few hundred at a time, for IN (…)."""
    for start in range(0, len(values), _IN_MOST):
        yield values[start : start + _IN_MOST]


class Reader:
    """Reads what several queries need, and caches interned words."""

    def __init__(self) -> None:
        self._words = LruCache[int, str]()
        self._sampling = LruCache[int, SamplingSettings]()
        self._offered = LruCache[int, str](_MOST_TOOLSETS, _LONGEST_TOOLSET)

    def word(self, db: Connection, pk: int | None) -> str | None:
        return None if pk is None else self.text(db, pk)

    def text(self, db: Connection, pk: int) -> str:
        return _read_once(self._words, _WORD, db, pk)

    def sampling(self, db: Connection, row: Row[Any]) -> SamplingSettings:
        """Return the settings of a call's row."""
        settings = self._sampling.get(row.sampling)
        if settings is None:
            text = self.text(db, row.sampling)
            settings = self._sampling.put(row.sampling, decode_sampling(text), len(text))
        return settings if row.seed is None else replace(settings, seed=int(row.seed))

    def offered(self, db: Connection, pk: int | None) -> str:
        """Return `Transition.offered` by the key of its toolset."""
        return "" if pk is None else _read_once(self._offered, _TOOLSET, db, pk)

    def attempt_pk(self, db: Connection, rollout_id: str, attempt: int) -> int:
        """Look up the attempt's key. Raises UnknownRecord."""
        row = db.execute(
            select(attempts.c.pk)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(rollouts.c.id == rollout_id, attempts.c.number == as_number(attempt))
        ).one_or_none()
        if row is None:
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {attempt}; attempts start with a lease")
        return int(row.pk)

    def calls(self, db: Connection, attempt_pk: int) -> tuple[CallRecord, ...]:
        """Read an attempt's calls as they were recorded, without rewards."""
        place = db.execute(_PLACE, {"pk": attempt_pk}).one()
        rows = db.execute(select(calls).where(calls.c.attempt_pk == attempt_pk).order_by(calls.c.idx)).all()
        return tuple(
            CallRecord(
                rollout_id=place.id,
                attempt=place.number,
                call_key=row.call_key,
                history_key=row.history_key,
                transition=transition,
            )
            for row, transition in zip(rows, self.transitions(db, rows), strict=True)
        )

    def transitions(
        self,
        db: Connection,
        rows: Sequence[Any],
        tree: Mapping[str, SpanNode] = MappingProxyType({}),
        rewards: CallRewards = MappingProxyType({}),
        reported: CallRewards = MappingProxyType({}),
    ) -> tuple[Transition, ...]:
        """Build them from all rows of `calls` of one attempt, in order, with whole prompts. `tree`: its spans, which
        may name the agents of those calls that do not."""
        parts = decode_many([data for row in rows for data in (row.suffix, row.completion)])
        tokens = assemble(list(zip((row.parent for row in rows), parts[::2], parts[1::2], strict=True)))
        return tuple(
            Transition(
                **dict(zip(CALL_COLUMNS, _call_columns(row), strict=True)),
                index=row.idx,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                policy=self.text(db, row.policy),
                sampling=self.sampling(db, row),
                agent=self.word(
                    db, row.agent if row.agent is not None or not tree else named_agent(tree, row.span_id or row.id)
                ),
                offered=self.offered(db, row.toolset),
                parent_id=None if row.parent is None else rows[row.parent].id,
                rewards=rewards.get(row.idx, {}),
                reported=reported.get(row.idx, {}),
            )
            for row, (prompt_ids, completion_ids) in zip(rows, tokens, strict=True)
        )

    def other_calls(self, db: Connection, rows: Sequence[Any]) -> tuple[OtherCall, ...]:
        return tuple(
            OtherCall(**same_columns(row, OtherCall, but=("agent",)), agent=self.word(db, row.agent)) for row in rows
        )

    def reported(self, db: Connection, attempt_pks: Sequence[int]) -> Rewards:
        """Read the rewards that agents reported."""
        return self._rewards(_REWARDS.read(db, pks=attempt_pks), db)

    def computed(self, db: Connection, attempt_pks: Sequence[int]) -> Rewards:
        """Read the rewards that the run computed."""
        return self._rewards(_COMPUTED.read(db, pks=attempt_pks), db)

    def _rewards(self, rows: Sequence[Any], db: Connection) -> Rewards:
        terminal: dict[int, dict[str, float | None]] = defaultdict(dict)
        turns: dict[int, dict[int, dict[str, float | None]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            by_name = terminal[row.attempt_pk] if row.idx < 0 else turns[row.attempt_pk][row.idx]
            by_name[self.text(db, row.name)] = row.value
        return terminal, turns

    def evidence(self, db: Connection, attempt_pks: Sequence[int]) -> dict[int, Evidence]:
        return {row.attempt_pk: row.data for row in _EVIDENCE.read(db, pks=attempt_pks)}

    def digests(self, db: Connection, attempt_pks: Sequence[int]) -> dict[int, dict[str, str]]:
        """Read each attempt's digests, by the recipe's key."""
        by_attempt: dict[int, dict[str, str]] = defaultdict(dict)
        for row in _DIGESTS.read(db, pks=attempt_pks):
            by_attempt[row.attempt_pk][self.text(db, row.part)] = self.text(db, row.digest)
        return by_attempt


def read_forgotten(db: Connection) -> tuple[int, int]:
    """Read the last step whose rollouts were deleted (-1 = none), and how many rollouts were."""
    value = db.execute(select(meta.c.value).where(meta.c.key == FORGOTTEN)).scalar()
    if value is None:
        return -1, 0
    step, count = value.split()
    return int(step), int(count)


def same_columns(row: Any, kind: type[Any], but: Collection[str]) -> dict[str, Any]:
    """Collect a record's fields that are columns of the row."""
    return {name: getattr(row, name) for name in kind.__slots__ if name not in but}


decode_task: Final = msgspec.json.Decoder(Task).decode


def _read_once(cache: LruCache[int, str], statement: Any, db: Connection, pk: int) -> str:
    text = cache.get(pk)
    if text is None:
        text = str(db.execute(statement, {"pk": pk}).scalar_one())
        cache.put(pk, text, len(text))
    return text


_INTERNED = ("policy", "sampling", "agent")
CALL_COLUMNS: Final = tuple(
    field.name for field in fields(Transition) if field.name in calls.c and field.name not in _INTERNED
)
"""Fields of a Transition with columns of their own; others are interned, tokens without their parent's, elsewhere."""
_call_columns = itemgetter(*(list(calls.c.keys()).index(name) for name in CALL_COLUMNS))

OTHER_CALLS = PreparedStatement(
    select(other_calls).where(other_calls.c.attempt_pk.in_(PKS)).order_by(other_calls.c.started_at, other_calls.c.pk)
)
_DIGESTS, _EVIDENCE, _REWARDS, _COMPUTED = (
    PreparedStatement(select(table).where(table.c.attempt_pk.in_(PKS)))
    for table in (digests, evidence, rewards, computed)
)
_TOOLSET = select(toolsets.c.body).where(toolsets.c.pk == bindparam("pk"))
_WORD = select(words.c.text).where(words.c.pk == bindparam("pk"))
_PLACE = (
    select(rollouts.c.id, attempts.c.number)
    .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
    .where(attempts.c.pk == bindparam("pk"))
)
