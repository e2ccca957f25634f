# /// script
# dependencies = ["atomic-agents==1.1.11", "instructor==1.10.0"]
# ///
"""Atomic Agents: an agent whose typed answer chooses a tool, the tool, and an agent that reviews (calls go through
Instructor)."""

from typing import Literal

import instructor
import openai
from atomic_agents.agents.base_agent import BaseAgent, BaseAgentConfig, BaseAgentInputSchema, BaseIOSchema
from atomic_agents.lib.components.system_prompt_generator import SystemPromptGenerator
from pydantic import Field


class Choice(BaseIOSchema):
    """Which tool to use."""

    tool: Literal["weather", "table"] = Field(..., description="The tool.")
    city: str = Field(..., description="The city.")


class Review(BaseIOSchema):
    """The plan, reviewed."""

    text: str = Field(..., description="The text.")


def agent(background: str, output: type) -> BaseAgent:
    return BaseAgent(
        config=BaseAgentConfig(
            client=instructor.from_openai(openai.OpenAI()),
            model="gpt-4o-mini",
            system_prompt_generator=SystemPromptGenerator(background=[background]),
            output_schema=output,
        )
    )


def answer(question: str) -> dict:
    choice = agent("You plan evenings.", Choice).run(BaseAgentInputSchema(chat_message=question))
    found = f"It is sunny in {choice.city}." if choice.tool == "weather" else f"no table in {choice.city}"
    return {"text": agent("You review plans.", Review).run(BaseAgentInputSchema(chat_message=found)).text}
