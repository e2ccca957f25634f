# /// script
# dependencies = ["agno==3.1.10", "openai==3.54.0", "openinference-instrumentation-agno==1.0.15"]
# ///
"""Agno: all rollouts ask one agent, whose pool of threads asks the model for memories beside each answer."""

import threading

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat
from openinference.instrumentation.agno import AgnoInstrumentor

AgnoInstrumentor().instrument()
planner = Agent(
    name="Planner", model=OpenAIChat(id="gpt-4o-mini"), db=InMemoryDb(), update_memory_on_run=True, telemetry=False
)
together = threading.Barrier(4)


def answer(question: str) -> dict:
    together.wait(timeout=100)
    text = planner.run(question, user_id=question).content
    together.wait(timeout=100)
    return {"text": text}
