"""Agents of frameworks that LightningRL has no adapter for, instrumented as their users do it. They know nothing of us.

`spanned…` have a hand-made tracer, in the GenAI conventions or in OpenInference's; `openinference_*` and
`pydantic_ai_*` are real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypedDict

import openai
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

client = openai.OpenAI(api_key="sk-the-users-own")
async_client = openai.AsyncOpenAI(api_key="sk-the-users-own")
ROLES = ("draft", "review")


class Framework:
    """A framework that makes spans, in one vocabulary or another."""

    def __init__(self, provider: trace.TracerProvider, vocabulary: str) -> None:
        self.tracer = provider.get_tracer("some.framework")
        self.is_openinference = vocabulary == "openinference"

    @contextmanager
    def agent(self, name: str) -> Iterator[None]:
        attributes = (
            {"openinference.span.kind": "AGENT", "agent.name": name}
            if self.is_openinference
            else {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
        )
        with self.tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes):
            yield

    @contextmanager
    def model(self) -> Iterator[trace.Span]:
        attributes = (
            {"openinference.span.kind": "LLM", "llm.model_name": "gpt-4o-mini"}
            if self.is_openinference
            else {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o-mini"}
        )
        with self.tracer.start_as_current_span("chat gpt-4o-mini", attributes=attributes) as span:
            yield span

    def tool(self, asked: Any, below: trace.Span, run: Callable[[], str]) -> str:
        name, arguments = asked.function.name, asked.function.arguments
        attributes = (
            {"openinference.span.kind": "TOOL", "tool.name": name, "tool_call.id": asked.id, "input.value": arguments}
            if self.is_openinference
            else {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.call.id": asked.id,
                "gen_ai.tool.call.arguments": arguments,
            }
        )
        with self.tracer.start_as_current_span(
            f"execute_tool {name}",
            trace.set_span_in_context(below),
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                result = run()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
                span.set_attribute(
                    "error.type",
                    {"TypeError": "invalid_arguments", "KeyError": "unknown_tool"}.get(type(error).__name__, "E"),
                )
                span.set_status(trace.StatusCode.ERROR)
            span.set_attribute("output.value" if self.is_openinference else "gen_ai.tool.call.result", result)
            return result


framework = Framework(trace.get_tracer_provider(), "genai")


def use(provider: trace.TracerProvider, vocabulary: str) -> None:
    global framework
    framework = Framework(provider, vocabulary)


def messages(text: str, role: str) -> Any:
    return [{"role": "user", "content": f"{text} ROLE={role}"}]


def ask(text: str, role: str) -> str:
    with framework.model():
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages(text, role))
    return answer.choices[0].message.content or ""


def sync(text: str) -> str:
    for role in ROLES:
        with framework.agent(role):
            said = ask(text, role)
    return said


async def asynchronous(text: str) -> str:
    for role in ROLES:
        with framework.agent(role), framework.model():
            answer = await async_client.chat.completions.create(model="gpt-4o-mini", messages=messages(text, role))
    return answer.choices[0].message.content or ""


def stream(text: str) -> str:
    for role in ROLES:
        with framework.agent(role), framework.model():
            chunks = client.chat.completions.create(model="gpt-4o-mini", messages=messages(text, role), stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return said


async def async_stream(text: str) -> str:
    for role in ROLES:
        with framework.agent(role), framework.model():
            chunks = await async_client.chat.completions.create(
                model="gpt-4o-mini", messages=messages(text, role), stream=True
            )
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    return said


def threads(text: str) -> str:
    for role in ROLES:
        with framework.agent(role), ThreadPoolExecutor(2) as pool:
            parts = [pool.submit(ask, f"{text} part {part}", role) for part in range(3)]
            said = " ".join(part.result() for part in parts)
    return said


def bare(text: str) -> str:
    """A client inside of an agent that no instrumentation knows of."""
    with framework.agent("draft"):
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages(text, "draft"))
    return answer.choices[0].message.content or ""


def add(a: int, b: int) -> str:
    if not isinstance(a, int):
        raise TypeError("a is no int")
    return str(a + b)


def fail() -> str:
    raise ValueError("it failed")


TOOLS: dict[str, Callable[..., str]] = {"add": add, "fail": fail}


def run_tool(name: str, arguments: str) -> str:
    return TOOLS[name](**json.loads(arguments))


def use_tools(text: str) -> str:
    history: list[Any] = [{"role": "user", "content": text}]
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in TOOLS]
    with framework.agent("worker"):
        while True:
            with framework.model() as span:
                message = (
                    client.chat.completions.create(model="gpt-4o-mini", messages=history, tools=tools)
                    .choices[0]
                    .message
                )
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for asked in message.tool_calls:
                function: Any = asked.function  # type: ignore[union-attr]
                result = framework.tool(asked, span, partial(run_tool, function.name, function.arguments))
                history.append({"role": "tool", "tool_call_id": asked.id, "content": result})


# --- whole programs, for workers: each sets up its telemetry as its documentation says


seen = InMemorySpanExporter()


def own_provider() -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    return provider


class Programs:
    """Set up once per process, at the first rollout."""

    lock = Lock()
    ready: str = ""
    agent: Any = None


def genai(text: str) -> str:
    with Programs.lock:
        if Programs.ready != "genai":
            trace.set_tracer_provider(own_provider())  # later than the agent's import
            use(trace.get_tracer_provider(), "genai")
            Programs.ready = "genai"
    said = {"sync": sync, "stream": stream, "threads": threads}[text.partition("KIND=")[2].partition(" ")[0]](text)
    assert isinstance(trace.get_tracer_provider(), TracerProvider) and seen.get_finished_spans(), (
        "the user's own exporter sees nothing"
    )
    return said


async def openinference_openai(text: str) -> str:
    """Hand-made agents around the real OpenInference instrumentation of the OpenAI client, with a provider that is not
    global."""
    if Programs.ready != "openai":
        from openinference.instrumentation.openai import OpenAIInstrumentor

        provider = own_provider()
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        use(provider, "openinference")
        Programs.ready = "openai"
    for role in ROLES:
        with framework.agent(role):
            answers = await asyncio.gather(
                *(
                    async_client.chat.completions.create(model="gpt-4o-mini", messages=messages(f"{text} {n}", role))
                    for n in range(2)
                )
            )
    return str(answers[0].choices[0].message.content)


def build_graph() -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode
    from openinference.instrumentation.langchain import LangChainInstrumentor

    if not LangChainInstrumentor().is_instrumented_by_opentelemetry:
        LangChainInstrumentor().instrument()

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool
    def fail() -> str:
        """Fail."""
        raise ValueError("it failed")

    model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")  # type: ignore[arg-type]

    def speak(role: str, speaker: Any) -> Any:
        def prompt(state: Any) -> Any:
            return [("system", f"ROLE={role}"), *state["messages"]]

        async def node(state: Any) -> Any:
            return {"messages": [await speaker.ainvoke(prompt(state))]}

        return node

    graph = StateGraph(MessagesState)
    graph.add_node("draft", speak("draft", model.bind_tools([add, fail])))
    graph.add_node("tools", ToolNode([add, fail], handle_tool_errors=True))
    graph.add_node("review", speak("review", model))
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "tools")
    graph.add_edge("tools", "review")
    graph.add_edge("review", END)
    return graph.compile()


async def openinference_langgraph(text: str) -> str:
    if Programs.ready != "langgraph":
        Programs.agent, Programs.ready = build_graph(), "langgraph"
    final = await Programs.agent.ainvoke({"messages": [("user", text)]})
    return str(final["messages"][-1].content)


async def pydantic_ai(text: str) -> str:
    """Two Pydantic AI agents, of which one is the other's tool, with its own GenAI-convention spans."""
    if Programs.ready != "pydantic":
        from pydantic_ai import Agent

        Agent.instrument_all()
        helper = Agent("openai-chat:gpt-4o-mini", name="helper", instructions="ROLE=helper")
        boss = Agent("openai-chat:gpt-4o-mini", name="boss", instructions="ROLE=boss", retries=3)

        @boss.tool_plain
        async def consult(question: str) -> str:
            return str((await helper.run(question)).output)

        @boss.tool_plain
        def add(a: int, b: int) -> int:
            return a + b

        Programs.agent, Programs.ready = boss, "pydantic"
    return str((await Programs.agent.run(text)).output)


async def openinference_parallel(text: str) -> str:
    """LangGraph nodes that call the model at the same time."""
    if Programs.ready != "parallel":
        from langchain_openai import ChatOpenAI
        from langgraph.graph import START, StateGraph
        from openinference.instrumentation.langchain import LangChainInstrumentor

        LangChainInstrumentor().instrument()
        model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")  # type: ignore[arg-type]

        def speak(role: str) -> Any:
            async def node(state: Any) -> Any:
                await model.ainvoke(f"{state['text']} ROLE={role}")
                return {}

            return node

        graph = StateGraph(State)
        for role in ("left", "middle", "right"):
            graph.add_node(role, speak(role))
            graph.add_edge(START, role)
        Programs.agent, Programs.ready = graph.compile(), "parallel"
    await Programs.agent.ainvoke({"text": text})
    return text


class State(TypedDict):
    text: str


async def pydantic_ai_structured(text: str) -> str:
    from pydantic import BaseModel
    from pydantic_ai import Agent

    class Place(BaseModel):
        city: str

    Agent.instrument_all()
    guide = Agent("openai-chat:gpt-4o-mini", name="guide", output_type=[Place, str])
    output = (await guide.run(text)).output
    return output.city if isinstance(output, Place) else str(output)
