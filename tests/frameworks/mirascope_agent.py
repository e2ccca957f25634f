# /// script
# dependencies = ["mirascope[openai]==2.8.2"]
# ///
"""Mirascope: a loop over streams with two tools, as its README has it."""

from mirascope import llm


@llm.tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@llm.tool
def book_table(city: str) -> str:
    """Books a table outside."""
    raise ValueError(f"no table in {city}")


def answer(question: str) -> dict:
    model = llm.Model("openai/gpt-4o-mini:completions")
    response = model.stream(question, tools=[get_weather, book_table])
    while True:
        response.finish()
        if not response.tool_calls:
            return {"text": response.text()}
        response = response.resume(response.execute_tools())
