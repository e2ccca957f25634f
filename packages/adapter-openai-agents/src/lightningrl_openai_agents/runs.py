"""State of one `Runner.run`: the agent whose turn it is, the open model call, the tools that were asked for.

Run ─┬─ invoke_agent triage ─── chat gpt-4o ─── execute_tool transfer_to_writer
     └─ invoke_agent writer ─── chat gpt-4o ─── execute_tool consult ─── Run (agent as a tool) ─── …
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span

__all__ = ["Chat", "Run", "Tool"]


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
