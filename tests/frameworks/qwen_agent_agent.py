# /// script
# dependencies = ["qwen-agent==0.0.34", "soundfile==0.14.0"]
# ///
"""Qwen-Agent: an assistant with two tools, streamed; it writes its tools into the prompt and reads calls from the text
itself."""

import json5
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("get_weather")
class GetWeather(BaseTool):
    description = "The weather of a city."
    parameters = [{"name": "city", "type": "string", "description": "The city", "required": True}]

    def call(self, params: str, **kwargs) -> str:
        return f"It is sunny in {json5.loads(params)['city']}."


@register_tool("book_table")
class BookTable(BaseTool):
    description = "Books a table outside."
    parameters = [{"name": "city", "type": "string", "description": "The city", "required": True}]

    def call(self, params: str, **kwargs) -> str:
        raise ValueError(f"no table in {json5.loads(params)['city']}")


def answer(question: str) -> dict:
    bot = Assistant(
        llm={"model": "gpt-4o-mini", "model_type": "oai"},
        system_message="You plan evenings.",
        function_list=["get_weather", "book_table"],
    )
    *_, response = bot.run(messages=[{"role": "user", "content": question}])
    return {"text": response[-1]["content"]}
