"""One call: a question about a database in, a query out. The plain `openai` client; nothing here knows of training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/text_to_sql"))

from openai import OpenAI
from prompts import write_prompt

client = OpenAI()


def answer(task: dict[str, Any]) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": write_prompt(task["schema"], task["question"])}]
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return {"query": (reply.choices[0].message.content or "").strip()}
