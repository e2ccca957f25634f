# dependencies = ["langchain-openai==1.7.3", "langchain==1.4.7"]
"""langchain-openai: an agent of LangChain's, streamed."""

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def write_answer(text: str) -> str:
    """Writes answer.txt."""
    Path("answer.txt").write_text(text)
    return "written"


agent = create_agent(ChatOpenAI(model="gpt-5", streaming=True), [write_answer])
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].text)
