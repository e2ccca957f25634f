"""AutoGen agents of every kind, as users write them: one client made at import time, with their own key. They know
nothing of us."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

model = OpenAIChatCompletionClient(model="gpt-4o-mini", api_key="sk-the-users-own")


def assistant(name: str, *, stream: bool = False, **options: Any) -> AssistantAgent:
    """An agent that says its name in its prompt."""
    return AssistantAgent(name, model, system_message=f"ROLE={name} speaks.", model_client_stream=stream, **options)


def text_of(result: TaskResult) -> str:
    return str(getattr(result.messages[-1], "content", ""))


# --- one agent after the other ---


async def asynchronous(text: str, *, stream: bool = False) -> str:
    draft = await assistant("draft", stream=stream).run(task=text)
    return text_of(await assistant("review", stream=stream).run(task=f"{text} {text_of(draft)}"))


async def async_stream(text: str) -> list[str]:
    said = [type(event).__name__ async for event in assistant("draft", stream=True).run_stream(task=text)]
    return said + [type(event).__name__ async for event in assistant("review", stream=True).run_stream(task=text)]


def synchronous(text: str) -> str:
    return asyncio.run(asynchronous(text))


def stream(text: str) -> list[str]:
    return asyncio.run(async_stream(text))


def threads(text: str) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return [one.result() for one in [pool.submit(synchronous, f"{text} part {part}") for part in range(3)]]


# --- teams ---


def pair(**options: Any) -> RoundRobinGroupChat:
    members: list[Any] = [assistant("writer", stream=True), assistant("critic")]
    return RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(4), **options)


async def round_robin(text: str) -> str:
    return text_of(await pair().run(task=text))


SELECTOR_PROMPT = "ROLE=SelectorGroupChatManager {roles} {participants} {history}"


def selecting(**options: Any) -> SelectorGroupChat:
    members: list[Any] = [assistant("writer", description="NEXT=writer"), assistant("critic")]
    end = MaxMessageTermination(3)
    return SelectorGroupChat(
        members,
        model,
        selector_prompt=SELECTOR_PROMPT,
        allow_repeated_speaker=True,
        termination_condition=end,
        **options,
    )


async def selector(text: str) -> str:
    return text_of(await selecting().run(task=text))


async def swarm(text: str) -> str:
    """The boss hands over to the helper."""
    boss = assistant("boss", handoffs=["helper"])
    team = Swarm([boss, assistant("helper")], max_turns=3)
    return text_of(await team.run(task=text))


async def society(text: str) -> str:
    """A team inside of an agent, which speaks for itself at the end."""
    inner = pair()
    whole = SocietyOfMindAgent("society", inner, model, response_prompt=f"ROLE=society {text}")
    return text_of(await whole.run(task=text))


# --- a runtime for all ---

runtimes: dict[asyncio.AbstractEventLoop, SingleThreadedAgentRuntime] = {}


def shared_runtime() -> SingleThreadedAgentRuntime:
    """Lazily started by whoever comes first, and used by everyone on this loop, as a web server would."""
    loop = asyncio.get_running_loop()
    if loop not in runtimes:
        runtimes.clear()
        runtimes[loop] = SingleThreadedAgentRuntime()
        runtimes[loop].start()
    return runtimes[loop]


async def shared(text: str) -> str:
    return text_of(await pair(runtime=shared_runtime()).run(task=text))


async def shared_selector(text: str) -> str:
    return text_of(await selecting(runtime=shared_runtime()).run(task=text))


def takes_runtimes() -> bool:
    """Whether this AutoGen's teams do."""
    return "runtime" in inspect.signature(RoundRobinGroupChat.__init__).parameters


