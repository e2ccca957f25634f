"""Plugin of this distribution: the `openai-agents` adapter. The SDK is imported when it is made, and not before."""

from __future__ import annotations

from collections.abc import Iterable

import lightningrl_openai_agents
from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="openai-agents",
        summary="OpenAI Agents SDK: agents, handoffs, sub-agents and tools",
        factory=lambda: lightningrl_openai_agents.OpenAIAgentsAdapter(),
    )
