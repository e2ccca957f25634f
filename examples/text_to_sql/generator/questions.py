"""Questions and their gold queries: each kind of question is one function from a database to words and a `Query`.

The kinds are graded as Spider grades its own: easy, medium, hard, extra.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from databases import Database, Table

__all__ = ["KINDS", "Condition", "Nested", "Query", "Question"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nested:
    """The nested query `( SELECT function( column ) FROM table )`."""

    function: str
    column: str
    table: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    column: str
    operator: str
    value: str | Nested

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, Nested):
            value = f"( SELECT {value.function}( {value.column} ) FROM {value.table} )"
        return f"{self.column} {self.operator} {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A SELECT statement in parts, so that a demonstrator can get one part wrong. `str()` is the SQL."""

    select: str
    table: str
    join: tuple[str, str] | None = None
    """The joined table and the key that both have."""
    where: tuple[Condition, ...] = ()
    connective: str = "AND"
    group: str | None = None
    having: str | None = None
    order: str | None = None
    descending: bool = False
    limit: int | None = None

    def __str__(self) -> str:
        parts = [f"SELECT {self.select} FROM {self.table}"]
        if self.join is not None:
            parts.append(f"JOIN {self.join[0]} USING ( {self.join[1]} )")
        if self.where:
            parts.append("WHERE " + f" {self.connective} ".join(map(str, self.where)))
        if self.group is not None:
            parts.append(f"GROUP BY {self.group}")
        if self.having is not None:
            parts.append(f"HAVING {self.having}")
        if self.order is not None:
            parts.append(f"ORDER BY {self.order}" + (" DESC" if self.descending else ""))
        if self.limit is not None:
            parts.append(f"LIMIT {self.limit}")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    kind: str
    difficulty: str
    text: str
    gold: Query


Ask = Callable[[Database, random.Random], tuple[str, Query]]
KINDS: dict[str, tuple[str, float, Ask]] = {}
"""Kind of question -> difficulty, how often it is asked, the function that asks it."""


def kind(difficulty: str, weight: float = 1.0) -> Callable[[Ask], Ask]:
    def register(ask: Ask) -> Ask:
        KINDS[ask.__name__] = (difficulty, weight, ask)
        return ask

    return register


def _any_table(database: Database, rng: random.Random) -> Table:
    return rng.choice(database.tables)


def _family(database: Database, rng: random.Random) -> tuple[Table, Table, str]:
    """A child table, its parent, and the key that both have."""
    child = rng.choice([table for table in database.tables if table.parent is not None])
    parent = database.table(str(child.parent))
    return child, parent, parent.key


def _text_filter(table: Table, rng: random.Random) -> tuple[Condition, str]:
    column = rng.choice(table.texts)
    value = f"'{rng.choice(table.values(column))}'"
    words = rng.choice((f"whose {column} is {value}", f"with {column} {value}"))
    return Condition(column=column, operator="=", value=value), words


def _number_filter(table: Table, rng: random.Random) -> tuple[Condition, str]:
    column = rng.choice(table.numbers)
    values = table.values(column)
    value = str(rng.choice(values[1:-1] if len(values) > 2 else values))
    if rng.random() < 0.5:
        return Condition(column=column, operator=">", value=value), f"whose {column} is above {value}"
    return Condition(column=column, operator="<", value=value), f"whose {column} is below {value}"


def _aggregate(rng: random.Random) -> tuple[str, str]:
    return rng.choice((("avg", "average"), ("sum", "total"), ("max", "highest"), ("min", "lowest")))


def _show(rng: random.Random) -> str:
    return rng.choice(("show the", "list the", "what is the"))


# --- easy


