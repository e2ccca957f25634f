"""The text-to-SQL example's agent, its tool made slow: a query takes 0.05 to 2 s, drawn from the task's digest, so that a task is as slow
in every run."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text_to_sql"
SHORTEST_S, LONGEST_S = 0.05, 2.0

sys.path.insert(0, str(EXAMPLE))
# this file is `agent`, too
sys.modules.pop("agent", None)
import agent as text_to_sql  # noqa: E402

__all__ = ["answer", "delay_s"]

run = text_to_sql.execute


def delay_s(question: str, query: int) -> float:
    """Of the task's query number `query`: log-uniform, so half are below 0.32 s and a tenth above 1.38 s."""
    digest = hashlib.sha256(f"{question}\n{query}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return float(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** share)


def execute(state: text_to_sql.State) -> dict[str, Any]:
    time.sleep(delay_s(state["question"], len(state["queries"])))
    return run(state)


text_to_sql.execute = execute
text_to_sql.graph = text_to_sql.build_graph()
answer = text_to_sql.answer
