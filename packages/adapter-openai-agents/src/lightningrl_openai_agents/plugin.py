"""Plugin of this distribution: the `openai-agents` adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


def build_adapter() -> Any:
    """The adapter; the OpenAI Agents SDK is imported here and not before."""
    from lightningrl_openai_agents.adapter import OpenAIAgentsAdapter

    return OpenAIAgentsAdapter()


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="openai-agents", summary="OpenAI Agents SDK: agents, handoffs, sub-agents and tools", factory=build_adapter
    )
