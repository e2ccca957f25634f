"""A question-answering agent with the OpenAI Agents SDK: it searches passages until it can answer.

question -> researcher -> search -> researcher -> search -> ... -> <answer>...</answer>, or five turns taken
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from agents import Agent, MaxTurnsExceeded, RunContextWrapper, Runner, function_tool, set_tracing_disabled
from retriever import PASSAGES, Passage, Retriever, open_retriever

__all__ = ["answer", "researcher", "search", "show"]

set_tracing_disabled(True)  # else the SDK sends every run to OpenAI's dashboard

MAX_TURNS = 5


@function_tool
async def search(context: RunContextWrapper[Retriever], query: str) -> str:
    """Search the passages."""
    return show(context.context.search(query, PASSAGES))


researcher = Agent[Retriever](
    name="researcher",
    instructions="Search until you know the answer. Then say it as <answer> name </answer> and nothing else.",
    model="gpt-4o-mini",
    tools=[search],
)


def show(passages: list[Passage]) -> str:
    return (
        "\n".join(f"[{number}] {passage.title}: {passage.text}" for number, passage in enumerate(passages, start=1))
        or "nothing found"
    )


async def answer(task: dict[str, Any]) -> str:
    """What the agent says to `task["question"]`, searching the index in the folder `task["index"]`; "" if it comes to
    no end."""
    retriever = open_retriever(task["index"])
    try:
        result = await Runner.run(researcher, task["question"], context=retriever, max_turns=MAX_TURNS)
    except MaxTurnsExceeded:
        return ""
    return str(result.final_output)
