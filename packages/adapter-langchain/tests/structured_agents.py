"""An agent of LangChain's that answers with a structure."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    city: str
    year: int


@tool
def tables() -> str:
    """The tables of the database."""
    return "teachers, airports"


model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")  # type: ignore[arg-type]


def answer(task: dict[str, Any]) -> str:
    agent: Any = create_agent(model, [tables], response_format=ToolStrategy(Place, handle_errors=task["handle_errors"]))
    return str(agent.invoke({"messages": [("user", "where?")]})["structured_response"].city)
