"""The words of the agent's three calls. Short, and each complete in itself: no call carries an earlier one along."""

from __future__ import annotations

__all__ = ["check_prompt", "rewrite_prompt", "write_prompt"]


def write_prompt(schema: str, question: str) -> str:
    return f"Write one SQLite query that answers the question.\n{schema}\nQuestion: {question}\nAnswer with SQL only."


def check_prompt(question: str, query: str, result: str) -> str:
    record = f"Question: {question}\nQuery: {query}\nResult: {result}"
    return f"{record}\nCheck the query. Does it answer the question? Say correct or incorrect."


def rewrite_prompt(schema: str, question: str, query: str, result: str) -> str:
    return (
        f"This SQLite query is wrong. Rewrite it.\n{schema}\nQuestion: {question}\nQuery: {query}\n"
        f"Result: {result}\nRewrite the query, answer with SQL only."
    )
