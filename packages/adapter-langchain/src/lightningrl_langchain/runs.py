"""LangChain's tree of runs, as far as it says who speaks: graphs, their nodes, and the role of each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.trace import Span

__all__ = ["Run", "start_run"]

MIDDLEWARE_HOOKS: Final = frozenset({"before_agent", "before_model", "after_model", "after_agent"})
"""A middleware's nodes are called `{middleware}.{hook}`."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A run of a chain, a model or a tool, while it runs."""

    parent: Run | None
    name: str
    namespace: str
    """LangGraph's `langgraph_checkpoint_ns`: `write:uuid|model:uuid`."""
    agent_name: str | None
    """`create_agent(name=…)`, handed down through the metadata."""
    owns_agent_name: bool
    """This run is the named agent, not something inside it."""
    is_node: bool
    is_agent_model: bool
    """The node of `create_agent` that calls the model, and reads structured answers that are asked for as tools
    (`ToolStrategy`)."""
    source: str | None
    """Part of LangChain that makes the calls below on an agent's behalf: `summarization`, `tool_selection`."""
    role: str | None
    """Role of the calls below: a named agent, or the path of nodes (`write`, `write/model`); for an agent's
    middleware `agent.middleware`, which is not the agent."""
    offered: frozenset[str] = frozenset()
    """Names of the tools in a model's request."""
    tool_call_id: str | None = None
    """The call that a tool answers; None = it was called without one."""
    is_tool: bool = False
    nameless: set[str] = field(default_factory=set[str])
    """Names of the tools that a node called without the id of a call."""
    span: Span | None = None
    started_ns: int = field(default_factory=time.time_ns)

    @property
    def host(self) -> Run | None:
        """The innermost run, this one included, that is a node or has a span: what the spans of this run hang below."""
        run: Run | None = self
        while run is not None and not run.is_node and run.span is None:
            run = run.parent
        return run


def start_run(parent: Run | None, name: str, metadata: Mapping[str, Any]) -> Run:
    """Place a run in the tree."""
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    agent_name = metadata.get("lc_agent_name")
    is_node = name == metadata.get("langgraph_node") and (parent is None or parent.namespace != namespace)
    owns = agent_name is not None and (parent is None or parent.agent_name != agent_name)
    role, source = (None, None) if parent is None else (parent.role, parent.source)
    if is_node:
        path = "/".join(part.partition(":")[0] for part in namespace.split("|") if part) or name
        role = parent.agent_name if parent is not None and parent.owns_agent_name else path
        middleware, _, hook = name.rpartition(".")
        source = middleware if hook in MIDDLEWARE_HOOKS else None
        if source is not None and role == agent_name:
            role = f"{role}.{source}"
    maker = metadata.get("lc_source")
    if maker and role and source is None:
        source, role = str(maker), f"{role}.{maker}"
    return Run(
        parent=parent,
        name=name,
        namespace=namespace,
        agent_name=agent_name,
        owns_agent_name=owns,
        is_node=is_node,
        is_agent_model=is_node and name == "model" and metadata.get("ls_integration") == "langchain_create_agent",
        source=source,
        role=role,
    )
