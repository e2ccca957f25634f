"""The Spider data set, as it is unpacked from its own archive, as tasks of the same form as the generated ones.

    PATH/train_spider.json  PATH/dev.json  PATH/tables.json  PATH/database/<db_id>/<db_id>.sqlite

https://yale-lily.github.io/spider
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from data import schema_text

__all__ = ["load_spider", "spider_train_tasks", "spider_validation_tasks"]


def spider_train_tasks(path: str | Path) -> Iterator[dict[str, Any]]:
    """The questions of train_spider.json."""
    yield from load_spider(path, "train_spider")


def spider_validation_tasks(path: str | Path) -> Iterator[dict[str, Any]]:
    """The questions of dev.json, over databases that train_spider.json does not ask about."""
    yield from load_spider(path, "dev")


def load_spider(path: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """The questions of `split`.json. Raises `FileNotFoundError` or `ValueError` naming what is missing, before any
    task."""
    root = Path(path).expanduser().resolve()
    questions = _read(root / f"{split}.json")
    schemas = {entry["db_id"]: _schema(entry) for entry in _read(root / "tables.json")}
    files = {name: root / "database" / name / f"{name}.sqlite" for name in {item["db_id"] for item in questions}}
    for name, file in sorted(files.items()):
        if name not in schemas:
            raise ValueError(f"{split}.json asks about database {name!r}, which tables.json does not describe")
        if not file.is_file():
            raise FileNotFoundError(f"no database file {str(file)!r}; unpack Spider's `database` folder there")
    return (
        {
            "id": f"spider/{split}/{number}",
            "input": {
                "question": item["question"],
                "schema": schemas[item["db_id"]],
                "db_id": item["db_id"],
                "db_path": str(files[item["db_id"]]),
            },
            "answer": item["query"],
            "metadata": {"difficulty": "spider", "db_id": item["db_id"]},
        }
        for number, item in enumerate(questions)
    )


def _read(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}; give the folder that Spider's archive unpacks to")
    return json.loads(path.read_text(encoding="utf-8"))


def _schema(entry: dict[str, Any]) -> str:
    """The schema text of one entry of tables.json, which lists columns as [table number, name]."""
    names = entry["table_names_original"]
    columns = entry["column_names_original"]
    tables = [
        (name, [_quoted(column) for table, column in columns if table == number]) for number, name in enumerate(names)
    ]
    keys = [f"{_full(names, columns[left])} = {_full(names, columns[right])}" for left, right in entry["foreign_keys"]]
    return schema_text(tables, keys)


def _full(names: list[str], column: list[Any]) -> str:
    return f"{names[column[0]]}.{_quoted(column[1])}"


def _quoted(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'
