"""A text-to-SQL agent in LangGraph.

START -> write -> execute -> check -- correct, or three queries tried --> END
                     ^          |
                     +- rewrite <- incorrect
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TypedDict

sys.path.insert(0, str(Path(__file__).parent))

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from prompts import check_prompt, rewrite_prompt, write_prompt
from sandbox import run_query

__all__ = ["answer", "graph"]

MAX_QUERIES = 3

writer = ChatOpenAI(model="gpt-4o-mini")
checker = ChatOpenAI(model="gpt-4o-mini")
rewriter = ChatOpenAI(model="gpt-4o-mini")


class State(TypedDict):
    question: str
    schema: str
    db_path: str
    queries: list[str]
    result: str
    verdict: str


def write(state: State) -> dict[str, Any]:
    message = writer.invoke(write_prompt(state["schema"], state["question"]))
    return {"queries": [extract_sql(message.text)]}


def execute(state: State) -> dict[str, Any]:
    return {"result": str(run_query(state["db_path"], state["queries"][-1]))}


def check(state: State) -> dict[str, Any]:
    message = checker.invoke(check_prompt(state["question"], state["queries"][-1], state["result"]))
    return {"verdict": "incorrect" if "incorrect" in message.text.lower() else "correct"}


def rewrite(state: State) -> dict[str, Any]:
    prompt = rewrite_prompt(state["schema"], state["question"], state["queries"][-1], state["result"])
    message = rewriter.invoke(prompt)
    return {"queries": [*state["queries"], extract_sql(message.text)]}


def after_check(state: State) -> str:
    if state["verdict"] == "correct" or len(state["queries"]) >= MAX_QUERIES:
        return END
    return "rewrite"


def extract_sql(text: str) -> str:
    """The statement in a model's answer: inside its code fence if it has one, without the closing semicolon."""
    fenced = re.search(r"```(?:sql(?:ite)?)?\s*(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return (fenced.group(1) if fenced else text).strip().rstrip(";").strip()


def build_graph() -> Any:
    builder = StateGraph(State)
    for node in (write, execute, check, rewrite):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "write")
    builder.add_edge("write", "execute")
    builder.add_edge("execute", "check")
    builder.add_conditional_edges("check", after_check, ["rewrite", END])
    builder.add_edge("rewrite", "execute")
    return builder.compile()


graph = build_graph()


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Answer `task["question"]` about the database at `task["db_path"]`, described by `task["schema"]`."""
    start = {"question": task["question"], "schema": task["schema"], "db_path": task["db_path"], "queries": []}
    queries = graph.invoke(start)["queries"]
    return {"query": queries[-1], "queries": queries, "turns": len(queries)}
