"""Hostile queries: each is refused or stopped with a sentence, and changes nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox import QueryProcess, Result, run_query

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.fixture
def db_path(tmp_path: Path) -> str:
    path = tmp_path / "pilots.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE pilots (name TEXT, age INTEGER, photo BLOB)")
    connection.executemany("INSERT INTO pilots VALUES (?, ?, ?)", [("anna", 30, b"\xff"), ("ben", 9e999, None)])
    connection.commit()
    connection.close()
    return str(path)


@pytest.fixture
def process() -> Iterator[QueryProcess]:
    process = QueryProcess()
    yield process
    process.close()


@pytest.fixture(params=["here", "elsewhere"])
def run(request: pytest.FixtureRequest, process: QueryProcess) -> Callable[..., Result]:
    return run_query if request.param == "here" else process.run


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("VACUUM INTO 'stolen.sqlite'", "authoriz"),
        ("ATTACH 'stolen.sqlite' AS s", "authoriz"),
        ("CREATE TEMP TABLE t (x)", "authoriz"),
        ("DELETE FROM pilots", "authoriz"),
        ("PRAGMA journal_mode = wal", "authoriz"),
        ("SELECT * FROM pragma_database_list", "authoriz"),
        ("SELECT load_extension('x')", "authoriz"),
        ("SELECT zeroblob(10000000)", "string or blob too big"),
        ("SELECT length(printf('%.*c', 900000000, 'x'))", "authoriz"),
        (f"{ENDLESS} SELECT zeroblob(100000) FROM n", "more than 10000000 bytes"),
        (f"{ENDLESS} SELECT x FROM n", "more than 2000 rows"),
        (f"{ENDLESS} SELECT x FROM n ORDER BY randomblob(100000)", "out of memory"),
        (f"{ENDLESS} SELECT count(*) FROM n", "interrupted"),
        (f"{ENDLESS} SELECT max(replace(hex(zeroblob(90000)), '00000001', '')) FROM n", "interrupted"),
    ],
)
def test_a_hostile_query_is_refused_or_stopped(
    run: Callable[..., Result], db_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(db_path, query, 0.3 if error == "interrupted" else 10.0)
    assert result.error is not None
    assert error in result.error
    assert [file.name for file in tmp_path.iterdir()] == ["pilots.sqlite"]


def test_an_honest_query_gives_the_same_rows_here_and_elsewhere(db_path: str, process: QueryProcess) -> None:
    query = "WITH old AS (SELECT name, age, photo FROM pilots) SELECT upper(name), age, photo FROM old ORDER BY age"
    assert (
        run_query(db_path, query)
        == process.run(db_path, query)
        == Result(rows=(("ANNA", 30, b"\xff"), ("BEN", float("inf"), None)))
    )


def test_a_query_that_kills_its_process_is_an_error_and_the_next_one_is_answered(
    db_path: str, process: QueryProcess
) -> None:
    assert process.run(db_path, f"{ENDLESS} SELECT count(*) FROM n", -2.0).error == "too much time or memory"
    assert process.run(db_path, "SELECT count(*) FROM pilots").rows == ((2,),)