# --- tools ---


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Fail."""
    raise ValueError("the tool is broken")


async def slow() -> str:
    """Take too long."""
    raise TimeoutError("nobody answered")


TOOLS = [FunctionTool(tool, description=str(tool.__doc__)) for tool in (add, fail, slow)]


async def reflect(text: str, *, stream: bool = False) -> str:
    """Calls tools, then says what they mean."""
    return text_of(await assistant("calculator", stream=stream, tools=TOOLS, reflect_on_tool_use=True).run(task=text))


async def reflect_stream(text: str) -> str:
    return await reflect(text, stream=True)


def use_tools(text: str) -> str:
    return asyncio.run(reflect(text))


def use_tools_streaming(text: str) -> str:
    return asyncio.run(reflect_stream(text))


def use_tools_in_a_team(text: str) -> str:
    async def run() -> str:
        agent = assistant("calculator", tools=TOOLS, reflect_on_tool_use=True)
        return text_of(
            await RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(2)).run(task=text)
        )

    return asyncio.run(run())


def use_workbench(text: str) -> str:
    """The same tools, out of a workbench."""
    from autogen_core.tools import StaticWorkbench

    agent = assistant("calculator", workbench=StaticWorkbench(TOOLS), reflect_on_tool_use=True)  # type: ignore[arg-type]
    return text_of(asyncio.run(agent.run(task=text)))


def use_foreign_workbench(text: str) -> str:
    """Tools that live elsewhere, as those of an MCP server: the workbench knows their results, nothing else of ours
    sees them."""
    from autogen_core.tools import StaticWorkbench, TextResultContent, ToolResult, Workbench

    class Remote(Workbench):
        async def list_tools(self) -> Any:
            return await StaticWorkbench(TOOLS).list_tools()  # type: ignore[arg-type]

        async def call_tool(
            self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
        ) -> Any:
            content = "the server is down" if name == "fail" else str(sum(arguments.values()))
            return ToolResult(name=name, result=[TextResultContent(content=content)], is_error=name == "fail")

        async def start(self) -> None: ...
        async def stop(self) -> None: ...
        async def reset(self) -> None: ...
        async def save_state(self) -> Any:
            return {}

        async def load_state(self, state: Any) -> None: ...

    agent = assistant("calculator", workbench=Remote(), reflect_on_tool_use=True)
    return text_of(asyncio.run(agent.run(task=text)))


async def consult(text: str) -> str:
    """An agent as another one's tool."""
    from autogen_agentchat.tools import AgentTool

    helper = assistant("helper", description="Helps.")
    boss = assistant("boss", tools=[AgentTool(helper)], reflect_on_tool_use=True)
    return text_of(await boss.run(task=text))


async def consult_team(text: str) -> str:
    """A team as an agent's tool."""
    from autogen_agentchat.tools import TeamTool

    boss = assistant("boss", tools=[TeamTool(pair(), name="ask_team", description="Ask.")], reflect_on_tool_use=True)
    return text_of(await boss.run(task=text))


# --- an agent that calls the SDK itself ---

raw = openai.AsyncOpenAI(api_key="sk-the-users-own")


class RawAgent(BaseChatAgent):
    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        content = f"{getattr(messages[-1], 'content', '') if messages else ''} ROLE={self.name}"
        answer = await raw.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": content}])
        return Response(chat_message=TextMessage(content=answer.choices[0].message.content or "", source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


async def ask(text: str) -> None:
    """A call outside of any agent."""
    await raw.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": text}])


async def interleaved(text: str) -> None:
    """Two agents' streams read in turns, and one that nobody reads to its end."""
    streams = [assistant(name, stream=True).run_stream(task=text) for name in ("draft", "review")]
    while streams:
        for one in list(streams):
            if isinstance(await anext(one), TaskResult):
                await one.aclose()
                streams.remove(one)
                await ask(text)
    quitter = assistant("quitter", stream=True).run_stream(task=text)
    async for event in quitter:
        if type(event).__name__ == "ModelClientStreamingChunkEvent":
            break
    await ask(text)
    await quitter.aclose()


async def bare_client(text: str) -> str:
    members: list[Any] = [RawAgent("raw", "calls"), assistant("review")]
    return text_of(await RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3)).run(task=text))


# --- no agents of AgentChat: a runtime and message handlers ---


@dataclass
class Question:
    text: str


class Asker(RoutedAgent):
    @message_handler
    async def ask(self, message: Question, ctx: MessageContext) -> None:
        await model.create([UserMessage(content=message.text, source="user")])
        await self.publish_message(message, DefaultTopicId())


class Listener(RoutedAgent):
    @message_handler
    async def hear(self, message: Question, ctx: MessageContext) -> None:
        await model.create([UserMessage(content=message.text, source="user")])


async def core_agents(text: str) -> None:
    runtime = SingleThreadedAgentRuntime()
    await Asker.register(runtime, "asker", lambda: Asker("asks"))
    await Listener.register(runtime, "listener", lambda: Listener("listens"))
    await runtime.add_subscription(TypeSubscription("default", "listener"))
    await runtime.add_subscription(TypeSubscription("other", "listener"))
    runtime.start()
    await runtime.send_message(Question(text), AgentId("asker", "default"))
    await runtime.publish_message(Question(text), TopicId("other", "default"))
    await runtime.stop_when_idle()


AGENTS: dict[str, Callable[[str], Any]] = {
    "async": asynchronous,
    "async_stream": async_stream,
    "round_robin": round_robin,
    "selector": selector,
    "shared": shared,
    "shared_selector": shared_selector,
    "swarm": swarm,
    "reflect_stream": reflect_stream,
    "consult": consult,
    "sync": synchronous,
    "stream": stream,
    "threads": threads,
}


async def answer(task: dict[str, str]) -> Any:
    """The asynchronous kinds in one agent, which run on the worker's loop."""
    return await AGENTS[task["kind"]](task["text"])


def answer_sync(task: dict[str, str]) -> Any:
    """The synchronous kinds in one agent: each rollout in a thread, with loops of its own."""
    return AGENTS[task["kind"]](task["text"])


def add_with_tools(task: str) -> str:
    """An agent with tools, given a task as text."""
    return use_tools(task)
