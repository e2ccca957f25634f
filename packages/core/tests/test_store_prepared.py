"""Compiled statements: what they write and read is what SQLAlchemy's own way of the same statement does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, bindparam, create_engine, insert, select, update

from lightningrl.errors import StoreError
from lightningrl.store.prepared import Prepared
from lightningrl.store.schema import metadata, rollouts, tasks
from lightningrl.types import BranchPoint, Outcome, RolloutMode, RolloutState, SamplingSettings

ROLLOUT = {
    "id": "r\u2028 é",
    "task_pk": 1,
    "group_id": "g",
    "mode": RolloutMode.TRAIN,
    "step": 3,
    "sampling": SamplingSettings(temperature=0.25),
    "branch": BranchPoint(rollout_id="a", attempt=1, calls=2),
    "max_attempts": 2,
    "timeout_s": 1.5,
    "state": RolloutState.QUEUED,
    "created_at": 12.25,
}
COLUMNS = tuple(ROLLOUT)
ADD = Prepared(insert(rollouts), columns=COLUMNS)
FIND = Prepared(select(*(rollouts.c[name] for name in COLUMNS), rollouts.c.outcome).where(rollouts.c.id == bindparam("of_id")))
END = Prepared(
    update(rollouts).where(rollouts.c.id == bindparam("of_id")).values(forgiven=rollouts.c.forgiven + bindparam("more")),
    columns=("state", "outcome"),
)


@pytest.fixture
def db() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        connection.execute(insert(tasks).values(digest=b"1", task_id="t", body="long " * 1000))
        yield connection
    engine.dispose()


def run(db: Connection, statement: Prepared, **values: Any) -> Any:
    return statement.on(db.dialect).run(db.connection.cursor(), values)


@pytest.mark.parametrize("writer", ["prepared", "SQLAlchemy"])
@pytest.mark.parametrize("reader", ["prepared", "SQLAlchemy"])
def test_either_reads_what_either_wrote(db: Connection, writer: str, reader: str) -> None:
    if writer == "prepared":
        ADD.on(db.dialect).run_many(db.connection.cursor(), [ROLLOUT, {**ROLLOUT, "id": "2", "sampling": None, "branch": None}])
    else:
        db.execute(insert(rollouts), [ROLLOUT, {**ROLLOUT, "id": "2", "sampling": None, "branch": None}])
    for id_, expected in ((ROLLOUT["id"], ROLLOUT), ("2", {**ROLLOUT, "id": "2", "sampling": None, "branch": None})):
        if reader == "prepared":
            (row,) = FIND.on(db.dialect).rows(db.connection.cursor(), {"of_id": id_})
        else:
            row = db.execute(select(rollouts).where(rollouts.c.id == id_)).one()
        assert {name: getattr(row, name) for name in COLUMNS} == expected
        assert row.outcome is None and type(row.state) is RolloutState


def test_an_update_counts_and_adds(db: Connection) -> None:
    run(db, ADD, **ROLLOUT)
    for _ in range(2):
        assert run(db, END, of_id=ROLLOUT["id"], state=RolloutState.FAILED, outcome=Outcome.TIMEOUT, more=2).rowcount == 1
    assert run(db, END, of_id="nobody", state=RolloutState.FAILED, outcome=None, more=1).rowcount == 0
    row = db.execute(select(rollouts)).one()
    assert (row.state, row.outcome, row.forgiven) == (RolloutState.FAILED, Outcome.TIMEOUT, 4)


def test_a_value_that_a_column_refuses_says_so_as_the_column_does(db: Connection) -> None:
    with pytest.raises(StoreError, match="sampling"):
        run(db, ADD, **{**ROLLOUT, "sampling": {"temperature": float("nan"), "seed": object()}})
