"""Small databases: a few tables of plausible columns and rows, drawn from one shared vocabulary with a seed.

    pilots (pilot_id, name, age)  <--  flights (flight_id, pilot_id, month, distance)

Which columns a table has differs from database to database, so a policy has to read the schema. Two tables of one
database never share a column except a key, so that queries need no qualified names.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Database", "Table", "build_database"]

TEXT_VALUES = {
    "name": [
        "anna",
        "ben",
        "carla",
        "david",
        "emma",
        "felix",
        "grace",
        "henry",
        "iris",
        "jack",
        "karen",
        "leo",
        "maria",
        "nina",
        "oscar",
        "paula",
    ],
    "country": ["france", "spain", "italy", "japan", "brazil", "canada", "kenya", "india"],
    "city": ["paris", "london", "rome", "tokyo", "berlin", "madrid", "oslo", "lima"],
    "language": ["french", "english", "german", "hindi", "arabic", "swedish"],
    "status": ["active", "retired", "injured", "absent", "free"],
    "region": ["north", "south", "east", "west", "center"],
    "type": ["public", "private", "modern", "classic", "royal"],
    "manager": ["smith", "jones", "brown", "miller", "davis", "wilson"],
    "brand": ["acme", "nova", "orion", "zenith", "apex", "delta"],
    "color": ["red", "blue", "green", "black", "white", "silver"],
    "material": ["wood", "steel", "glass", "plastic", "leather"],
    "category": ["family", "sport", "comedy", "drama", "action"],
    "theme": ["summer", "winter", "love", "peace", "future"],
    "month": ["january", "march", "april", "june", "august", "october"],
    "season": ["spring", "autumn", "rainy", "dry"],
    "level": ["junior", "senior", "amateur", "expert", "novice"],
    "genre": ["rock", "jazz", "pop", "folk", "soul"],
    "sponsor": ["visa", "shell", "nike", "sony", "lego"],
}
NUMBER_RANGES = {
    "age": (18, 65),
    "salary": (20, 95),
    "height": (50, 99),
    "weight": (40, 99),
    "experience": (1, 40),
    "capacity": (10, 99),
    "rating": (1, 30),
    "area": (5, 80),
    "price": (2, 90),
    "stock": (1, 60),
    "speed": (30, 99),
    "power": (10, 90),
    "attendance": (10, 99),
    "budget": (5, 75),
    "duration": (1, 48),
    "distance": (3, 95),
    "year": (1990, 2023),
    "score": (1, 50),
}
ENTITIES = {
    "singers": "person", "students": "person", "teachers": "person", "pilots": "person", "doctors": "person",
    "players": "person", "employees": "person", "customers": "person",
    "stadiums": "place", "hotels": "place", "museums": "place", "schools": "place", "airports": "place",
    "shops": "place", "farms": "place", "stations": "place",
    "cars": "thing", "books": "thing", "phones": "thing", "ships": "thing", "movies": "thing", "games": "thing",
    "chairs": "thing", "albums": "thing",
    "concerts": "event", "matches": "event", "flights": "event", "festivals": "event", "courses": "event",
    "races": "event", "shows": "event", "trips": "event",
}  # fmt: skip
COLUMNS = {
    "person": (
        ["name", "country", "language", "status", "level"],
        ["age", "salary", "height", "weight", "experience", "score"],
    ),
    "place": (
        ["city", "country", "region", "type", "manager"],
        ["capacity", "rating", "area", "year", "stock", "budget"],
    ),
    "thing": (
        ["brand", "color", "material", "category", "genre"],
        ["price", "weight", "speed", "power", "year", "stock", "rating"],
    ),
    "event": (
        ["theme", "month", "season", "sponsor", "region"],
        ["attendance", "budget", "duration", "distance", "year", "score"],
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table: a key, perhaps a foreign key of the same name as its parent's key, text and number columns."""

    name: str
    key: str
    parent: str | None
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    """In the order of `columns`."""

    @property
    def columns(self) -> tuple[str, ...]:
        foreign = () if self.parent is None else (key_of(self.parent),)
        return (self.key, *foreign, *self.texts, *self.numbers)

    def values(self, column: str) -> list[object]:
        """The distinct values of a column, sorted."""
        index = self.columns.index(column)
        return sorted({row[index] for row in self.rows})  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, slots=True)
class Database:
    """Tables that refer to each other. `script()` is the SQL that makes it."""

    db_id: str
    tables: tuple[Table, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    def signature(self) -> str:
        """Equal for two databases with the same tables and columns."""
        return "; ".join(sorted(f"{table.name} {sorted(table.columns)}" for table in self.tables))

    def fill(self, connection: sqlite3.Connection) -> None:
        for table in self.tables:
            columns = ", ".join(
                f"{name} {'TEXT' if name in table.texts else 'INTEGER'}{' PRIMARY KEY' if name == table.key else ''}"
                for name in table.columns
            )
            connection.execute(f"CREATE TABLE {table.name} ({columns})")
            marks = ", ".join("?" for _ in table.columns)
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
        connection.commit()

    def write(self, path: Path) -> None:
        """Write the SQLite file; the caller moves it into place."""
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        self.fill(connection)
        connection.close()


def key_of(table_name: str) -> str:
    singular = table_name[:-2] if table_name.endswith("ches") else table_name[:-1]
    return f"{singular}_id"


def build_database(db_id: str, rng: random.Random) -> Database:
    """A database of two or three tables; every table but the first refers to an earlier one."""
    names = rng.sample(sorted(ENTITIES), rng.choice((2, 3, 3)))
    taken: set[str] = set()
    tables: list[Table] = []
    for name in names:
        texts, numbers = COLUMNS[ENTITIES[name]]
        free_texts = [column for column in texts if column not in taken]
        free_numbers = [column for column in numbers if column not in taken]
        chosen_texts = rng.sample(free_texts, min(len(free_texts), rng.choice((1, 2, 2))))
        chosen_numbers = rng.sample(free_numbers, min(len(free_numbers), rng.choice((1, 2, 2))))
        taken.update(chosen_texts, chosen_numbers)
        parent = rng.choice(tables) if tables else None
        tables.append(_fill_table(name, parent, chosen_texts, chosen_numbers, rng))
    rng.shuffle(tables)
    return Database(db_id=db_id, tables=tuple(tables))


def _fill_table(name: str, parent: Table | None, texts: list[str], numbers: list[str], rng: random.Random) -> Table:
    size = rng.randint(9, 12) if parent is None else rng.randint(12, 18)
    parent_keys = [] if parent is None else rng.sample([row[0] for row in parent.rows], len(parent.rows) - 3)
    common = {column: rng.sample(TEXT_VALUES[column], 4) for column in texts}
    rows = []
    for key in range(1, size + 1):
        foreign = [rng.choice(parent_keys)] if parent_keys else []
        text = [rng.choice(common[column]) for column in texts]
        number = [rng.randint(*NUMBER_RANGES[column]) for column in numbers]
        rows.append((key, *foreign, *text, *number))
    return Table(
        name=name,
        key=key_of(name),
        parent=None if parent is None else parent.name,
        texts=tuple(texts),
        numbers=tuple(numbers),
        rows=tuple(rows),
    )
