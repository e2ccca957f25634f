# /// script
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""Strands Agents: an agent that has another one as a tool; streamed, as Strands always does. It makes spans itself."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"It is sunny in {city}."


@tool
def book_table(city: str) -> str:
    """Books a table outside.

    Args:
        city: its name
    """
    raise ValueError(f"no table in {city}")


@tool
def host(request: str) -> str:
    """Books tables.

    Args:
        request: what to book
    """
    agent = Agent(
        name="Host", model=OpenAIModel(model_id="gpt-4o-mini"), tools=[book_table], system_prompt="You book tables."
    )
    return str(agent(request))


def answer(question: str) -> dict:
    agent = Agent(
        name="Planner",
        model=OpenAIModel(model_id="gpt-4o-mini"),
        tools=[get_weather, host],
        system_prompt="You plan evenings.",
    )
    result = agent(question)
    return {"text": str(result)}
