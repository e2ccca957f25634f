"""The public name and where it is defined."""

from lightningrl_openai_agents.adapter import OpenAIAgentsAdapter as OpenAIAgentsAdapter

__all__: list[str]
