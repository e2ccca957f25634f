"""One call: a question in, the calculation that answers it out. The prompt is examples/calculator_smollm2's."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/calculator_smollm2"))

from agent import SHOWN, SYSTEM
from calculator import calculate
from openai import OpenAI

client = functools.cache(OpenAI)


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, *SHOWN, {"role": "user", "content": question}]


def answer(question: str) -> str:
    create: Any = client().chat.completions.create
    return create(model="gpt-4o-mini", messages=prompt(question)).choices[0].message.content or ""


def value_of(text: str) -> str:
    """Value of the calculation that an answer asks for; `nothing` for any other text."""
    try:
        return str(calculate(str(json.loads(text)["calculate"])))
    except (ValueError, KeyError, TypeError):
        return "nothing"


def right(task: Any, output: str, trajectory: Any) -> float:
    return float(value_of(output) == task.answer)
