"""Keeps the runs, starts and ends their spans, and knows who is calling a model in this context. Needs no tracing of
the SDK"s own.

Run ─┬─ invoke_agent triage ─── chat gpt-4o ─── execute_tool transfer_to_writer
     └─ invoke_agent writer ─── chat gpt-4o ─── execute_tool consult ─── Run (agent as a tool) ─── …
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agents.exceptions import ModelBehaviorError
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from lightningrl import conventions
from lightningrl.call_origin import CallOrigin
from lightningrl.instrumentation import close_tool_span, fail_span, open_chat_span, open_tool_span
from lightningrl.types import ToolStatus
from lightningrl_openai_agents.tools import asked_tools, field_of, hosted_tools, status_of_error, text_of

__all__ = ["Chat", "Recorder", "Run", "Tool"]


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """One `Runner.run`, `run_sync` or `run_streamed`, while it runs. An agent that is a tool has a run of its own."""

    parent: Context | None
    """Where its spans hang: the tool that runs it, else whatever is current where it was called."""
    agent: str | None
    """Whose turn it is."""
    agent_span: Span | None = None
    chat: Chat | None = None
    """The latest model call."""
    tools: dict[str, Tool] = field(default_factory=dict[str, "Tool"])
    """Tools by the id of the call, from the model's answer until the end of the run."""
    is_over: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Chat:
    """One call of a model."""

    span: Span
    agent: str | None
    handoffs: frozenset[str] = frozenset()
    """Names of the tools that hand over to another agent."""


@dataclass(kw_only=True, slots=True, eq=False)
class Tool:
    """A tool call, from the model's answer until it has an outcome."""

    run: Run
    id: str
    """Empty = the SDK does not say."""
    name: str
    arguments: str
    chat: Chat | None
    """The call that asked for it; None in a run that was resumed."""
    span: Span | None = None
    """None = it has not started."""
    error: BaseException | None = None
    """The exception that it raised, whether the SDK turned that into a text or not."""
    is_settled: bool = False


