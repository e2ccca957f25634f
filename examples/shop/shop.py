"""The shop: its database, and questions about prices. `train` makes the database where it is missing."""

import os
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

DATABASE = Path(__file__).parent / "shop.sqlite"
ITEMS = (
    *("apple", "bread", "cheese", "lamp", "chair", "table", "phone", "shirt", "shoe", "book"),
    *("pen", "clock", "milk", "rice", "mug", "plate", "knife", "fork", "spoon", "towel"),
)
TRAIN, VALIDATION, TEST = 100, 40, 18
"""Questions of each set, none in two, of the 180 that there are: 20 items, one of each or 2 to 9."""
LARGER = range(10, 18)
"""Counts that only the test set asks for."""


def questions() -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Prices, and every question in a fixed order."""
    rng = random.Random(0)
    prices = {item: rng.randint(2, 40) for item in ITEMS}
    asked: dict[str, dict[str, Any]] = {}
    while len(asked) < TRAIN + VALIDATION + TEST:
        kind = rng.choice(["price", "total", "total", "total", "total"])
        item, count = rng.choice(ITEMS), rng.randint(2, 9)
        text = f"What does the {item} cost?" if kind == "price" else f"What do {count} of the {item} cost?"
        total = prices[item] if kind == "price" else count * prices[item]
        asked.setdefault(text, {"id": text, "input": text, "answer": str(total), "metadata": {"kind": kind}})
    return prices, list(asked.values())


def train() -> list[dict[str, Any]]:
    """Load the training questions, and make the database where it is missing."""
    make_database()
    return questions()[1][:TRAIN]


def validation() -> list[dict[str, Any]]:
    return questions()[1][TRAIN : TRAIN + VALIDATION]


def test() -> list[dict[str, Any]]:
    """A third set, which chooses nothing: what is left, and larger counts than any that training has."""
    prices, asked = questions()
    larger = [
        {"id": text, "input": text, "answer": str(count * prices[item]), "metadata": {"kind": "larger"}}
        for item in ITEMS
        for count in LARGER
        for text in [f"What do {count} of the {item} cost?"]
    ]
    return [*asked[TRAIN + VALIDATION :], *larger]


def make_database() -> None:
    """Write it whole, once: several processes may come here at a time."""
    if DATABASE.exists():
        return
    prices, _ = questions()
    number, name = tempfile.mkstemp(dir=DATABASE.parent, suffix=".new")
    os.close(number)
    with sqlite3.connect(name) as connection:
        connection.execute("create table items (name text primary key, price integer)")
        connection.executemany("insert into items values (?, ?)", prices.items())
    connection.close()
    Path(name).replace(DATABASE)
