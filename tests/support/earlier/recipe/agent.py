"""An ordinary agent of two calls, the second of which goes on from the first."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

client = OpenAI()


def answer(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return said
