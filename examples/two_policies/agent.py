"""A writer and a critic on the plain `openai` client, as their author would write them. Nothing here knows of training.

write ─► execute ─► criticise ─┬─ accepted ─► done
             ▲                 └─ rejected ─► write again ─┐
             └─────────────────────────────────────────────┘   at most three drafts
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "text_to_sql"))

from openai import OpenAI
from prompts import check_prompt, rewrite_prompt, write_prompt
from sandbox import run_query

__all__ = ["answer"]

MAX_DRAFTS = 3

client = OpenAI()


def ask(model: str, prompt: str) -> str:
    reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
    return (reply.choices[0].message.content or "").strip()


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Answer `task["question"]` about the database at `task["db_path"]`, described by `task["schema"]`."""
    question, schema = task["question"], task["schema"]
    drafts: list[dict[str, Any]] = []
    query = ask("writer", write_prompt(schema, question))
    while True:
        result = str(run_query(task["db_path"], query))
        verdict = ask("critic", check_prompt(question, query, result))
        drafts.append({"query": query, "accepted": verdict == "correct"})
        if drafts[-1]["accepted"] or len(drafts) == MAX_DRAFTS:
            return {"query": query, "drafts": drafts}
        query = ask("writer", rewrite_prompt(schema, question, query, result))
