"""An agent of one call, with worked examples and no calculator: letters to count, products and sums in the head."""

import functools

from openai import OpenAI

SYSTEM = "Answer with the result alone."
PRODUCT = "Solve the following multiplication: {}. Give only the result as your final answer."
SUM = "State the final answer to the following arithmetic problem: {} ="
LETTERS = 'How many times does the letter "{}" appear in the text: "{}"?'
EXAMPLES = (
    (LETTERS.format("e", "seven trees"), "4"),
    (PRODUCT.format("6 * 7"), "42"),
    (SUM.format("9 - 4 + 8"), "13"),
    (LETTERS.format("o", "ground"), "1"),
    (PRODUCT.format("3 * 9"), "27"),
    (SUM.format("2 - 7"), "-5"),
)
SHOWN = [
    {"role": role, "content": text}
    for example in EXAMPLES
    for role, text in zip(("user", "assistant"), example, strict=True)
]

client = functools.cache(OpenAI)


def answer(question: str) -> str:
    """The model's answer as text."""
    messages = [{"role": "system", "content": SYSTEM}, *SHOWN, {"role": "user", "content": question}]
    reply = client().chat.completions.create(model="gpt-4o-mini", messages=messages)
    return (reply.choices[0].message.content or "").strip()
