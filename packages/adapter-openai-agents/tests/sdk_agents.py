"""Agents of every kind, as users write them: clients made at import time, with their own key. They know nothing of us.

In the environment: `API` is `responses` or `chat_completions`; `TRACING=run` switches the SDK's tracing off in the
run's configuration.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import agents
import openai
from agents import (
    Agent,
    GuardrailFunctionOutput,
    RunConfig,
    Runner,
    function_tool,
    handoff,
    input_guardrail,
)
from pydantic import BaseModel

agents.set_trace_processors([])  # the default one would post to api.openai.com
client = openai.AsyncOpenAI(api_key="sk-the-users-own")
agents.set_default_openai_client(client, use_for_tracing=False)
agents.set_default_openai_api("responses" if os.environ.get("API", "responses") == "responses" else "chat_completions")
MODEL = "gpt-4o-mini"


def config(**options: Any) -> RunConfig:
    return RunConfig(tracing_disabled=os.environ.get("TRACING") == "run", **options)


draft = Agent(name="draft", instructions="ROLE=draft", model=MODEL)
review = Agent(name="review", instructions="ROLE=review", model=MODEL)


def synchronous(text: str) -> Any:
    return [Runner.run_sync(agent, text, run_config=config()).final_output for agent in (draft, review)]


async def asynchronous(text: str) -> Any:
    return [(await Runner.run(agent, text, run_config=config())).final_output for agent in (draft, review)]


async def async_stream(text: str) -> Any:
    answers = []
    for agent in (draft, review):
        running = Runner.run_streamed(agent, text, run_config=config())
        async for _ in running.stream_events():
            await asyncio.sleep(0)
        answers.append(running.final_output)
    return answers


def stream(text: str) -> Any:
    return asyncio.run(async_stream(text))


def threads(text: str) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda part: Runner.run_sync(draft, f"{text} part {part}", run_config=config()).final_output, range(3)
            )
        )


# --- tools ---


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def fail() -> str:
    """Fail, as the SDK handles it by default: the model gets a text."""
    raise ValueError("the tool is broken")


def explain(context: Any, error: Exception) -> str:
    return f"sorry: {error}"


@function_tool(failure_error_function=explain)
def fail_politely() -> str:
    """Fail, with a text of the user's own."""
    raise ValueError("the tool is broken")


@function_tool(failure_error_function=None)
def fail_hard() -> str:
    """Fail, and end the run."""
    raise ValueError("the tool is broken")


@function_tool(failure_error_function=None)
def add_hard(a: int, b: int) -> int:
    """Add two numbers; other arguments end the run."""
    return a + b


@function_tool
def time_out() -> str:
    """Fail with an own timeout."""
    raise TimeoutError("the database does not answer")


@function_tool
async def ask_bare(question: str) -> str:
    """Ask a bare client."""
    answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
    return str(answer.choices[0].message.content)


async def sleep_long() -> str:
    """Takes longer than it may."""
    await asyncio.sleep(30)
    return "slept"


def apologise(context: Any, error: Exception) -> str:
    return "too slow, sorry"


tools: list[Any] = [add, fail, fail_politely, fail_hard, add_hard, time_out, ask_bare]
try:
    tools.append(function_tool(sleep_long, name_override="sleep", timeout=0.05))
    tools.append(
        function_tool(sleep_long, name_override="sleep_politely", timeout=0.05, timeout_error_function=apologise)
    )
    tools.append(
        function_tool(sleep_long, name_override="sleep_hard", timeout=0.05, timeout_behavior="raise_exception")
    )
except TypeError:  # tools have no timeout in this version
    pass

worker = Agent(name="worker", instructions="ROLE=worker", model=MODEL, tools=tools)


def use_tools(text: str) -> Any:
    return Runner.run_sync(worker, text, run_config=config()).final_output


async def use_tools_streamed(text: str) -> Any:
    running = Runner.run_streamed(worker, text, run_config=config())
    async for _ in running.stream_events():
        pass
    return running.final_output


def use_tools_forgiving(text: str) -> Any:
    """Unknown tools are an answer to the model, where the SDK has that option."""
    return Runner.run_sync(
        worker, text, run_config=config(tool_not_found_behavior="return_error_to_model")
    ).final_output


# --- several agents ---


class Reason(BaseModel):
    reason: str


async def note(context: Any, reason: Reason) -> None:
    """Takes the handoff's input."""


writer = Agent(name="writer", instructions="ROLE=writer", model=MODEL, tools=[add])
editor = Agent(name="editor", instructions="ROLE=editor", model=MODEL)
edit = handoff(editor, on_handoff=note, input_type=Reason)
triage = Agent(
    name="triage",
    instructions="ROLE=triage",
    model=MODEL,
    handoffs=[writer, handoff(editor, on_handoff=note, input_type=Reason)],
)
boss = Agent(
    name="boss",
    instructions="ROLE=boss",
    model=MODEL,
    tools=[add, writer.as_tool("consult", "Ask the writer."), worker.as_tool("delegate", "Ask the worker.")],
)


def hand_over(text: str) -> Any:
    result = Runner.run_sync(triage, text, run_config=config())
    return result.last_agent.name


async def hand_over_streamed(text: str) -> Any:
    running = Runner.run_streamed(triage, text, run_config=config())
    async for _ in running.stream_events():
        pass
    return running.last_agent.name


def consult(text: str) -> Any:
    return Runner.run_sync(boss, text, run_config=config()).final_output


async def consult_streamed(text: str) -> Any:
    running = Runner.run_streamed(boss, text, run_config=config())
    async for _ in running.stream_events():
        pass
    return running.final_output


# --- guardrails ---

guard = Agent(name="guard", instructions="ROLE=guard", model=MODEL)


@input_guardrail
async def ask_guard(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
    """Runs beside the first model call: an agent, and a bare client."""
    answer = await Runner.run(guard, text, run_config=config())
    said = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"{text} BARE=yes"}])
    return GuardrailFunctionOutput(output_info=said.id, tripwire_triggered=str(answer.final_output) == "stop")


guarded = Agent(name="guarded", instructions="ROLE=guarded", model=MODEL, input_guardrails=[ask_guard])


def be_guarded(text: str) -> Any:
    return Runner.run_sync(guarded, text, run_config=config()).final_output


# --- all of them ---

AGENTS: dict[str, Callable[[str], Any]] = {
    "sync": synchronous,
    "async": asynchronous,
    "stream": stream,
    "async_stream": async_stream,
    "threads": threads,
    "handoff": hand_over,
    "streamed_handoff": hand_over_streamed,
    "subagent": consult,
    "streamed_subagent": consult_streamed,
    "guardrail": be_guarded,
    "tools": use_tools,
}


def answer(task: dict[str, str]) -> Any:
    """All kinds in one agent; for the asynchronous ones an awaitable comes back."""
    return AGENTS[task["kind"]](task["text"])
