"""Easy tasks for a small pretrained model: the questions of data.py that are graded easy, each with a schema that shows
six other questions of its database with their queries, one of each easy kind.

    - teams : team_id city points
    Question: how many teams are there?
    SELECT count(*) FROM teams
    ...

prompts.py turns what is shown into turns of the conversation. No shown query is the task's own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("generator")))
sys.path.insert(0, str(Path(__file__).parent))

import data
from databases import Database
from prompts import worked
from questions import KINDS

__all__ = ["train_tasks", "validation_tasks"]

SHOWN = ("count_rows", "list_column", "aggregate_column", "filter_text", "count_filtered", "count_different")


def train_tasks(cache: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """The easy ones of `data.train_tasks`, in the same form."""
    yield from _shown("train", data.train_tasks(cache))


def validation_tasks(cache: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """The easy ones of `data.validation_tasks`, on databases that training has not."""
    yield from _shown("validation", data.validation_tasks(cache))


def _shown(split: str, tasks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    databases = {database.db_id: database for database, _ in data.build_splits()[split]}
    for task in tasks:
        if task["metadata"]["difficulty"] == "easy":
            pairs = _questions(databases[task["metadata"]["db_id"]], task["answer"], random.Random(task["id"]))
            yield {**task, "input": {**task["input"], "schema": worked(task["input"]["schema"], pairs)}}


def _questions(database: Database, answer: str, rng: random.Random) -> list[tuple[str, str]]:
    """Questions about `database` with their queries, in any order, none of which is `answer`."""
    pairs = []
    for name in SHOWN:
        for _ in range(10):  # a database of few columns may have no second question of a kind
            text, gold = KINDS[name][2](database, rng)
            if str(gold) != answer:
                pairs.append((text, str(gold)))
                break
    rng.shuffle(pairs)
    return pairs
