# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel: an agent with a plugin of two tools and one that reviews; its spans are switched on by its own
variable."""

import os

os.environ["SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE"] = "true"

from typing import Annotated

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class EveningPlugin:
    @kernel_function(description="The weather of a city.")
    def get_weather(self, city: Annotated[str, "The city"]) -> Annotated[str, "The weather"]:
        return f"It is sunny in {city}."

    @kernel_function(description="Books a table outside.")
    def book_table(self, city: Annotated[str, "The city"]) -> Annotated[str, "The table"]:
        raise ValueError(f"no table in {city}")


async def answer(question: str) -> dict:
    planner = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="gpt-4o-mini"),
        name="Planner",
        instructions="You plan evenings.",
        plugins=[EveningPlugin()],
    )
    reviewer = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="gpt-4o-mini"), name="Reviewer", instructions="You review plans."
    )
    plan = await planner.get_response(question)
    return {"text": str((await reviewer.get_response(str(plan))).content)}
