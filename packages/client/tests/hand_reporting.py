"""Agents without a framework that report on themselves, and one that runs in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from lightningrl import report_reward, role, tool

client = openai.OpenAI(api_key="sk-the-users-own")
async_client = openai.AsyncOpenAI(api_key="sk-the-users-own")
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def add(a: int, b: int) -> int:
    return a + b


def act(question: str) -> str:
    """A hand-written tool loop that says what became of its tools, and how good each of its answers was."""
    messages: list[Any] = [{"role": "user", "content": question}]
    with role("adder"):
        while True:
            reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[ADD])
            message = reply.choices[0].message
            report_reward("brief", 0.5, call=reply.id)
            if not message.tool_calls:
                break
            messages.append(message)
            calls: list[Any] = message.tool_calls
            for call in calls:
                arguments = json.loads(call.function.arguments)
                said: Any = "unknown"
                try:
                    with tool(call.function.name, arguments, id=call.id) as seen:
                        seen.result = said = add(**arguments)
                except TypeError as error:
                    said = str(error)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(said)})
    report_reward("polite", 1.0)
    report_reward("polite", 0.25)
    return message.content or ""


async def act_async(question: str) -> str:
    """The tool is no function call of the model's: a query in its text. Two at once."""

    async def one(number: int) -> str:
        with role(f"writer-{number}"):
            reply = await async_client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"{question} {number}"}]
            )
            with tool("sqlite", reply.choices[0].message.content, call=reply.id) as seen:
                await asyncio.sleep(0.01)
                seen.status = "invalid_arguments" if number else "ok"
        return reply.choices[0].message.content or ""

    said = await asyncio.gather(one(0), one(1))
    report_reward("count", len(said))
    return " ".join(said)


def act_by_post(question: str) -> str:
    """No package of ours: the base URL and the key. The redirection finds the rollout, as for model calls."""
    base = os.environ["OPENAI_BASE_URL"]
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{base}/rewards", json={"rewards": {"polite": 1, "odd": None}}, headers=key).raise_for_status()
    call = {
        "name": "sqlite",
        "arguments": {"q": 1},
        "result": [1, 2],
        "status": "error",
        "call": reply.id,
        "duration_s": 0.5,
    }
    client.post("/tool_calls", body={"tool_calls": [call]}, cast_to=httpx.Response)
    return reply.choices[0].message.content or ""


CHILD = """
import os
from lightningrl import report_reward, role, tool
report_reward("child", 2)
with role("child"), tool("grep", {"for": "x"}) as seen:
    seen.result = "found"
"""


def act_in_a_child(question: str) -> str:
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    return question


def act_on_no_call(question: str) -> str:
    report_reward("brief", 1.0, call="chatcmpl-nonsense")
    return question


def act_late(question: str) -> str:
    """A thread that outlives its rollout reports for nobody. The question is the file that tells it so."""

    def report_then() -> None:
        while not Path(question).exists():
            time.sleep(0.01)
        report_reward("late", 1.0)

    threading.Thread(target=report_then).start()
    return question


AGENTS = {one.__name__: one for one in (act, act_async, act_by_post, act_in_a_child, act_on_no_call, act_late)}


def act_as(task: dict[str, str]) -> Any:
    """Any of them, in one worker."""
    return AGENTS[task["agent"]](task["question"])
