# /// script
# dependencies = ["agno==3.1.10", "openai==3.54.0", "openinference-instrumentation-agno==1.0.15"]
# ///
"""Agno: a team of two agents, streamed; the instrumentation is OpenInference's, one line."""

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.team import Team
from openinference.instrumentation.agno import AgnoInstrumentor

AgnoInstrumentor().instrument()


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def book_table(city: str) -> str:
    """Books a table outside."""
    raise ValueError(f"no table in {city}")


def answer(question: str) -> dict:
    forecaster = Agent(
        name="Forecaster", role="Knows the weather", model=OpenAIChat(id="gpt-4o-mini"), tools=[get_weather]
    )
    host = Agent(name="Host", role="Books tables", model=OpenAIChat(id="gpt-4o-mini"), tools=[book_table])
    team = Team(name="Planner", model=OpenAIChat(id="gpt-4o-mini"), members=[forecaster, host], telemetry=False)
    text = "".join(event.content or "" for event in team.run(question, stream=True) if event.event == "TeamRunContent")
    return {"text": text}
