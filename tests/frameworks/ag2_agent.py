# /// script
# dependencies = ["ag2[openai]==1.2.1"]
# ///
"""AG2 1: two agents, one with tools; AG2's own telemetry is a middleware of each agent."""

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from ag2.middleware.builtin.telemetry import TelemetryMiddleware

config = OpenAIConfig(model="gpt-4o-mini")


@tool
async def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@tool
async def book_table(city: str) -> str:
    """Books a table outside."""
    raise ValueError(f"no table in {city}")


async def answer(question: str) -> dict:
    planner = Agent(
        "planner",
        prompt="You plan evenings.",
        config=config,
        tools=[get_weather, book_table],
        middleware=[TelemetryMiddleware(agent_name="planner")],
    )
    reviewer = Agent(
        "reviewer", prompt="You review plans.", config=config, middleware=[TelemetryMiddleware(agent_name="reviewer")]
    )
    plan = await planner.ask(question)
    return {"text": (await reviewer.ask(plan.body)).body}
