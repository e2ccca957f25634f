"""The mistakes imperfect demonstrators make: each takes a gold `Query` and gives a wrong one, or None.

MISTAKES are the writer's: it forgets or confuses a part. OVERCORRECTIONS are the rewriter's: it mends what was wrong
and spoils what was right. The two have no mistake in common, so that one can see which role has learned. The data drops
questions whose answer the writer's mistakes would not change; the starter policy is cold-started on demonstrations in
which mistakes occur with the stated probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from questions import Condition, Nested, Query

__all__ = ["MISTAKES", "OVERCORRECTIONS", "Mistake", "imperfect", "wrong_versions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    name: str
    probability: float
    """How often the demonstrator makes it where it can be made."""
    change: Callable[[Query], Query | None]


def _forget_join(query: Query) -> Query | None:
    return None if query.join is None else replace(query, join=None)


def _bare_aggregate(query: Query) -> Query | None:
    """`WHERE age > avg( age )`, which SQLite refuses."""
    for condition in query.where:
        if isinstance(condition.value, Nested):
            value = f"{condition.value.function}( {condition.value.column} )"
            return _with_condition(query, condition, replace(condition, value=value))
    return None


def _flip_comparison(query: Query) -> Query | None:
    flipped = {">": "<", "<": ">"}
    for condition in query.where:
        if condition.operator in flipped:
            return _with_condition(query, condition, replace(condition, operator=flipped[condition.operator]))
    return None


def _drop_second_condition(query: Query) -> Query | None:
    return replace(query, where=query.where[:1]) if len(query.where) > 1 else None


def _in_for_not_in(query: Query) -> Query | None:
    for condition in query.where:
        if condition.operator == "NOT IN":
            return _with_condition(query, condition, replace(condition, operator="IN"))
    return None


def _other_aggregate(query: Query) -> Query | None:
    """`sum` for `avg`, `max` for `min`, and the other way round."""
    other = {"avg(": "sum(", "sum(": "avg(", "max(": "min(", "min(": "max("}
    words = query.select.split(" ")
    if not any(word in other for word in words):
        return None
    return replace(query, select=" ".join(other.get(word, word) for word in words))


def _forget_distinct(query: Query) -> Query | None:
    return replace(query, select=query.select.replace("DISTINCT ", "")) if "DISTINCT" in query.select else None


def _forget_direction(query: Query) -> Query | None:
    return replace(query, descending=False) if query.descending else None


def _where_for_having(query: Query) -> Query | None:
    """`WHERE count(*) > 2 GROUP BY ...`, which SQLite refuses."""
    if query.having is None:
        return None
    column, operator, value = query.having.split(" ")
    return replace(query, where=(Condition(column=column, operator=operator, value=value),), having=None)


def _forget_group(query: Query) -> Query | None:
    return replace(query, group=None) if query.group is not None and query.having is None else None


def _other_select(query: Query) -> Query | None:
    """Everything for one column or a count, the column for an aggregate, the number alone for a group."""
    column, comma, rest = query.select.partition(", ")
    if comma:
        return replace(query, select=rest)
    if column.startswith("count( DISTINCT"):
        return replace(query, select=column.removeprefix("count( ").removesuffix(" )"))
    if column == "count(*)" or "(" not in column:
        return replace(query, select="*")
    return replace(query, select=column.split(" ")[1])


def _add_limit(query: Query) -> Query | None:
    is_one_row = "(" in query.select and query.group is None
    return None if query.limit is not None or is_one_row else replace(query, limit=1)


def _with_condition(query: Query, old: Condition, new: Condition) -> Query:
    return replace(query, where=tuple(new if condition == old else condition for condition in query.where))


MISTAKES = (
    Mistake(name="forget_join", probability=0.58, change=_forget_join),
    Mistake(name="bare_aggregate", probability=0.58, change=_bare_aggregate),
    Mistake(name="flip_comparison", probability=0.58, change=_flip_comparison),
    Mistake(name="drop_second_condition", probability=0.58, change=_drop_second_condition),
    Mistake(name="in_for_not_in", probability=0.58, change=_in_for_not_in),
    Mistake(name="other_aggregate", probability=0.58, change=_other_aggregate),
    Mistake(name="forget_distinct", probability=0.58, change=_forget_distinct),
    Mistake(name="forget_direction", probability=0.58, change=_forget_direction),
    Mistake(name="where_for_having", probability=0.58, change=_where_for_having),
    Mistake(name="forget_group", probability=0.58, change=_forget_group),
)

OVERCORRECTIONS = (
    Mistake(name="other_select", probability=0.72, change=_other_select),
    Mistake(name="add_limit", probability=0.58, change=_add_limit),
)


def imperfect(gold: Query, rng: random.Random, mistakes: tuple[Mistake, ...] = MISTAKES, share: float = 1.0) -> Query:
    """The gold query after each mistake that applies has been made with `share` times its probability."""
    query = gold
    for mistake in mistakes:
        changed = mistake.change(query)
        if changed is not None and rng.random() < mistake.probability * share:
            query = changed
    return query


def wrong_versions(gold: Query) -> list[Query]:
    """The gold query with one mistake in it, once for each mistake that applies."""
    changed = (mistake.change(gold) for mistake in MISTAKES)
    return [query for query in changed if query is not None]
