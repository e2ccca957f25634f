"""Six questions in one conversation, each to be turned into calculator input; an error does not end it.

question ─► model ─► {"calculate": "17 * 4"} ─► calculator ─► "Result: 68. " + the next question ─► model …
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "calculator_smollm2"))

from calculator import calculate

__all__ = ["REFUSED", "answer"]

REFUSED: Final = "x"
"""The value of a call that the calculator could not read."""
SYSTEM: Final = (
    "You turn questions into calculator input. Reply with one JSON object and nothing else, "
    'like {"calculate": "12 + 5"}'
)
SHOWN: Final = (
    {"role": "user", "content": "What is 31 plus 12?"},
    {"role": "assistant", "content": '{"calculate": "31 + 12"}'},
    {"role": "user", "content": "Result: 43. How many legs do 14 spiders have?"},
    {"role": "assistant", "content": '{"calculate": "14 * 8"}'},
)
"""The start of every conversation."""
RESULT_SHOWN: Final = "112"

client = functools.cache(OpenAI)  # made when first called: the trainer reads tasks and rewards from this folder, too


def answer(questions: str) -> str:
    """The calculator's value for each question, joined by commas; `x` where it could not read the call."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *SHOWN]
    result, values = RESULT_SHOWN, []
    for question in questions.split("|"):
        messages.append({"role": "user", "content": f"Result: {result}. {question}"})
        reply = client().chat.completions.create(model="desk", messages=messages)
        text = reply.choices[0].message.content or ""
        value = _calculated(text)
        values.append(value)
        result = "error" if value == REFUSED else value[:8]
        messages.append({"role": "assistant", "content": text})
    return ",".join(values)


def _calculated(text: str) -> str:
    try:
        return str(calculate(str(json.loads(text)["calculate"])))
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError):  # what a policy may write
        return REFUSED
