"""LangGraph agents of every kind, as users write them: clients made at import time, with their own key. They know
nothing of us."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import openai
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition
from pydantic import SecretStr

model = ChatOpenAI(model="gpt-4o-mini", api_key=SecretStr("sk-the-users-own"))


class State(TypedDict):
    text: str
    answers: list[str]


def prompt(state: State, role: str) -> str:
    return f"{state['text']} ROLE={role} after {len(state['answers'])} answers"


def build_graph(draft: Callable[..., Any], review: Callable[..., Any]) -> Any:
    graph = StateGraph(State)
    graph.add_node("draft", draft)
    graph.add_node("review", review)
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "review")
    graph.add_edge("review", END)
    return graph.compile()


def call(role: str) -> Callable[[State], Any]:
    return lambda state: {"answers": [*state["answers"], model.invoke(prompt(state, role)).text]}


def acall(role: str) -> Callable[[State], Any]:
    async def node(state: State) -> Any:
        return {"answers": [*state["answers"], (await model.ainvoke(prompt(state, role))).text]}

    return node


def stream_call(role: str) -> Callable[[State], Any]:
    return lambda state: {
        "answers": [*state["answers"], "".join(chunk.text for chunk in model.stream(prompt(state, role)))]
    }


def astream_call(role: str) -> Callable[[State], Any]:
    async def node(state: State) -> Any:
        return {
            "answers": [*state["answers"], "".join([chunk.text async for chunk in model.astream(prompt(state, role))])]
        }

    return node


def threads_call(role: str) -> Callable[[State], Any]:
    def node(state: State) -> Any:
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(model.invoke, f"{prompt(state, role)} part {part}") for part in range(3)]
            return {"answers": [*state["answers"], *(answer.result().text for answer in answers)]}

    return node


sync_graph = build_graph(call("draft"), call("review"))
async_graph = build_graph(acall("draft"), acall("review"))
stream_graph = build_graph(stream_call("draft"), stream_call("review"))
async_stream_graph = build_graph(astream_call("draft"), astream_call("review"))
threads_graph = build_graph(threads_call("draft"), threads_call("review"))


def synchronous(text: str) -> Any:
    return sync_graph.invoke({"text": text, "answers": []})


async def asynchronous(text: str) -> Any:
    return await async_graph.ainvoke({"text": text, "answers": []})


def stream(text: str) -> Any:
    return [part.text for part, _ in stream_graph.stream({"text": text, "answers": []}, stream_mode="messages")]


async def async_stream(text: str) -> Any:
    modes = ["updates", "messages"]
    return [mode async for mode, _ in async_stream_graph.astream({"text": text, "answers": []}, stream_mode=modes)]


def threads(text: str) -> Any:
    return threads_graph.invoke({"text": text, "answers": []})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Fail."""
    raise ValueError("the tool is broken")


tool_agent = create_agent(model, [add, fail])


def asked(text: str) -> Any:
    return {"messages": [("user", text)]}


def use_tools(text: str) -> Any:
    return tool_agent.invoke(asked(text))


writer = create_agent(model, [add], name="writer")


def nest(name: str) -> Any:
    """A graph whose node runs another agent: unnamed graph, unnamed agent, or named agent."""
    inner = {"graph": sync_graph, "agent": tool_agent, "named": writer}[name]

    def work(state: State) -> dict[str, Any]:
        if name == "graph":
            return {"answers": inner.invoke(state)["answers"]}
        return {"answers": [inner.invoke({"messages": [("user", state["text"])]})["messages"][-1].text]}

    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_edge(START, "work")
    return graph.compile()


nested_graphs = {name: nest(name) for name in ("graph", "agent", "named")}


def nested(text: str) -> Any:
    """`NEST=agent` says which."""
    return nested_graphs[text.rpartition("NEST=")[2]].invoke({"text": text, "answers": []})


@tool
def consult(question: str) -> str:
    """Ask the writer, from inside a tool."""
    return str(writer.invoke(asked(question))["messages"][-1].text)


boss = create_agent(model, [consult], name="boss")


def consulting(text: str) -> Any:
    return boss.invoke(asked(text))["messages"][-1].text


def raw_call(state: State) -> dict[str, Any]:
    answer = raw.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": prompt(state, "raw")}]
    )
    return {"answers": [answer.choices[0].message.content]}


raw = openai.OpenAI(api_key="sk-the-users-own")
raw_graph = build_graph(raw_call, call("review"))


def bare_client(text: str) -> Any:
    """A node that calls the SDK itself."""
    return raw_graph.invoke({"text": text, "answers": []})


sum_up = tool(add)


def think(state: MessagesState) -> dict[str, Any]:
    return {"messages": [model.bind_tools([sum_up]).invoke(state["messages"])]}


def act(state: MessagesState) -> dict[str, Any]:
    """Calls its tool itself, as LangGraph's own introduction does."""
    calls = getattr(state["messages"][-1], "tool_calls", [])
    return {"messages": [ToolMessage(str(sum_up.invoke(call["args"])), tool_call_id=call["id"]) for call in calls]}


def build_loop() -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", act)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


loop_graph = build_loop()


def add_by_hand(task: str) -> str:
    """A graph of one's own whose node calls the tools."""
    return str(loop_graph.invoke(asked(task))["messages"][-1].text)


AGENTS = {
    "sync": synchronous,
    "stream": stream,
    "threads": threads,
    "async": asynchronous,
    "async_stream": async_stream,
}


def answer(task: dict[str, str]) -> Any:
    """All kinds in one agent; for the asynchronous ones an awaitable comes back."""
    return AGENTS[task["kind"]](task["text"])


def add_with_tools(task: str) -> str:
    """An agent with tools, given a task as text."""
    return str(use_tools(task)["messages"][-1].text)


summarising = SummarizationMiddleware(model, trigger=("messages", 5), keep=("messages", 2))
forgetful = create_agent(model, [add], middleware=[summarising])


def summarised(task: str) -> str:
    """An agent that asks for a title first, and for a summary of its own history once that is long."""
    model.invoke(f"Give this conversation a title of five words at most: {task}")
    return str(forgetful.invoke(asked(task))["messages"][-1].text)


@functools.cache
def _cache_answers() -> None:
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import set_llm_cache

    set_llm_cache(InMemoryCache())


def cached(text: str) -> str:
    """An agent whose client answers a question that it knows from a cache."""
    _cache_answers()
    return str(model.invoke(text).content)
