"""An agent with a calculator, written by hand on the `openai` client; nothing in it knows of training.

question ─► model ─► {"calculate": "17 * 4"} ─► calculator ─► "Calculator: 68" ─► model ─► {"answer": 68}
"""

import functools
import json

from calculator import calculate
from openai import OpenAI

MOST_CALLS = 3
SYSTEM = """You answer questions with a calculator. Reply with one JSON object and nothing else.
To calculate: {"calculate": "12 + 5"}
To answer: {"answer": 17}"""
EXAMPLES = (
    ("What is 31 plus 12?", '{"calculate": "31 + 12"}', "Calculator: 43", '{"answer": 43}'),
    (
        "A box holds 6 cups. How many cups are in 14 boxes?",
        '{"calculate": "6 * 14"}',
        "Calculator: 84",
        '{"answer": 84}',
    ),
)
SHOWN = [
    {"role": role, "content": text}
    for example in EXAMPLES
    for role, text in zip(("user", "assistant", "user", "assistant"), example, strict=True)
]

client = functools.cache(OpenAI)


def answer(question: str) -> str:
    """The model's answer as text; `no answer` where it writes no action that there is, or calculates and never
    answers."""
    messages = [{"role": "system", "content": SYSTEM}, *SHOWN, {"role": "user", "content": question}]
    for _ in range(MOST_CALLS):
        reply = client().chat.completions.create(model="gpt-4o-mini", messages=messages)
        text = reply.choices[0].message.content or ""
        try:
            action = json.loads(text)
            if "answer" in action:
                return str(action["answer"])
            result = calculate(str(action["calculate"]))
        except (ValueError, KeyError, TypeError):
            return "no answer"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Calculator: {result}"}]
    return "no answer"
