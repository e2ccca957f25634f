"""A plain agent of two calls, its tasks and its reward: the more of the answer is letters, the better."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from openai import OpenAI


def answer(question: str) -> str:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    messages: list[Any] = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""


def tasks() -> Iterator[dict[str, Any]]:
    for number in range(16):
        yield {"id": f"task-{number}", "input": f"q{number}"}


def letters(task: Any, output: str, trajectory: Any) -> float:
    return sum(character.isalpha() for character in output) / max(1, len(output))