@kind("easy", 0.5)
def count_rows(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    words = rng.choice((f"how many {table.name} are there?", f"count the {table.name}."))
    return words, Query(select="count(*)", table=table.name)


@kind("easy", 0.5)
def list_column(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column = rng.choice(table.texts + table.numbers)
    return f"{_show(rng)} {column} of all {table.name}.", Query(select=column, table=table.name)


@kind("easy")
def aggregate_column(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, (function, word) = rng.choice(table.numbers), _aggregate(rng)
    return f"{_show(rng)} {word} {column} of all {table.name}.", Query(
        select=f"{function}( {column} )", table=table.name
    )


@kind("easy")
def filter_text(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    condition, words = _text_filter(table, rng)
    column = rng.choice([name for name in table.texts + table.numbers if name != condition.column])
    return f"{_show(rng)} {column} of the {table.name} {words}.", Query(
        select=column, table=table.name, where=(condition,)
    )


@kind("easy")
def count_filtered(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    condition, words = _number_filter(table, rng)
    return f"how many {table.name} are there {words}?", Query(select="count(*)", table=table.name, where=(condition,))


@kind("easy")
def count_different(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column = rng.choice(table.texts)
    words = rng.choice(
        (f"how many different {column} do the {table.name} have?", f"count the different {column} of all {table.name}.")
    )
    return words, Query(select=f"count( DISTINCT {column} )", table=table.name)


# --- medium


@kind("medium")
def filter_number(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    condition, words = _number_filter(table, rng)
    column = rng.choice([name for name in table.texts + table.numbers if name != condition.column])
    return f"{_show(rng)} {column} of the {table.name} {words}.", Query(
        select=column, table=table.name, where=(condition,)
    )


@kind("medium")
def sort_rows(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, by, down = rng.choice(table.texts), rng.choice(table.numbers), rng.random() < 0.6
    words = "from high to low" if down else "from low to high"
    return f"{_show(rng)} {column} of all {table.name} sorted by {by} {words}.", Query(
        select=column, table=table.name, order=by, descending=down
    )


@kind("medium")
def count_groups(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column = rng.choice(table.texts)
    words = rng.choice(
        (f"for each {column} how many {table.name} are there?", f"count the {table.name} of each {column}.")
    )
    return words, Query(select=f"{column}, count(*)", table=table.name, group=column)


@kind("medium")
def aggregate_groups(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, number, (function, word) = rng.choice(table.texts), rng.choice(table.numbers), _aggregate(rng)
    return f"for each {column} {_show(rng)} {word} {number} of the {table.name}.", Query(
        select=f"{column}, {function}( {number} )", table=table.name, group=column
    )


@kind("medium", 1.5)
def join_filter(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    condition, words = _text_filter(parent, rng)
    column = rng.choice(child.texts + child.numbers)
    return f"{_show(rng)} {column} of the {child.name} of {parent.name} {words}.", Query(
        select=column, table=child.name, join=(parent.name, key), where=(condition,)
    )


@kind("medium")
def two_conditions(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    first, first_words = _text_filter(table, rng)
    second, second_words = _number_filter(table, rng)
    both = rng.random() < 0.6
    words = "and" if both else "or"
    return f"how many {table.name} are there {first_words} {words} {second_words}?", Query(
        select="count(*)", table=table.name, where=(first, second), connective=words.upper()
    )


# --- hard


@kind("hard")
def top_rows(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, by, limit, down = rng.choice(table.texts), rng.choice(table.numbers), rng.randint(2, 5), rng.random() < 0.6
    words = "highest" if down else "lowest"
    return f"{_show(rng)} {column} of the {limit} {table.name} with the {words} {by}.", Query(
        select=column, table=table.name, order=by, descending=down, limit=limit
    )


@kind("hard")
def frequent_groups(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, least = rng.choice(table.texts), rng.randint(2, 4)
    return f"which {column} have more than {least} {table.name}?", Query(
        select=column, table=table.name, group=column, having=f"count(*) > {least}"
    )


@kind("hard")
def beyond_average(database: Database, rng: random.Random) -> tuple[str, Query]:
    table = _any_table(database, rng)
    column, number = rng.choice(table.texts), rng.choice(table.numbers)
    operator, words = rng.choice(((">", "above"), ("<", "below")))
    average = Nested(function="avg", column=number, table=table.name)
    return f"{_show(rng)} {column} of the {table.name} whose {number} is {words} the average.", Query(
        select=column, table=table.name, where=(Condition(column=number, operator=operator, value=average),)
    )


@kind("hard")
def join_aggregate(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    condition, words = _text_filter(parent, rng)
    number, (function, word) = rng.choice(child.numbers), _aggregate(rng)
    return f"{_show(rng)} {word} {number} of the {child.name} of {parent.name} {words}.", Query(
        select=f"{function}( {number} )", table=child.name, join=(parent.name, key), where=(condition,)
    )


@kind("hard")
def without_children(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    column = rng.choice(parent.texts + parent.numbers)
    return f"{_show(rng)} {column} of the {parent.name} that have no {child.name}.", Query(
        select=column,
        table=parent.name,
        where=(Condition(column=key, operator="NOT IN", value=f"( SELECT {key} FROM {child.name} )"),),
    )


# --- extra


@kind("extra")
def most_children(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    column, down = rng.choice(parent.texts), rng.random() < 0.7
    words = "most" if down else "fewest"
    return f"which {column} of the {parent.name} has the {words} {child.name}?", Query(
        select=column,
        table=child.name,
        join=(parent.name, key),
        group=column,
        order="count(*)",
        descending=down,
        limit=1,
    )


@kind("extra")
def join_two_conditions(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    first, first_words = _text_filter(parent, rng)
    second, second_words = _number_filter(child, rng)
    column = rng.choice(child.texts)
    return f"{_show(rng)} {column} of the {child.name} {second_words} of {parent.name} {first_words}.", Query(
        select=column, table=child.name, join=(parent.name, key), where=(second, first)
    )


@kind("extra")
def join_extreme(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    column, number = rng.choice(parent.texts + parent.numbers), rng.choice(child.numbers)
    function, word = rng.choice((("max", "highest"), ("min", "lowest")))
    extreme = Nested(function=function, column=number, table=child.name)
    return f"{_show(rng)} {column} of the {parent.name} of the {child.name} with the {word} {number}.", Query(
        select=column,
        table=child.name,
        join=(parent.name, key),
        where=(Condition(column=number, operator="=", value=extreme),),
    )


@kind("extra")
def join_groups(database: Database, rng: random.Random) -> tuple[str, Query]:
    child, parent, key = _family(database, rng)
    column, number, (function, word) = rng.choice(parent.texts), rng.choice(child.numbers), _aggregate(rng)
    return f"for each {column} of the {parent.name} {_show(rng)} {word} {number} of the {child.name}.", Query(
        select=f"{column}, {function}( {number} )", table=child.name, join=(parent.name, key), group=column
    )
