# /// script
# dependencies = ["griptape==1.13.0", "openai==3.54.0"]
# ///
"""Griptape: a pipeline of two tasks, the first with tools of its own class."""

from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Pipeline
from griptape.tasks import PromptTask
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Literal, Schema


class Evening(BaseTool):
    @activity(
        config={
            "description": "The weather of a city",
            "schema": Schema({Literal("city", description="The city"): str}),
        }
    )
    def get_weather(self, params: dict) -> TextArtifact:
        return TextArtifact(f"It is sunny in {params['values']['city']}.")

    @activity(
        config={
            "description": "Books a table outside",
            "schema": Schema({Literal("city", description="The city"): str}),
        }
    )
    def book_table(self, params: dict) -> TextArtifact:
        raise ValueError(f"no table in {params['values']['city']}")


def answer(question: str) -> dict:
    driver = OpenAiChatPromptDriver(model="gpt-4o-mini", stream=True)
    pipeline = Pipeline(
        tasks=[
            PromptTask("{{ args[0] }}", id="plan", prompt_driver=driver, tools=[Evening()]),
            PromptTask("Repeat it, politely: {{ parent_output }}", id="polish", prompt_driver=driver),
        ]
    )
    pipeline.run(question)
    return {"text": pipeline.output.value}
