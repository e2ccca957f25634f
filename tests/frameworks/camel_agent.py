# /// script
# dependencies = ["camel-ai==0.2.90", "mcp<2"]
# ///
"""CAMEL: a chat agent with two tools."""

import os

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils.token_counting import BaseTokenCounter


class Characters(BaseTokenCounter):
    """Counts without an encoding, which CAMEL would fetch from the internet."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return sum(len(str(message.get("content") or "")) for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city (str): The city.
    """
    return f"It is sunny in {city}."


def book_table(city: str) -> str:
    """Books a table outside.

    Args:
        city (str): The city.
    """
    raise ValueError(f"no table in {city}")


def answer(question: str) -> dict:
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type="gpt-4o-mini",
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        token_counter=Characters(),
    )
    planner = ChatAgent("You plan evenings.", model=model, tools=[FunctionTool(get_weather), FunctionTool(book_table)])
    return {"text": planner.step(question).msgs[0].content}
