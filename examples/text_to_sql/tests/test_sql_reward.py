"""Execution match on a real database."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reward import calls, execution_match, first_try_correct, is_ordered, was_rescued
from sandbox import connect, run_query


@dataclass(frozen=True)
class Task:
    input: dict[str, Any]
    answer: str
    id: str = "t"
    metadata: object = None


@pytest.fixture
def db_path(tmp_path: Path) -> str:
    path = tmp_path / "pilots.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE pilots (name TEXT, age INTEGER)")
    connection.executemany("INSERT INTO pilots VALUES (?, ?)", [("anna", 30), ("ben", 40), ("carla", 50)])
    connection.commit()
    connection.close()
    return str(path)


def score(db_path: str, gold: str, query: str | None) -> float:
    return execution_match(Task(input={"db_path": db_path}, answer=gold), {"query": query}, None)


@pytest.mark.parametrize(
    ("gold", "query", "reward"),
    [
        ("SELECT name FROM pilots", "SELECT name FROM pilots ORDER BY age DESC", 1.0),
        ("SELECT name FROM pilots ORDER BY age", "SELECT name FROM pilots ORDER BY age DESC", 0.0),
        ("SELECT name FROM pilots ORDER BY age", "select name from pilots order by name", 1.0),
        ("SELECT avg(age) FROM pilots", "SELECT 40", 1.0),
        ("SELECT name FROM pilots", "SELECT name FROM pilots UNION ALL SELECT 'anna'", 0.0),
        ("SELECT name FROM pilots", "SELECT name, age FROM pilots", 0.0),
        ("SELECT name FROM pilots", "SELECT nam FROM pilots", 0.0),
        ("SELECT name FROM pilots", "SELECT name FROM pilots; DROP TABLE pilots", 0.0),
        ("SELECT name FROM pilots", "DELETE FROM pilots", 0.0),
        ("SELECT name FROM pilots", "", 0.0),
        ("SELECT name FROM pilots", "\x00", 0.0),
        ("SELECT name FROM pilots", "\ud800", 0.0),
        ("SELECT name FROM pilots", None, 0.0),
    ],
)
def test_execution_match(db_path: str, gold: str, query: str | None, reward: float) -> None:
    assert score(db_path, gold, query) == reward


def test_an_agent_that_returned_nothing_is_wrong(db_path: str) -> None:
    assert execution_match(Task(input={"db_path": db_path}, answer="SELECT 1"), None, None) == 0.0


def test_a_gold_query_that_fails_is_broken_data(db_path: str) -> None:
    with pytest.raises(ValueError, match="gold query 'SELECT nam FROM pilots' failed"):
        score(db_path, "SELECT nam FROM pilots", "SELECT 1")


def test_a_missing_database_is_not_a_wrong_answer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.sqlite"):
        score(str(tmp_path / "gone.sqlite"), "SELECT 1", "SELECT 1")


def test_an_endless_query_is_stopped(db_path: str) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    result = run_query(db_path, endless, time_limit_s=0.2)

    assert result.error == "interrupted"


def test_nothing_can_be_written(db_path: str) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connect(db_path).execute("DELETE FROM pilots")


def test_order_counts_only_at_the_top_level() -> None:
    assert is_ordered("SELECT a FROM t ORDER  BY b LIMIT 1")
    assert not is_ordered("SELECT a FROM t WHERE b = (SELECT b FROM t ORDER BY (c) LIMIT 1)")
    assert not is_ordered("SELECT a FROM t WHERE b = 'order by'")


def test_first_try_and_rescue(db_path: str) -> None:
    task = Task(input={"db_path": db_path}, answer="SELECT name FROM pilots")
    right, wrong = "SELECT name FROM pilots", "SELECT age FROM pilots"

    def output(*queries: str) -> dict[str, Any]:
        return {"query": queries[-1], "queries": list(queries), "turns": len(queries)}

    assert (first_try_correct(task, output(right)), was_rescued(task, output(right))) == (True, None)
    assert (first_try_correct(task, output(wrong)), was_rescued(task, output(wrong))) == (False, None)
    assert was_rescued(task, output(wrong, right)) is True
    assert was_rescued(task, output(wrong, wrong, wrong)) is False
    assert calls(output(wrong, right)) == 4
