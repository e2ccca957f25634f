"""All rollouts of a store, a few numbers each, in memory: counts over all of them are made here.

first look ─► every rollout is read ─┐
later ─► those that are new ─────────┼─► rows[rollout], in the order in which they were asked for
       └► those that may change ─────┘

A rollout is settled, and not read again, once a finished step has trained it, or once a validation before the newest
step has given it a reward. Everything is read again where the newest step that was seen is gone or was done again (a
resumed run takes steps back), or where rollouts were forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Float, Row, Text, func, select, type_coerce

from lightningrl.types import Outcome, RolloutMode, RolloutState
from lightningrl_server.store.reader import chunks, read_forgotten
from lightningrl_server.store.tables import attempts, rollouts, scores, steps, tasks, trained

__all__ = ["MODES", "OUTCOMES", "STATES", "RolloutIndex"]

MOST: Final = 1_000_000
"""Newest rollouts that are counted; 50 MB."""
_AT_ONCE: Final = 10_000
"""Rollouts that are read in one piece."""
MODES, STATES, OUTCOMES = tuple(RolloutMode), tuple(RolloutState), tuple(Outcome)
"""Members by the number that stands for each in a row."""
_MODE, _STATE = ({member.value: number for number, member in enumerate(kind)} for kind in (MODES, STATES))
_OUTCOME: Final[dict[str | None, int]] = {None: -1, **{member.value: number for number, member in enumerate(OUTCOMES)}}
_K = TypeVar("_K")
_ROW: Final = np.dtype(
    [
        ("pk", np.int64),
        ("group", np.int32),
        ("task", np.int32),
        ("mode", np.int8),
        ("state", np.int8),
        ("outcome", np.int8),  # -1 = none yet
        ("step", np.int32),  # as on screen
        ("reward", np.float64),  # nan = none
        ("duration", np.float64),  # -1 = none
        ("unrewarded", np.bool_),  # a reward of it failed
        ("roles", np.int32),
        ("tools", np.int32),
        ("failed_tools", np.int32),
    ]
)


class RolloutIndex:
    """The rollouts in memory, for one thread at a time: `with index.lock: index.update(db); …`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._rows = np.empty(1024, _ROW)
        self._count = 0
        self._open: dict[int, int] = {}
        """Places of the rollouts that may change, by pk."""
        self._newest: tuple[int, float] | None = None
        """The last finished step, and when it finished."""
        self._forgotten: tuple[int, int] | None = None
        """Rollouts that the store had deleted at the last look (`read_forgotten`)."""
        self.groups: dict[str, int] = {}
        """Numbers in rows by name; likewise for tasks, and for lists of words, where 0 is None
        (`lightningrl_server.store.participants`)."""
        self.tasks: dict[str, int] = {}
        self.lists: dict[str | None, int] = {None: 0}
        self._ranks = np.empty(0, np.int64)

    @property
    def rows(self) -> NDArray[Any]:
        """A row for each rollout; read it while the lock is held."""
        return self._rows[: self._count]

    @property
    def group_ranks(self) -> NDArray[np.int64]:
        """A group's place among all names, by its number."""
        if len(self._ranks) != len(self.groups):
            self._ranks = np.argsort(np.argsort(np.array(list(self.groups), dtype=object)))
        return self._ranks

    def update(self, db: Connection) -> None:
        """Read what is new in the store."""
        newest, forgotten = db.execute(_NEWEST_STEP).one_or_none(), read_forgotten(db)
        if forgotten != self._forgotten:
            self._clear()
            self._forgotten = forgotten
        if self._newest is not None:
            step, at = self._newest
            if db.execute(select(steps.c.at).where(steps.c.step == step)).scalar() != at:
                self._clear()
        self._newest = None if newest is None else (newest.step, newest.at)
        for pks in chunks(tuple(self._open)):
            self._put(db.execute(_ROWS.where(rollouts.c.pk.in_(pks))).all())
        last = int(self.rows["pk"][-1]) if self._count else 0
        oldest = (db.execute(select(func.max(rollouts.c.pk))).scalar() or 0) - MOST
        new = _ROWS.where(rollouts.c.pk > max(last, oldest)).order_by(rollouts.c.pk)
        for some in db.execute(new.execution_options(yield_per=_AT_ONCE)).partitions():
            self._put(some)
        self._forget(oldest)

    def _put(self, read: Sequence[Row[Any]]) -> None:
        """Put each row at its place, or at the end. By column, because the first look reads all rollouts."""
        if not read:
            return
        pk, group, task, *kinds, planned, roles, tools, failed, trained_in, reward, unrewarded, duration = zip(
            *read, strict=True
        )
        rows = np.empty(len(read), _ROW)
        rows["pk"] = pk
        rows["group"] = _numbers(self.groups, group)
        rows["task"] = _numbers(self.tasks, task)
        members: tuple[dict[Any, int], ...] = (_MODE, _STATE, _OUTCOME)
        for column, numbers, names in zip(("mode", "state", "outcome"), members, kinds, strict=True):
            rows[column] = [numbers[name] for name in names]
        rows["reward"] = np.array(reward, np.float64)  # None is nan
        rows["duration"] = np.nan_to_num(np.array(duration, np.float64), nan=-1.0)
        rows["unrewarded"] = [reason is not None for reason in unrewarded]
        for column, lists in (("roles", roles), ("tools", tools), ("failed_tools", failed)):
            rows[column] = _numbers(self.lists, lists)
        trained_steps = np.array([-1 if step is None else step for step in trained_in])
        is_validation = rows["mode"] == _MODE[RolloutMode.VALIDATION]
        planned_steps = np.array(planned) + ~is_validation
        rows["step"] = np.where((trained_steps < 0) | is_validation, planned_steps, trained_steps)
        places = np.array([self._open.get(key, -1) for key in pk])
        is_new = places < 0
        places[is_new] = self._count + np.arange(np.count_nonzero(is_new))
        self._make_room(int(places.max()) + 1)
        self._rows[places] = rows
        is_settled = self._are_settled(rows, trained_steps)
        for key in rows["pk"][is_settled].tolist():
            self._open.pop(key, None)
        self._open.update(zip(rows["pk"][~is_settled].tolist(), places[~is_settled].tolist(), strict=True))

    def _are_settled(self, rows: NDArray[Any], trained_steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """`trained_steps`: -1 = not trained."""
        if self._newest is None:
            return np.zeros(len(rows), np.bool_)
        is_done = (rows["state"] == _STATE[RolloutState.SUCCEEDED]) & ~np.isnan(rows["reward"])
        is_validated = (rows["mode"] == _MODE[RolloutMode.VALIDATION]) & is_done & (rows["step"] < self._newest[0])
        return np.asarray(np.where(trained_steps >= 0, trained_steps <= self._newest[0], is_validated))

    def _make_room(self, count: int) -> None:
        if count > len(self._rows):
            wider = np.empty(2 * count, _ROW)
            wider[: self._count] = self.rows
            self._rows = wider
        self._count = max(self._count, count)

    def _forget(self, oldest: int) -> None:
        """Forget rollouts up to this one, once they are a tenth of all: it moves all others."""
        gone = int(np.searchsorted(self.rows["pk"], oldest, side="right"))
        if gone <= MOST // 10:
            return
        self._rows, self._count = self.rows[gone:].copy(), self._count - gone
        self._open = {pk: place - gone for pk, place in self._open.items() if place >= gone}


def _numbers(numbers: dict[_K, int], values: Sequence[_K]) -> list[int]:
    """Look up each value's number; a new value gets the next one."""
    return [numbers.setdefault(value, len(numbers)) for value in values]


_NEWEST_STEP = select(steps.c.step, steps.c.at).order_by(steps.c.step.desc()).limit(1)
_ROWS = select(  # as `RolloutIndex._put` takes them
    rollouts.c.pk,
    rollouts.c.group_id,
    tasks.c.task_id,
    *(type_coerce(column, Text) for column in (rollouts.c.mode, rollouts.c.state, rollouts.c.outcome)),
    rollouts.c.step,
    rollouts.c.roles,
    rollouts.c.tools,
    rollouts.c.failed_tools,
    trained.c.step,
    scores.c.reward,
    scores.c.unrewarded,
    type_coerce(attempts.c.duration_s, Float),
).select_from(
    rollouts.join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .outerjoin(attempts, (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding))
    .outerjoin(scores, scores.c.attempt_pk == attempts.c.pk)
)
