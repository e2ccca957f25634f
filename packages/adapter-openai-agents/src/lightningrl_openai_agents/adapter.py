"""The instrumentor: wraps the runner's entry points, the models, and the places where a tool's exception can be seen.

    Runner.run, run_sync, run_streamed     opens a run; our hooks stand before the user's      who speaks, tools" ends
    Model.get_response, stream_response    a chat span, current while the request leaves       whose HTTP request it is
    ToolContext.from_agent_context         the first thing that happens in a tool's own task   whose exception it is
    attach_error_to_current_span           called in `except` blocks of the SDK                exceptions, unknown tools
    ToolTimeoutError                       made in the tool's own task                         timeouts
    MCPUtil.invoke_mcp_tool                gets a server whose results we see                  errors of MCP servers

The SDK"s tracing is not used: the user may switch it off, or replace its processors.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import wrapt
from agents import RunHooks, RunResultStreaming, exceptions
from agents.lifecycle import RunHooksBase
from agents.mcp import MCPUtil
from agents.run import Runner
from agents.tool_context import ToolContext
from agents.util import _error_tracing
from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from lightningrl.call_origin import CallOrigin
from lightningrl.instrumentation import Args, Kwargs, Patches, make_tracer
from lightningrl_openai_agents.models import RecordedModels, WatchedServer, model_classes
from lightningrl_openai_agents.recorder import Recorder, Run
from lightningrl_openai_agents.tools import text_of

__all__ = ["OpenAIAgentsAdapter"]


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


class OpenAIAgentsAdapter(BaseInstrumentor):  # type: ignore[misc]
    """Names the agent of each call, nests the spans, reports tools. `uninstrument` restores what it wrapped."""

    _recorder: Recorder | None = None
    _models: RecordedModels | None = None
    _patches: Patches | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("openai-agents >= 0.6, < 0.25",)

    def call_origin(self) -> CallOrigin | None:
        """Name the caller: the agent's model, or a bare client during the agent's turn."""
        return None if self._recorder is None else self._recorder.call_origin()

    def _instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider") or trace.get_tracer_provider()
        self._recorder = Recorder(make_tracer(provider, "lightningrl_openai_agents"))
        self._models = RecordedModels(self._recorder)
        self._patches = Patches()
        self._patches.wrap(Runner, "run", self._run)
        self._patches.wrap(Runner, "run_sync", self._run_sync)
        self._patches.wrap(Runner, "run_streamed", self._run_streamed)
        self._patches.wrap(ToolContext, "from_agent_context", self._enter_tool)
        self._patches.wrap(_error_tracing, "attach_error_to_current_span", self._attach_error)
        if hasattr(exceptions, "ToolTimeoutError"):
            self._patches.wrap(exceptions.ToolTimeoutError, "__init__", self._time_out)
        self._patches.wrap(MCPUtil, "invoke_mcp_tool", self._watch_mcp)
        self._wrap_models()

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._patches is not None:
            self._patches.restore()
        self._recorder = self._models = self._patches = None

    # --- runs ---

    async def _run(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        with self._opened(args, kwargs) as (recorder, run):
            result = await wrapped(*args, **kwargs)
        recorder.close_run(run, None)
        return result

    def _run_sync(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        with self._opened(args, kwargs) as (recorder, run):
            result = wrapped(*args, **kwargs)
        recorder.close_run(run, None)
        return result

    def _run_streamed(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """The run goes on in a task, which takes this context along."""
        with self._opened(args, kwargs) as (recorder, run):
            result: RunResultStreaming = wrapped(*args, **kwargs)
        task = getattr(result, "run_loop_task", None) or getattr(result, "_run_impl_task", None)
        if task is not None:
            task.add_done_callback(lambda done: recorder.close_run(run, None if done.cancelled() else done.exception()))
        stream_events = result.stream_events

        async def closing() -> AsyncIterator[Any]:
            """Close the run with its events: their reader goes on before the task is done."""
            error: Exception | None = None
            try:
                async with aclosing(stream_events()) as events:  # type: ignore[type-var]  # it is a generator
                    async for event in events:
                        yield event
            except Exception as raised:
                error = raised
                raise
            finally:
                if error is not None or result.is_complete:
                    recorder.close_run(run, error)

        vars(result)["stream_events"] = closing
        return result

    @contextmanager
    def _opened(self, args: Args, kwargs: Kwargs) -> Iterator[tuple[Recorder, Run]]:
        """Open a run, which is current inside of the block and closed where that raises."""
        recorder = self._require_recorder()
        self._wrap_models()
        run = recorder.open_run(getattr(args[0] if args else kwargs.get("starting_agent"), "name", None))
        theirs = kwargs.get("hooks")
        if theirs is None or isinstance(theirs, RunHooksBase):  # anything else is a mistake that the SDK explains
            kwargs["hooks"] = RecordingHooks(recorder, run, theirs)
        token = recorder.running.set(run)
        try:
            yield recorder, run
        except BaseException as error:
            recorder.close_run(run, error)
            raise
        finally:
            recorder.running.reset(token)

    # --- tools ---

    def _enter_tool(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        context = wrapped(*args, **kwargs)
        recorder = self._require_recorder()
        run = recorder.running.get()
        if run is not None:
            arguments = str(getattr(context, "tool_arguments", ""))
            recorder.using.set(recorder.find_tool(run, context.tool_call_id, context.tool_name, arguments))
        return context

    def _attach_error(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        recorder, raised = self._require_recorder(), sys.exception()
        if raised is not None:
            recorder.note_error(raised)
        else:
            message = args[0] if args else kwargs["error"]
            if message["message"] == "Tool not found":
                recorder.report_unknown(str((message.get("data") or {}).get("tool_name")))
        return wrapped(*args, **kwargs)

    def _time_out(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> None:
        wrapped(*args, **kwargs)
        self._require_recorder().note_error(instance)

    def _watch_mcp(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """The SDK turns a result that says `isError` into plain output."""
        recorder = self._require_recorder()
        if args:
            args = (WatchedServer(args[0], recorder), *args[1:])
        elif "server" in kwargs:
            kwargs["server"] = WatchedServer(kwargs["server"], recorder)
        return wrapped(*args, **kwargs)

    # --- wrapping ---

    def _wrap_models(self) -> None:
        """The models that have been defined since the last time, too."""
        models, patches = self._models, self._patches
        if models is None or patches is None:
            return
        for model in model_classes():
            for method, wrapper in (("get_response", models.get_response), ("stream_response", models.stream_response)):
                if method in vars(model) and not isinstance(vars(model)[method], wrapt.FunctionWrapper):
                    patches.wrap(model, method, wrapper)

    def _require_recorder(self) -> Recorder:
        return self._recorder or Recorder(trace.NoOpTracer())  # a call under way while the adapter was switched off
