# dependencies = ["openai-agents==0.24.0"]
"""openai-agents: one agent with one tool, on its default API."""

import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def write_answer(text: str) -> str:
    """Writes answer.txt."""
    Path("answer.txt").write_text(text)
    return "written"


set_tracing_disabled(True)
print(Runner.run_sync(Agent(name="writer", tools=[write_answer]), sys.argv[1]).final_output)
