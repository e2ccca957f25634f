# /// script
# dependencies = ["dspy==3.4.1", "openinference-instrumentation-dspy==0.1.48"]
# ///
"""DSPy: ReAct with two tools, then a judgement; the policy asks for its tools in text, DSPy's own way."""

import dspy
from openinference.instrumentation.dspy import DSPyInstrumentor

DSPyInstrumentor().instrument()

lm = dspy.LM("openai/gpt-4o-mini", cache=False)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def book_table(city: str) -> str:
    """Books a table outside."""
    raise ValueError(f"no table in {city}")


class Plan(dspy.Module):
    def __init__(self):
        self.react = dspy.ReAct("question -> answer", tools=[get_weather, book_table])
        self.judge = dspy.Predict("question, answer -> good: bool")

    def forward(self, question):
        found = self.react(question=question)
        return dspy.Prediction(answer=found.answer, good=self.judge(question=question, answer=found.answer).good)


def answer(question: str) -> dict:
    with dspy.context(lm=lm):
        found = Plan()(question=question)
    return {"text": found.answer, "good": found.good}
