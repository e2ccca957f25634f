"""Compiled statements: what they write and read is what SQLAlchemy's own way of the same statement does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, bindparam, create_engine, func, insert, select, update

from lightningrl.errors import StoreError
from lightningrl.records import Lease
from lightningrl.types import BranchPoint, Outcome, RolloutMode, RolloutState, SamplingSettings, Task
from lightningrl_server.store.call_log import append_calls
from lightningrl_server.store.queue_writes import create_rollouts, lease
from lightningrl_server.store.sql import open_database
from lightningrl_server.store.tables import attempts, calls, metadata, rollouts, tasks
from lightningrl_server.store.transaction import PreparedStatement, Transaction
from lightningrl_testing.store_conformance import make_call, make_spec

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
ADD = PreparedStatement(insert(rollouts), columns=COLUMNS)
FIND = PreparedStatement(
    select(*(rollouts.c[name] for name in COLUMNS), rollouts.c.outcome).where(rollouts.c.id == bindparam("of_id"))
)
END = PreparedStatement(
    update(rollouts)
    .where(rollouts.c.id == bindparam("of_id"))
    .values(forgiven=rollouts.c.forgiven + bindparam("more")),
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


def run(db: Connection, statement: PreparedStatement, **values: Any) -> Any:
    return statement.on(db.dialect).run(db.connection.cursor(), values)


@pytest.mark.parametrize("writer", ["prepared", "SQLAlchemy"])
@pytest.mark.parametrize("reader", ["prepared", "SQLAlchemy"])
def test_either_reads_what_either_wrote(db: Connection, writer: str, reader: str) -> None:
    if writer == "prepared":
        ADD.on(db.dialect).run_many(
            db.connection.cursor(), [ROLLOUT, {**ROLLOUT, "id": "2", "sampling": None, "branch": None}]
        )
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
        assert (
            run(db, END, of_id=ROLLOUT["id"], state=RolloutState.FAILED, outcome=Outcome.TIMEOUT, more=2).rowcount == 1
        )
    assert run(db, END, of_id="nobody", state=RolloutState.FAILED, outcome=None, more=1).rowcount == 0
    row = db.execute(select(rollouts)).one()
    assert (row.state, row.outcome, row.forgiven) == (RolloutState.FAILED, Outcome.TIMEOUT, 4)


def test_a_value_that_a_column_refuses_says_so_as_the_column_does(db: Connection) -> None:
    with pytest.raises(StoreError, match="sampling"):
        run(db, ADD, **{**ROLLOUT, "sampling": {"temperature": float("nan"), "seed": object()}})


def test_a_statement_that_reads_calls_sees_those_that_wait_for_their_insert(tmp_path: Path) -> None:
    """A transaction collects calls for one insert."""
    statement = PreparedStatement(select(calls.c.id).where(calls.c.attempt_pk == bindparam("of_pk")))
    count = PreparedStatement(
        select(select(func.count()).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("calls"))
    )
    task = Task(id="t", input="")
    leased = Lease(
        rollout_id="r", attempt=1, task=task, mode=RolloutMode.TRAIN, timeout_s=30.0, key="key", expires_at=30.0
    )
    database = open_database(f"sqlite:///{tmp_path / 'store.db'}")
    transaction = Transaction(database)
    with closing(database), closing(transaction), transaction.begin():
        create_rollouts(transaction, [make_spec("r")])
        lease(transaction, "worker", b"digest", 30.0, 0.0, exclusive=False)
        append_calls(transaction, [make_call(leased, "a", [1], [2])])
        assert [row.id for row in transaction.rows(statement, of_pk=1)] == ["a"]
        append_calls(transaction, [make_call(leased, "b", [1], [2])])
        assert [row.calls for row in transaction.rows(count)] == [2]


@pytest.mark.parametrize("ids", [[], ["2"], ["2", ROLLOUT["id"], "nobody"]])
def test_a_list_is_looked_up_as_sqlalchemy_does(db: Connection, ids: list[str]) -> None:
    ADD.on(db.dialect).run_many(db.connection.cursor(), [ROLLOUT, {**ROLLOUT, "id": "2"}])
    wanted = select(rollouts).where(rollouts.c.id.in_(bindparam("ids", expanding=True))).order_by(rollouts.c.pk)
    statement = PreparedStatement(wanted)
    for _ in range(2):
        assert [row._asdict() for row in statement.read(db, ids=ids)] == [
            row._asdict() for row in db.execute(wanted, {"ids": ids})
        ]


def test_a_list_beside_another_value_is_refused_not_read_without_it(db: Connection) -> None:
    both = select(rollouts).where(
        rollouts.c.id.in_(bindparam("ids", expanding=True)), rollouts.c.step == bindparam("of_step")
    )
    with pytest.raises(TypeError, match="ids"):
        PreparedStatement(both).read(db, ids=["2"], of_step=3)
