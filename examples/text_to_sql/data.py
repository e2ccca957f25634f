"""The tasks: questions over generated databases, with a fixed seed, split by database.

    starter      databases the starter policy is cold-started on     (made in memory, see generator/starter.py)
    train        databases reinforcement learning sees
    validation   databases nothing has been trained on; starter, settings and checkpoints were chosen on them
    test         databases that nothing was trained or chosen on

`python data.py` writes the SQLite files of all but the starter's and prints a few tasks. `train_tasks()`,
`validation_tasks()` and `test_tasks()` do so on demand.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("generator")))
sys.path.insert(0, str(Path(__file__).parent))

from databases import Database, build_database
from mistakes import wrong_versions
from questions import KINDS, Query, Question
from reward import is_match
from sandbox import run_query_on

__all__ = [
    "build_split",
    "build_splits",
    "cache_directory",
    "database_schema",
    "schema_text",
    "test_tasks",
    "train_tasks",
    "validation_tasks",
]

SEED = 20250806
SPLITS = {"validation": (40, 4), "train": (240, 12), "test": (80, 4)}
"""Split -> databases, questions of each."""
SOURCES = ("data.py", "generator/databases.py", "generator/mistakes.py", "generator/questions.py")
DIFFICULTY_SHARES = {"easy": 0.25, "medium": 0.30, "hard": 0.25, "extra": 0.20}

SplitItem = tuple[Database, list[Question]]


def train_tasks(cache: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """Tasks to learn from: `{"id", "input": {"question", "schema", "db_id", "db_path"}, "answer", "metadata"}`."""
    yield from _tasks("train", cache)


def validation_tasks(cache: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """Tasks on databases of which no table layout occurs in training. As `train_tasks`."""
    yield from _tasks("validation", cache)


def test_tasks(cache: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """Tasks on databases of which no table layout occurs elsewhere, to be run once, at the end. As `train_tasks`."""
    yield from _tasks("test", cache)


def cache_directory(cache: str | Path | None = None) -> Path:
    """Where files are kept: the argument, else LIGHTNINGRL_CACHE, else ~/.cache/lightningrl; below it, text_to_sql."""
    if cache is not None:
        return Path(cache)
    return Path(os.environ.get("LIGHTNINGRL_CACHE", Path.home() / ".cache" / "lightningrl")) / "text_to_sql"


def schema_text(tables: list[tuple[str, list[str]]], foreign_keys: list[str] | None = None) -> str:
    """The schema as the agent's prompts show it: a line per table; foreign keys only where the names do not tell."""
    lines = [f"- {name} : {' '.join(columns)}" for name, columns in tables]
    if foreign_keys:
        lines.append(f"Keys: {', '.join(foreign_keys)}")
    return "\n".join(lines)


def database_schema(database: Database) -> str:
    return schema_text([(table.name, list(table.columns)) for table in database.tables])


def build_split(
    prefix: str, databases: int, questions: int, rng: random.Random, taken: set[str]
) -> Iterator[SplitItem]:
    """Databases whose signature is not in `taken` (it is added), each with its questions."""
    while databases:
        database = build_database(f"{prefix}_{databases:04d}", rng)
        if database.signature() in taken:
            continue
        taken.add(database.signature())
        databases -= 1
        connection = sqlite3.connect(":memory:")
        database.fill(connection)
        yield database, _ask_questions(database, connection, questions, rng)
        connection.close()


def _ask_questions(
    database: Database, connection: sqlite3.Connection, count: int, rng: random.Random
) -> list[Question]:
    asked: dict[str, Question] = {}
    for _ in range(count * 20):
        if len(asked) == count:
            break
        question = _ask_question(database, rng)
        if question is not None and _is_telling(question.gold, connection):
            asked.setdefault(question.text, question)
    return list(asked.values())


def _ask_question(database: Database, rng: random.Random) -> Question | None:
    difficulty = rng.choices(list(DIFFICULTY_SHARES), list(DIFFICULTY_SHARES.values()))[0]
    kinds = [(name, weight) for name, (grade, weight, _) in KINDS.items() if grade == difficulty]
    name = rng.choices([name for name, _ in kinds], [weight for _, weight in kinds])[0]
    try:
        text, gold = KINDS[name][2](database, rng)
    except IndexError:  # this database has no table with the columns that the question needs
        return None
    return Question(kind=name, difficulty=difficulty, text=text, gold=gold)


def _is_telling(gold: Query, connection: sqlite3.Connection) -> bool:
    """Whether the gold query gives rows, and rows that the usual mistakes do not give."""
    expected = run_query_on(connection, str(gold))
    if expected.error is not None:
        raise ValueError(f"gold query {str(gold)!r} failed: {expected.error}")
    if not expected.rows or all(value in (None, 0) for row in expected.rows for value in row):
        return False
    ordered = gold.order is not None
    return not any(
        is_match(expected, run_query_on(connection, str(wrong)), ordered=ordered) for wrong in wrong_versions(gold)
    )


@functools.cache
def build_splits() -> dict[str, list[SplitItem]]:
    taken: set[str] = set()
    return {
        name: list(build_split(name, databases, questions, random.Random(f"{SEED} {name}"), taken))
        for name, (databases, questions) in SPLITS.items()
    }


def _version() -> str:
    """A digest of the code that makes the data: a changed generator never reads an older generator's files."""
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(sources).hexdigest()[:12]


def _tasks(split: str, cache: str | Path | None) -> Iterator[dict[str, Any]]:
    items = build_splits()
    files = _write_files(items, cache_directory(cache))
    for database, questions in items[split]:
        for number, question in enumerate(questions):
            yield {
                "id": f"{database.db_id}/{number}",
                "input": {
                    "question": question.text,
                    "schema": database_schema(database),
                    "db_id": database.db_id,
                    "db_path": str(files / f"{database.db_id}.sqlite"),
                },
                "answer": str(question.gold),
                "metadata": {"difficulty": question.difficulty, "kind": question.kind, "db_id": database.db_id},
            }


def _write_files(splits: dict[str, list[SplitItem]], cache: Path) -> Path:
    """The folder with every database file; it appears whole or not at all."""
    target = cache / f"databases-{_version()}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    for items in splits.values():
        for database, _ in items:
            database.write(building / f"{database.db_id}.sqlite")
    try:
        building.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(building, ignore_errors=True)
        if not target.is_dir():
            raise
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default=None, help="folder for the database files")
    arguments = parser.parse_args()
    for split, tasks in (("train", train_tasks), ("validation", validation_tasks), ("test", test_tasks)):
        listed = list(tasks(arguments.cache))
        print(f"{split}: {len(listed)} tasks over {len({task['metadata']['db_id'] for task in listed})} databases")
        for task in listed[:3]:
            print(f"\n{task['input']['schema']}\n  {task['metadata']['difficulty']}: {task['input']['question']}")
            print(f"  {task['answer']}\n")


if __name__ == "__main__":
    main()
