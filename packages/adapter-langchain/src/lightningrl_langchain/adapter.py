"""The instrumentor: one callback handler in every LangChain callback manager, of all threads and tasks. It keeps the
tree of runs, starts and ends spans, and knows which chat model is calling in this context."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.errors import GraphBubbleUp
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.trace import Span, Tracer

from lightningrl import conventions
from lightningrl.call_origin import CallOrigin
from lightningrl.instrumentation import close_tool_span, fail_span, make_tracer, open_chat_span, open_tool_span
from lightningrl.types import ToolStatus
from lightningrl_langchain.runs import Run, start_run
from lightningrl_langchain.tools import (
    AskedTools,
    GraphTool,
    answer_of,
    asked_tools,
    has_structured_response,
    iterate_tool_messages,
    offered_names,
    status_of_error,
    status_of_output,
    text_of,
)

__all__ = ["LangChainAdapter"]


class Handler(BaseCallbackHandler):
    """Inert until `activate`."""

    run_inline = True  # before the request leaves, in its context
    raise_error = False

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._runs: dict[UUID, Run] = {}
        self._opens_host = threading.RLock()  # a node may call models from threads of its own
        self._asked = AskedTools()
        self._calling: ContextVar[UUID | None] = ContextVar("lightningrl_langchain_call", default=None)

    def activate(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def deactivate(self) -> None:
        self._tracer = None
        self._runs.clear()
        self._asked.clear()

    @property
    def ignore_llm(self) -> bool:
        return self._tracer is None

    ignore_chain = ignore_chat_model = ignore_llm
    ignore_agent = ignore_llm  # this is what switches tools, too

    def call_origin(self) -> CallOrigin | None:
        """The chat model that is calling in this context; else the node that runs in it."""
        calling = self._calling.get()
        run = None if calling is None else self._runs.get(calling)
        if run is None:
            callbacks = (var_child_runnable_config.get() or {}).get("callbacks")
            parent_id = callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None
            run = None if parent_id is None else self._runs.get(parent_id)
        if run is None:
            return None
        if calling is None or run.span is None or run is not self._runs.get(calling):
            return CallOrigin(agent=run.role)
        context = run.span.get_span_context()
        return CallOrigin(agent=run.role, trace_id=context.trace_id, span_id=context.span_id)

    # --- models ---

    def on_chat_model_start(
        self, serialized: dict[str, Any] | None, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        run = self._start(run_id, "", kwargs)
        params = kwargs.get("invocation_params") or {}
        run.offered = offered_names(params)
        model = str(params.get("model") or (kwargs.get("metadata") or {}).get("ls_model_name") or "")
        run.span = open_chat_span(self._require_tracer(), model, run.role, self._below(run))
        self._calling.set(run_id)

    def on_llm_start(
        self, serialized: dict[str, Any] | None, prompts: list[str], *, run_id: UUID, **kwargs: Any
    ) -> None:
        self.on_chat_model_start(serialized, [], run_id=run_id, **kwargs)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._end_call(run_id)
        if run is None or run.span is None:
            return
        for asked in asked_tools(response, run.span, run):
            self._asked.add(asked)
            if not asked.is_valid:
                self._report_unrun(asked, ToolStatus.INVALID_ARGUMENTS, result="")
        run.span.end()

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._end_call(run_id)
        if run is not None and run.span is not None:
            fail_span(run.span, type(error).__name__)
            run.span.end()

    def _end_call(self, run_id: UUID) -> Run | None:
        if self._calling.get() == run_id:
            self._calling.set(None)
        return self._runs.pop(run_id, None)

    # --- graphs, nodes and other chains ---

    def on_chain_start(self, serialized: dict[str, Any] | None, inputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._start(run_id, str(kwargs.get("name") or ""), kwargs)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        if run.is_node:
            self._report_messages(run, outputs)
        if run.span is not None:
            run.span.end()

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None and run.is_agent_model:
            self._report_structured_error(error)
        if run is not None and not isinstance(
            error, Exception
        ):  # cancelled: LangChain tells nothing of tools in flight
            for tool_id, tool in list(self._runs.items()):
                if tool.is_tool and tool.parent is run:
                    self._end_tool(tool_id, ToolStatus.UNKNOWN, result="", error_type=type(error).__name__)
        if run is not None and run.span is not None:
            if not isinstance(error, GraphBubbleUp):  # an interrupt is control flow
                fail_span(run.span, type(error).__name__)
            run.span.end()

    # --- tools ---

    def on_tool_start(self, serialized: dict[str, Any] | None, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        name = str(kwargs.get("name") or (serialized or {}).get("name") or "")
        asked = self._asked.get(kwargs.get("tool_call_id"))
        if asked is not None:
            asked.has_run = True
        run = self._start(run_id, "", kwargs)
        run.tool_call_id, run.is_tool = kwargs.get("tool_call_id"), True
        if run.tool_call_id is None and run.host is not None:
            run.host.nameless.add(name)
        inputs = kwargs.get("inputs")
        arguments = asked.arguments if asked is not None else input_str if inputs is None else text_of(inputs)
        run.span = self._open_tool_span(name, arguments, kwargs.get("tool_call_id"), asked, run)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        run = self._runs.get(run_id)
        answer = answer_of(output, None if run is None else run.tool_call_id)
        self._end_tool(run_id, status_of_output(answer), result=text_of(answer))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_tool(
            run_id, status_of_error(error), result=f"{type(error).__name__}: {error}", error_type=type(error).__name__
        )

    def _end_tool(self, run_id: UUID, status: ToolStatus, *, result: str, error_type: str = "") -> None:
        run = self._runs.pop(run_id, None)
        if run is not None and run.span is not None:
            close_tool_span(run.span, status, result, error_type)

    def _report_unrun(self, asked: GraphTool, status: ToolStatus, *, result: str) -> None:
        """A tool call that never reached a tool: LangChain makes no run for it."""
        asked.has_run = True
        span = self._open_tool_span(asked.name, asked.arguments, asked.id, asked, None)
        close_tool_span(span, status, result, "")

    def _report_messages(self, run: Run, outputs: Any) -> None:
        """Tool messages that no tool wrote: there is none of that name, something answered in a tool's place (a
        middleware, the node's own code), or the call was an answer with a structure (`ToolStrategy`)."""
        answered = [(self._asked.get(message.tool_call_id), message) for message in iterate_tool_messages(outputs)]
        unrun = [(asked, message) for asked, message in answered if asked is not None and not asked.has_run]
        for asked, message in unrun:
            if asked.name in run.nameless:
                continue  # a tool told of it itself
            if not asked.is_offered:
                status = ToolStatus.UNKNOWN_TOOL
            elif message.status == "error":
                status = ToolStatus.ERROR
            elif run.is_agent_model and asked.node is run:
                status = ToolStatus.OK if has_structured_response(outputs) else rejection(len(unrun))
            else:
                status = ToolStatus.OK
            self._report_unrun(asked, status, result=text_of(message))

    def _report_structured_error(self, error: BaseException) -> None:
        """LangChain raises for such an answer with `ToolStrategy(handle_errors=False)`."""
        message = getattr(error, "ai_message", None)
        names = {getattr(error, "tool_name", None), *getattr(error, "tool_names", ())}
        calls = [call for call in message.tool_calls if call["name"] in names] if isinstance(message, AIMessage) else []
        for call in calls:
            asked = self._asked.get(call["id"])
            if asked is not None and not asked.has_run:
                self._report_unrun(asked, rejection(len(calls)), result=str(error))

    def _open_tool_span(
        self, name: str, arguments: str, call_id: Any, asked: GraphTool | None, run: Run | None
    ) -> Span:
        role = asked.role if asked is not None else None if run is None else run.role
        below = self._below(run) if asked is None else trace.set_span_in_context(asked.chat_span)
        call_id = str(call_id) if call_id else None
        return open_tool_span(self._require_tracer(), name, arguments, call_id=call_id, role=role, below=below)

    # --- runs and spans ---

    def _start(self, run_id: UUID, name: str, kwargs: Mapping[str, Any]) -> Run:
        parent_id = kwargs.get("parent_run_id")
        parent = None if parent_id is None else self._runs.get(parent_id)
        run = self._runs[run_id] = start_run(parent, name, kwargs.get("metadata") or {})
        return run

    def _below(self, run: Run | None) -> Context | None:
        """The innermost node's `invoke_agent` span, which is opened for the first span in it; None = the context's
        own."""
        host = None if run is None else run.host
        if host is None:
            return None
        with self._opens_host:
            if host.span is None:
                role = host.role or host.name
                attributes = {conventions.OPERATION_NAME: conventions.INVOKE_AGENT, conventions.AGENT_NAME: role}
                host.span = self._require_tracer().start_span(
                    f"{conventions.INVOKE_AGENT} {role}",
                    self._below(host.parent),
                    attributes=attributes,
                    start_time=host.started_ns,
                )
        return trace.set_span_in_context(host.span)

    def _require_tracer(self) -> Tracer:
        return self._tracer or trace.NoOpTracer()


def rejection(answers: int) -> ToolStatus:
    """Fault of structured answers that LangChain rejects: there are several, or the only one does not fit."""
    return ToolStatus.INVALID_ARGUMENTS if answers == 1 else ToolStatus.ERROR


class LangChainAdapter(BaseInstrumentor):  # type: ignore[misc]
    """Names the role of each call, nests the spans, reports tools. `uninstrument` makes it inert."""

    _handler: Handler | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("langchain-core >= 1.4, < 2",)

    def call_origin(self) -> CallOrigin | None:
        """Name the caller: the running chat model, or, for a bare client inside of a node, the node."""
        return None if self._handler is None else self._handler.call_origin()

    def _instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider") or trace.get_tracer_provider()
        if self._handler is None:
            self._handler = Handler()
            # The default of the variable is what makes it active in every context; a hook cannot be unregistered.
            variable: ContextVar[Any] = ContextVar("lightningrl_langchain_handler", default=self._handler)
            register_configure_hook(variable, inheritable=True)
        self._handler.activate(make_tracer(provider, "lightningrl_langchain"))

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._handler is not None:
            self._handler.deactivate()
