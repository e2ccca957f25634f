"""The instrumentor: AutoGen's clients, tools, agents and runtimes, wrapped at their classes, so that objects made
whenever are covered.

runtime.send_message ─► queue ─► BaseAgent.on_message     messages: the sender's context goes along
  agent.run, on_messages_stream                           roles: who speaks
    client.create, create_stream ─► HTTP                  models: a span, known before the request leaves
    tool.run_json, run_json_stream                        tools: what became of what the model asked for
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import autogen_agentchat.agents
import autogen_core.tools
from autogen_agentchat.agents import BaseChatAgent
from autogen_core import BaseAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool
from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.trace import Tracer

from lightningrl.call_origin import CallOrigin
from lightningrl.carried_context import carry_senders_context
from lightningrl.instrumentation import Patches, Wrapper, make_tracer
from lightningrl_autogen.models import Models
from lightningrl_autogen.roles import Roles
from lightningrl_autogen.tools import Tools

__all__ = ["AutoGenAdapter"]

CLIENTS: Final = {
    "autogen_ext.models.openai._openai_client": ("BaseOpenAIChatCompletionClient",),
    "autogen_ext.models.anthropic._anthropic_client": (
        "BaseAnthropicChatCompletionClient",
        "AnthropicChatCompletionClient",
    ),
}
"""Classes whose `create` is one request. Calls of other clients carry the role alone."""
NATIVE_TOOL_SPANS: Final = ("autogen_core.tools._base", "autogen_ext.tools.mcp._workbench")
"""Modules that open AutoGen's own span of a tool call, since AutoGen 0.6.2."""


class AutoGenAdapter(BaseInstrumentor):  # type: ignore[misc]
    """Names the role of each call, carries attribution through message queues, reports tools. `uninstrument` makes it
    inert."""

    _patches: Patches | None = None
    _models: Models | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("autogen-core >= 0.4.5, < 0.8", "autogen-agentchat >= 0.4.5, < 0.8")

    def call_origin(self) -> CallOrigin | None:
        """Name the caller: the model client's call, or, for a bare client inside of an agent, the agent."""
        return None if self._models is None else self._models.call_origin()

    def _instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider") or trace.get_tracer_provider()
        self._patches = Patches()
        self._models = patch_autogen(self._patches, make_tracer(provider, "lightningrl_autogen"))

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._patches is not None:
            self._patches.restore()
        self._patches = self._models = None


def patch_autogen(patches: Patches, tracer: Tracer) -> Models:
    """Wrap everything; returns the wrappers of the models, which know the current call."""

    def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
        if name in vars(owner):  # an inherited method is wrapped where it is defined
            patches.wrap(owner, name, wrapper)

    roles = Roles(watch=lambda event: tools.watch(event))
    tools = Tools(tracer, roles.current)
    models = Models(tracer, roles, tools)

    carry_senders_context(patches, SingleThreadedAgentRuntime, BaseAgent, roles.handling)

    wrap(BaseChatAgent, "run", roles.run)
    wrap(BaseChatAgent, "run_stream", roles.stream)
    for name in autogen_agentchat.agents.__all__:
        agent = getattr(autogen_agentchat.agents, name)
        if isinstance(agent, type) and issubclass(agent, BaseChatAgent) and agent is not BaseChatAgent:
            wrap(agent, "on_messages", roles.run)
            wrap(agent, "on_messages_stream", roles.stream)

    wrap(BaseTool, "run_json", tools.run_json)
    stream_tool = getattr(autogen_core.tools, "BaseStreamTool", None)  # since AutoGen 0.6.2
    if stream_tool is not None:
        wrap(stream_tool, "run_json_stream", tools.run_json_stream)
    for module in NATIVE_TOOL_SPANS:
        patches.when_imported(module, lambda imported: wrap(imported, "trace_tool_span", tools.skip_native_span))

    def patch_client(imported: Any) -> None:
        for name in CLIENTS[imported.__name__]:
            client = getattr(imported, name, None)
            if client is not None:
                wrap(client, "create", models.create)
                wrap(client, "create_stream", models.create_stream)

    for module in CLIENTS:
        patches.when_imported(module, patch_client)
    return models
