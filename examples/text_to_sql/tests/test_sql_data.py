"""The generated tasks: split by database, the same every time, telling; and Spider's own format."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import data
import pytest
from mistakes import MISTAKES, OVERCORRECTIONS, wrong_versions
from questions import Condition, Nested, Query
from sandbox import run_query
from spider import load_spider, spider_train_tasks, spider_validation_tasks


def signature(task: dict[str, Any]) -> frozenset[str]:
    return frozenset(task["input"]["schema"].splitlines())


def test_no_database_occurs_in_two_splits(cache: Path) -> None:
    train = {signature(task) for task in data.train_tasks(cache)}
    validation = {signature(task) for task in data.validation_tasks(cache)}

    test = {signature(task) for task in data.test_tasks(cache)}

    assert len(train) > 200
    assert len(validation) == 40
    assert len(test) == 80
    assert not train & validation
    assert not test & (train | validation)


def test_the_same_tasks_come_out_twice(cache: Path, tmp_path: Path) -> None:
    def without_paths(tasks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**task, "input": {**task["input"], "db_path": ""}} for task in tasks]

    assert without_paths(data.train_tasks(cache)) == without_paths(data.train_tasks(tmp_path))


def test_every_gold_query_gives_rows(cache: Path) -> None:
    for task in [*data.train_tasks(cache), *data.validation_tasks(cache), *data.test_tasks(cache)]:
        result = run_query(task["input"]["db_path"], task["answer"])
        assert result.error is None, task
        assert any(value not in (None, 0) for row in result.rows for value in row), task


def test_every_difficulty_occurs_in_each_split(cache: Path) -> None:
    for tasks in (data.train_tasks(cache), data.validation_tasks(cache), data.test_tasks(cache)):
        counts = Counter(task["metadata"]["difficulty"] for task in tasks)
        assert set(counts) == {"easy", "medium", "hard", "extra"}
        assert min(counts.values()) / sum(counts.values()) > 0.1


def test_ids_are_unique(cache: Path) -> None:
    splits = (data.train_tasks(cache), data.validation_tasks(cache), data.test_tasks(cache))
    ids = [task["id"] for tasks in splits for task in tasks]
    assert len(ids) == len(set(ids))


def test_a_killed_build_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "building-left-behind").mkdir()

    task = next(data.train_tasks(tmp_path))

    assert run_query(task["input"]["db_path"], task["answer"]).error is None


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNINGRL_CACHE", str(tmp_path))
    assert data.cache_directory() == tmp_path / "text_to_sql"


def test_mistakes_change_the_part_they_are_named_after() -> None:
    nested = Nested(function="avg", column="age", table="pilots")
    query = Query(select="name", table="pilots", where=(Condition(column="age", operator=">", value=nested),))

    assert [str(wrong) for wrong in wrong_versions(query)] == [
        "SELECT name FROM pilots WHERE age > avg( age )",
        "SELECT name FROM pilots WHERE age < ( SELECT avg( age ) FROM pilots )",
    ]


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """Two databases in Spider's own files."""
    for name in ("concert_singer", "pets_1"):
        folder = tmp_path / "database" / name
        folder.mkdir(parents=True)
        connection = sqlite3.connect(folder / f"{name}.sqlite")
        connection.execute('CREATE TABLE singer (Singer_ID INTEGER PRIMARY KEY, "Song release" TEXT)')
        connection.execute("CREATE TABLE concert (concert_ID INTEGER, Singer_ID INTEGER)")
        connection.execute("INSERT INTO singer VALUES (1, '2014')")
        connection.commit()
        connection.close()
    tables = {
        "table_names_original": ["singer", "concert"],
        "table_names": ["singer", "concert"],
        "column_names_original": [
            [-1, "*"], [0, "Singer_ID"], [0, "Song release"], [1, "concert_ID"], [1, "Singer_ID"]
        ],
        "column_types": ["text", "number", "text", "number", "number"],
        "primary_keys": [1],
        "foreign_keys": [[4, 1]],
    }  # fmt: skip
    (tmp_path / "tables.json").write_text(
        json.dumps([{"db_id": "concert_singer", **tables}, {"db_id": "pets_1", **tables}])
    )
    question = {"question": "How many singers do we have?", "query": "SELECT count(*) FROM singer", "sql": {}}
    (tmp_path / "train_spider.json").write_text(json.dumps([{"db_id": "pets_1", **question}]))
    (tmp_path / "dev.json").write_text(json.dumps([{"db_id": "concert_singer", **question}] * 2))
    return tmp_path


def test_spider_gives_tasks_of_the_same_form(spider: Path, cache: Path) -> None:
    generated = next(data.train_tasks(cache))
    (train,) = spider_train_tasks(spider)
    first, second = spider_validation_tasks(spider)

    assert set(train) == set(generated)
    assert set(train["input"]) == set(generated["input"])
    assert train["input"]["schema"] == (
        '- singer : Singer_ID "Song release"\n- concert : concert_ID Singer_ID\nKeys: concert.Singer_ID = singer.Singer_ID'
    )
    assert run_query(first["input"]["db_path"], first["answer"]).rows == ((1,),)
    assert first["id"] != second["id"]


def test_spider_says_what_is_missing(spider: Path) -> None:
    (spider / "database" / "pets_1" / "pets_1.sqlite").unlink()
    with pytest.raises(FileNotFoundError, match=r"pets_1\.sqlite"):
        load_spider(spider, "train_spider")
    with pytest.raises(FileNotFoundError, match=r"nothing\.json"):
        load_spider(spider, "nothing")


def test_the_rewriter_makes_none_of_the_writers_mistakes() -> None:
    assert not {mistake.name for mistake in MISTAKES} & {mistake.name for mistake in OVERCORRECTIONS}
    query = Query(select="avg( age )", table="pilots")
    assert [str(wrong) for mistake in OVERCORRECTIONS if (wrong := mistake.change(query))] == ["SELECT age FROM pilots"]
    assert [str(wrong) for wrong in wrong_versions(query)] == ["SELECT sum( age ) FROM pilots"]
