"""Demonstrations for the starter policy: for each role, prompts as the agent makes them and imperfect answers.

write      the gold query with the writer's mistakes made in it
check      right verdicts on such queries, and on overcorrected ones
rewrite    of a wrong query: the gold query, overcorrected; a right one stays
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator

from data import build_split, database_schema
from mistakes import MISTAKES, OVERCORRECTIONS, imperfect
from prompts import check_prompt, rewrite_prompt, write_prompt
from questions import Query
from reward import is_match
from sandbox import Result, run_query_on

from lightningrl_torch.cold_start import Demonstration

__all__ = ["build_demonstrations"]

OVERCORRECTED = 0.30
"""Share of the queries shown to check and to rewrite that a rewriter has spoilt."""
SHARE_SHOWN_TO_CHECK = 0.6
"""Check is shown so much of the usual rate of mistakes, so that both verdicts are common."""


def build_demonstrations(
    databases: int, questions: int, seed: int, taken: set[str], *, is_faulty: bool = True
) -> Iterator[Demonstration]:
    """Three demonstrations, one for each role, of every question; databases with a signature in `taken` are skipped.

    With `is_faulty=False` every answer is right: write and rewrite give the gold query.
    """
    rng = random.Random(f"{seed} starter {is_faulty}")
    for database, asked in build_split("starter", databases, questions, rng, taken):
        connection = sqlite3.connect(":memory:")
        database.fill(connection)
        schema = database_schema(database)
        for question in asked:
            right = str(question.gold)
            write, flawed = _write(schema, question.text, question.gold, rng)
            check, verdict = _check(question.text, question.gold, connection, rng)
            rewrite, overcorrected = _rewrite(schema, question.text, question.gold, connection, rng)
            yield _answered(write, flawed if is_faulty else right)
            yield _answered(check, verdict)
            yield _answered(rewrite, overcorrected if is_faulty else right)
        connection.close()


def _answered(prompt: str, answer: str) -> Demonstration:
    return Demonstration(messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])


def _write(schema: str, question: str, gold: Query, rng: random.Random) -> tuple[str, str]:
    return write_prompt(schema, question), str(imperfect(gold, rng))


def _check(question: str, gold: Query, connection: sqlite3.Connection, rng: random.Random) -> tuple[str, str]:
    mistakes = OVERCORRECTIONS if rng.random() < OVERCORRECTED else MISTAKES
    query = imperfect(gold, rng, mistakes, SHARE_SHOWN_TO_CHECK)
    result, is_right = _run(query, gold, connection)
    return check_prompt(question, str(query), str(result)), "correct" if is_right else "incorrect"


def _rewrite(
    schema: str, question: str, gold: Query, connection: sqlite3.Connection, rng: random.Random
) -> tuple[str, str]:
    query = imperfect(gold, rng, OVERCORRECTIONS if rng.random() < OVERCORRECTED else MISTAKES)
    result, is_right = _run(query, gold, connection)
    answer = gold if is_right else imperfect(gold, rng, OVERCORRECTIONS)
    return rewrite_prompt(schema, question, str(query), str(result)), str(answer)


def _run(query: Query, gold: Query, connection: sqlite3.Connection) -> tuple[Result, bool]:
    result = run_query_on(connection, str(query))
    is_right = is_match(run_query_on(connection, str(gold)), result, ordered=gold.order is not None)
    return result, is_right
