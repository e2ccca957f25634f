"""The LangChain adapter meets the specification of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypedDict

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from lightningrl_langchain import LangChainAdapter

from lightningrl.testing.adapter_conformance import AdapterConformance

# As users write it: one model, made at import time, with their own key.
model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")


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
    return lambda state: {"answers": [*state["answers"], "".join(chunk.text for chunk in model.stream(prompt(state, role)))]}


def astream_call(role: str) -> Callable[[State], Any]:
    async def node(state: State) -> Any:
        return {"answers": [*state["answers"], "".join([chunk.text async for chunk in model.astream(prompt(state, role))])]}

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


def sync(text: str) -> Any:
    return sync_graph.invoke({"text": text, "answers": []})


async def async_(text: str) -> Any:
    return await async_graph.ainvoke({"text": text, "answers": []})


def stream(text: str) -> Any:
    return list(stream_graph.stream({"text": text, "answers": []}, stream_mode="messages"))


async def async_stream(text: str) -> Any:
    return [part async for part in async_stream_graph.astream({"text": text, "answers": []}, stream_mode=["updates", "messages"])]


def threads(text: str) -> Any:
    return threads_graph.invoke({"text": text, "answers": []})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Fail."""
    raise ValueError("the tool is broken")


tool_agent = create_agent(model, [add, fail])


def use_tools(text: str) -> Any:
    return tool_agent.invoke({"messages": [("user", text)]})


class TestLangChainAdapter(AdapterConformance):
    ends_on_tool_error: ClassVar[bool] = True

    def create_adapter(self) -> LangChainAdapter:
        return LangChainAdapter()

    def agent(self, kind: str) -> Callable[[str], Any]:
        return {"sync": sync, "async": async_, "stream": stream, "async_stream": async_stream, "threads": threads}[kind]

    def tool_agent(self) -> Callable[[str], Any]:
        return use_tools
