"""The words of the agent's three calls. Short, and each complete in itself: no call carries an earlier one along.

A schema may show worked questions after its tables (`worked`): models that have seen no such task need to be shown, and
take turns of a conversation better than one long text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["check_prompt", "rewrite_prompt", "worked", "write_prompt"]

Turns = list[tuple[str, str]]
Prompt = Any
"""A text, or turns where the schema shows worked questions: LangChain's models take either."""
QUESTION = "\nQuestion: "


def worked(schema: str, pairs: Iterable[tuple[str, str]]) -> str:
    """`schema` with questions and their queries after its tables."""
    return schema + "".join(f"{QUESTION}{question}\n{query}" for question, query in pairs)


def write_prompt(schema: str, question: str) -> Prompt:
    if turns := _turns(schema):
        return [*turns, ("user", question)]
    return f"Write one SQLite query that answers the question.\n{schema}\nQuestion: {question}\nAnswer with SQL only."


def check_prompt(question: str, query: str, result: str) -> str:
    record = f"Question: {question}\nQuery: {query}\nResult: {result}"
    return f"{record}\nCheck the query. Does it answer the question? Say correct or incorrect."


def rewrite_prompt(schema: str, question: str, query: str, result: str) -> Prompt:
    if turns := _turns(schema):
        return [
            *turns,
            ("user", question),
            ("assistant", query),
            ("user", f"Result: {result}\nThat is wrong. {question}"),
        ]
    return (
        f"This SQLite query is wrong. Rewrite it.\n{schema}\nQuestion: {question}\nQuery: {query}\n"
        f"Result: {result}\nRewrite the query, answer with SQL only."
    )


def _turns(schema: str) -> Turns:
    """The conversation before the question; none where the schema shows no worked questions."""
    tables, *shown = schema.split(QUESTION)
    if not shown:
        return []
    turns = [("system", f"Write one SQLite query that answers the question.\n{tables}\nAnswer with SQL only.")]
    for pair in shown:
        question, query = pair.split("\n", 1)
        turns += [("user", question), ("assistant", query)]
    return turns
