"""Run hooks: our view of a run, then the user's own hooks, all of them, whatever the SDK's version calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agents import RunHooks

from lightningrl_openai_agents.recorder import Recorder
from lightningrl_openai_agents.runs import Run
from lightningrl_openai_agents.tools import text_of

__all__ = ["RecordingHooks"]


class RecordingHooks(RunHooks[Any]):
    """Stands in for the hooks that the user has given to the run. A hook that is not overridden here goes straight to
    the user's."""

    def __init__(self, recorder: Recorder, run: Run, theirs: Any) -> None:
        self._recorder = recorder
        self._run = run
        self._theirs = RunHooks[Any]() if theirs is None else theirs

    async def on_agent_start(self, context: Any, agent: Any, *args: Any) -> None:
        self._recorder.enter_agent(self._run, agent.name)
        await self._theirs.on_agent_start(context, agent, *args)

    async def on_llm_start(self, context: Any, agent: Any, *args: Any) -> None:
        self._recorder.enter_agent(self._run, agent.name)  # a resumed run starts without on_agent_start
        await self._theirs.on_llm_start(context, agent, *args)

    async def on_agent_end(self, context: Any, agent: Any, *args: Any) -> None:
        await self._theirs.on_agent_end(context, agent, *args)
        self._recorder.leave_agent(self._run)

    async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any, *args: Any) -> None:
        self._recorder.hand_over(self._run, to_agent.name)
        await self._theirs.on_handoff(context, from_agent, to_agent, *args)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any, *args: Any) -> None:
        call_id = getattr(context, "tool_call_id", None)
        arguments = text_of(getattr(context, "tool_arguments", ""))
        name = getattr(context, "tool_name", tool.name)
        self._recorder.start_tool(self._recorder.find_tool(self._run, call_id, name, arguments))
        await self._theirs.on_tool_start(context, agent, tool, *args)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any, *args: Any) -> None:
        started = self._recorder.find_started(self._run, getattr(context, "tool_call_id", None), tool.name)
        if started is not None:
            self._recorder.settle(started, text_of(result))
        await self._theirs.on_tool_end(context, agent, tool, result, *args)


def pass_on(name: str) -> Callable[..., Any]:
    async def call(self: RecordingHooks, *args: Any, **kwargs: Any) -> None:
        await getattr(self._theirs, name)(*args, **kwargs)

    return call


for hook in dir(RunHooks):
    if hook.startswith("on_") and hook not in vars(RecordingHooks):
        setattr(RecordingHooks, hook, pass_on(hook))
