"""An agent of LangChain's with one tool: `python NAME.py chat` or `stream`."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look_up(day: str) -> str:
    """Look a day's word up."""
    return "serendipity"


def answer() -> None:
    """Ask the agent."""
    model = ChatOpenAI(model="policy", temperature=0.7, seed=7, streaming=sys.argv[1] == "stream")
    agent = create_agent(model, [look_up], system_prompt="Answer in a word.")
    agent.invoke({"messages": [("user", "What is the word of the day?")]})
