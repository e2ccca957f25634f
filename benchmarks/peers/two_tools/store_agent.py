"""The agent: it calls the tools that the model asks for, at most four times, and says what the model says at last.
Plain `openai`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from openai import OpenAI
from store_room import TOOLS, StoreRoom, prompt

MOST_TURNS = 4

client = OpenAI()


def answer(task: dict[str, Any]) -> str:
    room = StoreRoom()
    room.reset(task["room"])
    tools: Any = TOOLS
    messages: list[Any] = prompt(task["question"])
    for _ in range(MOST_TURNS):
        message = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=tools).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use(room, call.function.name, call.function.arguments)}
            for call in message.tool_calls
            if call.type == "function"
        ]
    return ""


def use(room: StoreRoom, name: str, arguments: str) -> str:
    try:
        tools: dict[str, Callable[..., str]] = {"find": room.find, "how_many": room.how_many}
        return tools[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"