class Recorder:
    """One per `instrument`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.running: ContextVar[Run | None] = ContextVar("lightningrl_openai_agents_run", default=None)
        self.calling: ContextVar[Chat | None] = ContextVar("lightningrl_openai_agents_call", default=None)
        self.using: ContextVar[Tool | None] = ContextVar("lightningrl_openai_agents_tool", default=None)

    def call_origin(self) -> CallOrigin | None:
        """The model call of this context; else, for a bare client in a tool, a guardrail or a hook, the agent whose
        turn it is."""
        chat = self.calling.get()
        if chat is not None:
            context = chat.span.get_span_context()
            return CallOrigin(agent=chat.agent, trace_id=context.trace_id, span_id=context.span_id)
        run = self.running.get()
        return None if run is None or run.is_over or run.agent is None else CallOrigin(agent=run.agent)

    # --- runs and turns ---

    def open_run(self, agent: str | None) -> Run:
        tool, parent = self.using.get(), otel_context.get_current()
        if tool is not None and tool.span is not None and not tool.is_settled and tool.run is self.running.get():
            parent = trace.set_span_in_context(tool.span)
        return Run(parent=parent, agent=agent)

    def close_run(self, run: Run, error: BaseException | None) -> None:
        """Whatever has no outcome yet gets one. May be called twice."""
        if run.is_over:
            return
        run.is_over = True
        for tool in run.tools.values():
            if tool.span is not None:
                self.settle(tool, "" if error is None else f"{type(error).__name__}: {error}")
        self._report_broken_handoff(run, error)
        self.leave_agent(run, error)

    def enter_agent(self, run: Run, name: str) -> None:
        """Begin this agent's turn, with a span of its own."""
        if run.agent_span is not None and run.agent == name:
            return
        self.leave_agent(run)
        run.agent = name
        attributes = {conventions.OPERATION_NAME: conventions.INVOKE_AGENT, conventions.AGENT_NAME: name}
        run.agent_span = self._tracer.start_span(
            f"{conventions.INVOKE_AGENT} {name}", run.parent, attributes=attributes
        )

    def leave_agent(self, run: Run, error: BaseException | None = None) -> None:
        if run.agent_span is None:
            return
        if error is not None:
            fail_span(run.agent_span, type(error).__name__)
        run.agent_span.end()
        run.agent_span = None

    def hand_over(self, run: Run, to: str) -> None:
        """The first handoff that the model asked for has happened; the SDK ignores further ones."""
        for tool in self._pending_handoffs(run):
            self.start_tool(tool)
            self.settle(tool, json.dumps({"assistant": to}, ensure_ascii=False))
            break
        self.leave_agent(run)

    # --- models ---

    def open_chat(self, model: str, items: Iterable[Any], handoffs: Iterable[Any]) -> Chat:
        """`items`: the conversation so far, or what is new of it."""
        run = self.running.get()
        agent = None if run is None else run.agent
        if run is not None:
            self._report_refused(run, items)
            if run.agent is not None:
                self.enter_agent(run, run.agent)
        span = open_chat_span(self._tracer, model, agent, self._turn(run))
        names = frozenset(str(getattr(handoff, "tool_name", "")) for handoff in handoffs)
        chat = Chat(span=span, agent=agent, handoffs=names)
        if run is not None:
            run.chat = chat
        return chat

    def close_chat(self, chat: Chat, output: Iterable[Any] | None, error: BaseException | None = None) -> None:
        """`output`: the items of the answer; None = none came."""
        run = self.running.get()
        if error is not None:
            fail_span(chat.span, type(error).__name__)
        if run is not None:
            items = tuple(output or ())
            for asked in asked_tools(items):
                run.tools[asked.id] = Tool(run=run, id=asked.id, name=asked.name, arguments=asked.arguments, chat=chat)
            for hosted in hosted_tools(items):
                tool = Tool(run=run, id=hosted.id, name=hosted.name, arguments=hosted.arguments, chat=chat)
                self.start_tool(tool)
                self._close_tool(tool, hosted.status, hosted.result, "")
        chat.span.end()

    # --- tools ---

    def find_tool(self, run: Run, call_id: str | None, name: str, arguments: str) -> Tool:
        """The tool call that the model asked for, else a new one: of a resumed run, or of a kind of tool whose calls
        have no id."""
        asked = run.tools.get(call_id or "")
        if asked is not None and not asked.is_settled:
            return asked
        tool = Tool(run=run, id=call_id or "", name=name, arguments=arguments, chat=run.chat)
        run.tools[call_id or f"{name} {len(run.tools)}"] = tool
        return tool

    def find_started(self, run: Run, call_id: str | None, name: str) -> Tool | None:
        if call_id is not None:
            return run.tools.get(call_id)
        return next(
            (tool for tool in run.tools.values() if not tool.id and tool.name == name and not tool.is_settled), None
        )

    def start_tool(self, tool: Tool) -> None:
        if tool.span is not None:
            return
        role = tool.run.agent if tool.chat is None else tool.chat.agent
        below = self._turn(tool.run) if tool.chat is None else trace.set_span_in_context(tool.chat.span)
        tool.span = open_tool_span(self._tracer, tool.name, tool.arguments, call_id=tool.id, role=role, below=below)

    def settle(self, tool: Tool, result: str) -> None:
        """The tool has an outcome: what it raised says which. `result`: what the agent got, or what ended the run."""
        if tool.error is not None:
            self._close_tool(tool, status_of_error(tool.error, tool.name), result, type(tool.error).__name__)
        else:
            self._close_tool(tool, ToolStatus.UNKNOWN if tool.run.is_over else ToolStatus.OK, result, "")

    def note_error(self, error: BaseException) -> None:
        """An exception in the tool that runs in this context."""
        tool = self.using.get()
        if tool is not None and tool.run is self.running.get() and not tool.is_settled:
            tool.error = error

    def report_unknown(self, name: str) -> None:
        """The model asked for a tool that the agent does not have."""
        run = self.running.get()
        for tool in () if run is None else tuple(run.tools.values()):
            if tool.name == name and tool.span is None and not tool.is_settled:
                self.start_tool(tool)
                self._close_tool(tool, ToolStatus.UNKNOWN_TOOL, f"Tool {name} not found in agent {tool.run.agent}", "")
                return

    def _close_tool(self, tool: Tool, status: ToolStatus, result: str, error_type: str) -> None:
        if tool.span is None or tool.is_settled:
            return
        tool.is_settled = True
        close_tool_span(tool.span, status, result, error_type)

    def _pending_handoffs(self, run: Run) -> list[Tool]:
        return [tool for tool in run.tools.values() if tool.span is None and tool.chat is run.chat and is_handoff(tool)]

    def _report_broken_handoff(self, run: Run, error: BaseException | None) -> None:
        """Input that a handoff does not take ends the run, like any misbehaviour of the model."""
        pending = self._pending_handoffs(run)
        others = [tool for tool in run.tools.values() if tool.chat is run.chat and tool not in pending]
        if isinstance(error, ModelBehaviorError) and pending and not others:
            self.start_tool(pending[0])
            self._close_tool(pending[0], ToolStatus.INVALID_ARGUMENTS, text_of(str(error)), type(error).__name__)

    def _report_refused(self, run: Run, items: Iterable[Any]) -> None:
        """The model is told the outcome of tools that never started: a guardrail of the tool, or a person, has refused
        them. Of handoffs the SDK carries out the first alone."""
        for item in [item for item in items if field_of(item, "type") == "function_call_output"]:
            tool = run.tools.get(str(field_of(item, "call_id")))
            if tool is not None and tool.span is None and not is_handoff(tool):
                self.start_tool(tool)
                self._close_tool(tool, ToolStatus.ERROR, text_of(field_of(item, "output")), "")

    def _turn(self, run: Run | None) -> Context | None:
        if run is None:
            return None
        return run.parent if run.agent_span is None else trace.set_span_in_context(run.agent_span)


def is_handoff(tool: Tool) -> bool:
    return tool.chat is not None and tool.name in tool.chat.handoffs
