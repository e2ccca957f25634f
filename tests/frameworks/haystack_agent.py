# /// script
# dependencies = ["haystack-ai==3.4.0", "opentelemetry-haystack==2.0.0"]
# ///
"""Haystack: a pipeline of an agent with two tools, streamed, and one that reviews; `opentelemetry-haystack` hands its
spans on."""

import os

os.environ["HAYSTACK_CONTENT_TRACING_ENABLED"] = "true"

from typing import Annotated

from haystack import Pipeline, tracing
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack_integrations.tracing.opentelemetry import OpenTelemetryTracer
from opentelemetry import trace

tracing.enable_tracing(OpenTelemetryTracer(trace.get_tracer("haystack")))


@tool
def get_weather(city: Annotated[str, "The city"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@tool
def book_table(city: Annotated[str, "The city"]) -> str:
    """Books a table outside."""
    raise ValueError(f"no table in {city}")


def answer(question: str) -> dict:
    model = OpenAIChatGenerator(model="gpt-4o-mini")
    planner = Agent(
        system_prompt="You plan evenings.",
        chat_generator=model,
        tools=[get_weather, book_table],
        streaming_callback=lambda chunk: None,
    )
    reviewer = Agent(system_prompt="You review plans.", chat_generator=OpenAIChatGenerator(model="gpt-4o-mini"))
    pipeline = Pipeline()
    pipeline.add_component("planner", planner)
    pipeline.add_component("reviewer", reviewer)
    pipeline.connect("planner.messages", "reviewer.messages")
    result = pipeline.run({"planner": {"messages": [ChatMessage.from_user(question)]}})
    return {"text": result["reviewer"]["last_message"].text}
