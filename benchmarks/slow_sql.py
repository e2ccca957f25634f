"""The text-to-SQL example's agent with a slow tool: a query takes 0.05 to 2 s, drawn from the task's digest, so that a task is as slow in
every run. What `asynchronous.py` trains."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "text_to_sql"
SHORTEST_S, LONGEST_S = 0.05, 2.0

sys.path.insert(0, str(EXAMPLE))
agent: Any = importlib.import_module("agent")
run = agent.execute

__all__ = ["answer"]


def delay_s(question: str, query: int) -> float:
    """Of the task's query number `query`: log-uniform, so half are below 0.32 s and a tenth above 1.38 s."""
    digest = hashlib.sha256(f"{question}\n{query}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return float(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** share)


def execute(state: Any) -> dict[str, Any]:
    time.sleep(delay_s(state["question"], len(state["queries"])))
    found: dict[str, Any] = run(state)
    return found


agent.execute = execute
agent.graph = agent.build_graph()
answer = agent.answer
