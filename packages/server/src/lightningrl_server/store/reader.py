"""`Reader`: rows to records, with a cache of interned words; any thread may use it with a connection of its own.

A read of what is not committed yet takes a Reader of its own: after a rollback a word's number may be given anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import BindParameter, Connection, Row, bindparam, case, func, select

from lightningrl.types import Evidence, IntArray, OtherCall, RolloutMode, SamplingSettings, Task, Transition
from lightningrl.wire import assemble
from lightningrl_server.lru import LruCache
from lightningrl_server.records import CallRecord
from lightningrl_server.store.columns import as_number, decode_many, decode_sampling
from lightningrl_server.store.errors import UnknownRecord
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
    "build_transition",
    "chunks",
    "decode_task",
    "prompts_and_completions",
    "read_forgotten",
    "same_columns",
]

_K = TypeVar("_K")
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
        if pk is None:
            return None
        word = self._words.get(pk)
        if word is None:
            word = str(db.execute(_WORD, {"pk": pk}).scalar_one())
            self._words.put(pk, word, len(word))
        return word

    def text(self, db: Connection, pk: int) -> str:
        return self.word(db, pk) or ""

    def sampling(self, db: Connection, row: Row[Any]) -> SamplingSettings:
        """Return the settings of a call's row."""
        settings = self._sampling.get(row.sampling)
        if settings is None:
            text = self.text(db, row.sampling)
            settings = self._sampling.put(row.sampling, decode_sampling(text), len(text))
        return settings if row.seed is None else replace(settings, seed=int(row.seed))

    def offered(self, db: Connection, pk: int | None) -> str:
        """Return `Transition.offered` by the key of its toolset."""
        if pk is None:
            return ""
        toolset = self._offered.get(pk)
        if toolset is None:
            toolset = str(db.execute(_TOOLSET, {"pk": pk}).scalar_one())
            self._offered.put(pk, toolset, len(toolset))
        return toolset

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


def same_columns(row: Any, kind: type[Any], but: Sequence[str]) -> dict[str, Any]:
    """Collect a record's fields that are columns of the row."""
    return {name: getattr(row, name) for name in kind.__slots__ if name not in but}


decode_task: Final = msgspec.json.Decoder(Task).decode


# ------------------------------------------------------------------ rows of calls to transitions, with whole prompts


def prompts_and_completions(rows: Sequence[Row[Any]]) -> list[tuple[IntArray, IntArray]]:
    """Assemble the tokens of all calls of one attempt, in order."""
    parts = decode_many([data for row in rows for data in (row.suffix, row.completion)])
    return assemble(list(zip((row.parent for row in rows), parts[::2], parts[1::2], strict=True)))


def build_transition(
    row: Row[Any],
    prompt_ids: IntArray,
    completion_ids: IntArray,
    *,
    policy: str,
    sampling: SamplingSettings,
    agent: str | None,
    offered: str,
    parent_id: str | None,
    rewards: Mapping[str, float | None],
    reported: Mapping[str, float | None],
) -> Transition:
    """Build it from a row of `calls`, whose `CALL_COLUMNS` are taken as they are."""
    return Transition(
        **dict(zip(CALL_COLUMNS, _call_columns(row), strict=True)),
        index=row.idx,
        policy=policy,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        sampling=sampling,
        agent=agent,
        offered=offered,
        parent_id=parent_id,
        rewards=rewards,
        reported=reported,
    )


_INTERNED = ("policy", "sampling", "agent")
CALL_COLUMNS: Final = tuple(
    field.name for field in fields(Transition) if field.name in calls.c and field.name not in _INTERNED
)
"""Fields of a Transition that are columns of their own; others are interned words, tokens without their parent's, or
elsewhere."""
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
