"""A math agent in AutoGen: an assistant with a calculator, which it may use again and again before it answers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calculator import calculator

__all__ = ["answer"]

SYSTEM = "Solve the problem with the calculator, step by step. Then say ### ANSWER: <number> ###."
MOST_TOOL_CALLS = 5

model = OpenAIChatCompletionClient(model="gpt-4o-mini", parallel_tool_calls=False)


async def answer(question: str) -> str:
    """The number that the agent answers with, as it wrote it; "" if it never said one."""
    agent = AssistantAgent(
        "calc", model, tools=[calculator], system_message=SYSTEM, max_tool_iterations=MOST_TOOL_CALLS
    )
    result = await agent.run(task=question)
    return extract_answer(str(getattr(result.messages[-1], "content", "")))


def extract_answer(text: str) -> str:
    found = re.findall(r"###\s*ANSWER:\s*(.+?)\s*###", text)
    return str(found[-1]) if found else ""
